"""What `forerun bench serve` may be told, and the loads and servers that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.cli.bench.shared import non_negative, whole_numbers
from forerun.cli.options import DRAFTER_HELP
from forerun.config import AUTO
from forerun.errors import ConfigError
from forerun.fields import Checked, option

if TYPE_CHECKING:
    from forerun.bench.serve.load import Load
    from forerun.bench.serve.rows import Goal


@dataclass(frozen=True, slots=True)
class BenchServeOptions(Checked):
    """Which servers, under which loads, how asked."""

    url: Sequence[str] = option((), "A server that runs already; NAME= before it names it in tables.", metavar="URL")
    ask_for: str | None = option(
        None, "What requests to --url call the model.", metavar="NAME", default_text="the first that the server lists"
    )
    api_key: str | None = option(None, "Sent to every server as a bearer token.", metavar="KEY", default_text="none")
    concurrency: str | None = option(
        None,
        "Closed loops: so many requests are open at any time.",
        metavar="N,...",
        default_text="1,4,16, unless there is --rate",
    )
    rate: str | None = option(
        None, "Open loops: so many requests a second, at random moments.", metavar="FLOAT,...", default_text="none"
    )
    requests: int = option(
        4, "Requests of each round for every one that is open at once; of an open loop, all of them.", low=1
    )
    rounds: int = option(4, "Interleaved rounds of every server and mode.", low=1)
    temperature: float = option(0.0, "Of all requests; above 0 each has a seed of its own.", low=0, high=2)
    ignore_eos: bool = option(False, "Let answers go on past the end of text; not every server knows the field.")
    plain: bool = option(
        False, "Ask every server without speculation too, by the field `speculative: false` of forerun's."
    )
    in_process: bool = option(False, "Measure the engine of MODEL in this process too, without HTTP.")
    goodput: str | None = option(
        None,
        "Milliseconds that a good request keeps: to the first token, per token, and whole, such as first:500,token:50.",
        metavar="GOAL,...",
        default_text="none",
    )
    drafter: str | None = option(
        None, f"Of the server that is started: {DRAFTER_HELP}", metavar="DRAFTER", default_text=AUTO
    )
    no_details: bool = option(False, "Leave single requests out of the results.")

    def loads(self) -> list[Load]:
        """Closed loops, then open ones. Raises ConfigError."""
        from forerun.bench.serve.load import Load

        closed = self.concurrency if self.concurrency or self.rate else "1,4,16"
        made = [Load(concurrency=each) for each in whole_numbers(closed, "--concurrency")] if closed else []
        rates = non_negative(self.rate, "--rate") if self.rate else []
        if not all(rates):
            raise ConfigError(f"--rate is {self.rate!r}, but must be numbers above 0 with commas between them.")
        return made + [Load(rate=each) for each in rates]

    def goal(self) -> Goal:
        """Raises ConfigError where --goodput cannot be read."""
        from forerun.bench.serve.rows import GOALS

        found: dict[str, float] = {}
        for entry in self.goodput.split(",") if self.goodput else ():
            name, _, value = entry.strip().partition(":")
            try:
                found[GOALS[name]] = float(value) / 1e3
            except (KeyError, ValueError):
                found[name] = 0.0
        if not all(seconds > 0 for seconds in found.values()):
            raise ConfigError(
                f"--goodput is {self.goodput!r}, but must be {', '.join(GOALS)} with milliseconds, such as "
                "first:500,token:50."
            )
        return found

    def servers(self) -> dict[str, str]:
        """Name -> address. Raises ConfigError."""
        found: dict[str, str] = {}
        for given in self.url:
            before, sign, after = given.partition("=")
            name, url = (before, after) if sign and "/" not in before else (given.rpartition("://")[2], given)
            if name in found or not name:
                raise ConfigError(
                    f"--url is {given!r}: two servers have the same name, or one has none. Give NAME=URL."
                )
            found[name] = url
        return found

    def settings(self) -> dict[str, Any]:
        """What the results tell of them."""
        told = {name: getattr(self, name) for name in ("requests", "temperature", "goodput", "ignore_eos")}
        return {name: value for name, value in told.items() if value not in (None, False, 0)}
