"""What `forerun bench serve` may be told, and the arms that follow from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from forerun.cli.bench.shared import non_negative, whole_numbers
from forerun.cli.options import DRAFTER_HELP, LLMOptions
from forerun.config import AUTO
from forerun.errors import ConfigError
from forerun.fields import Checked, option
from forerun.files.json_file import Fields
from forerun.results import TargetFacts
from forerun.results.write import without_folders

if TYPE_CHECKING:
    from forerun.bench.serve.arm import Arm
    from forerun.bench.serve.inside import Inside
    from forerun.bench.serve.load import Load
    from forerun.bench.serve.rows import Goal
    from forerun.bench.serve.server import Server

_NO_SPECULATION: Mapping[str, Any] = {"speculative": False}
_GOALS = ("first", "token", "whole")
OF_MODEL = ("num_draft_tokens", "dtype", "quantize", "cache_memory", "prefix_reuse")
"""Of LLMOptions, what can be said of the server that is started."""


@dataclass(frozen=True, slots=True)
class BenchServeOptions(Checked):
    """Which servers, under which loads, how asked."""

    url: Sequence[str] = option((), "A server that runs already; NAME= before it names it in tables.", metavar="URL")
    ask_for: str | None = option(
        None, "What requests to --url call the model.", metavar="NAME", default_text="the first that the server lists"
    )
    api_key: str | None = option(None, "Sent to every server as a bearer token.", metavar="KEY", default_text="none")
    fields: str = option("{}", "JSON object of fields that all requests have; null leaves one out.", metavar="JSON")
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
    in_process: bool = option(
        False,
        "Measure the engine of MODEL in this process too: by its driver thread, and one at a time by LLM.generate.",
    )
    large_bodies: float = option(
        0.0,
        "Measure every server also while bodies of so many MB, which it must refuse, come one after another.",
        low=0,
    )
    baseline: str | None = option(
        None,
        "The server that the others are compared with.",
        metavar="NAME",
        default_text="the driver thread, if there is one, else the last server",
    )
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
    request_limit: float = option(600.0, "Seconds that a request may take.", low=0, above=True)
    load_limit: float = option(
        600.0, "Seconds in which the server that is started must have loaded.", low=0, above=True
    )

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
        from forerun.bench.serve.rows import Goal

        wrong = ConfigError(
            f"--goodput is {self.goodput!r}, but must be {', '.join(_GOALS)} with milliseconds, such as "
            "first:500,token:50."
        )
        found: dict[str, float] = {}
        for entry in self.goodput.split(",") if self.goodput else ():
            name, _, value = entry.strip().partition(":")
            try:
                found[name] = float(value) / 1e3
            except ValueError:
                raise wrong from None
            if name not in _GOALS or not found[name] > 0:
                raise wrong
        return Goal(*(found.get(name) for name in _GOALS))

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

    def extra_fields(self) -> Mapping[str, Any]:
        """Raises ConfigError where --fields is no JSON object."""
        return Fields.parse(self.fields, "--fields", ConfigError, remedy='Give an object such as {"top_k": 40}.').values

    def chosen_baseline(self, servers: Sequence[str]) -> str:
        """A place. Raises ConfigError for one that does not take part."""
        from forerun.bench.serve.arm import DRIVER

        known = [*servers, *([DRIVER] if self.in_process else [])]
        if self.baseline is not None and self.baseline not in known:
            raise ConfigError(f"--baseline is {self.baseline!r}, but there are {', '.join(known)}.")
        return self.baseline or known[-1]

    def settings(self) -> dict[str, Any]:
        """What the results tell of them."""
        names = ("requests", "temperature", "fields", "goodput", "large_bodies", "ignore_eos")
        told = {name: getattr(self, name) for name in names}
        return {name: value for name, value in told.items() if value not in (None, "{}", False, 0)}

    def arms(self, name: str, server: Server) -> list[Arm]:
        """The modes in which a server takes part."""
        from forerun.bench.serve.arm import PLAIN, Arm

        made = [Arm(name, "", server.send)]
        if self.plain:
            made.append(Arm(name, PLAIN, partial(server.send, **_NO_SPECULATION)))
        if self.large_bodies:
            for kind, content in large_bodies(server.model or "", self.large_bodies).items():
                made.append(
                    Arm(
                        name,
                        f"beside bodies of {self.large_bodies:g} MB, {kind}",
                        server.send,
                        partial(server.post_for_ever, "/v1/completions", content),
                    )
                )
        return made

    def arms_inside(self, inside: Inside) -> list[Arm]:
        """The engine in this process in its modes."""
        from forerun.bench.serve.arm import DRIVER, GENERATE, PLAIN, Arm

        modes: dict[str, Mapping[str, Any]] = {"": {}} | ({PLAIN: _NO_SPECULATION} if self.plain else {})
        made = [Arm(DRIVER, mode, partial(inside.send, **more)) for mode, more in modes.items()]
        one = [Arm(GENERATE, mode, partial(inside.generate, **more), None, True) for mode, more in modes.items()]
        return made + one


@dataclass(frozen=True, slots=True)
class Served:
    """The server that is started.

    Attributes:
        model, drafter, settings, max_batch: its flags.
    """

    model: str
    drafter: str | None
    settings: LLMOptions
    max_batch: int

    def arguments(self, largest_body: float) -> list[str]:
        """Of `forerun serve`. largest_body: MB that it must read."""
        made = asdict(self.settings)
        flags: dict[str, Any] = {
            "drafter": self.drafter,
            **{name: made[name] for name in OF_MODEL},
            "max_batch": self.max_batch,
            "max_body": largest_body + 1 if largest_body else None,
        }
        given = [
            part
            for name, value in flags.items()
            if value is not None
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        return [self.model, *given]

    def facts(self) -> TargetFacts:
        """For results."""
        return TargetFacts(without_folders(self.model), self.settings.dtype, self.settings.quantize)


def large_bodies(model: str, megabytes: float) -> dict[str, bytes]:
    """Bodies of this size by what they hold: a text that fits no context, and as many token ids."""
    size = int(megabytes * 1e6)
    text = ("All work and no play makes a dull sentence. " * (size // 44 + 1))[:size]
    ids = [17 * i % 1000 for i in range(size // 4)]
    bodies = {"text": text, "token ids": ids}
    return {
        kind: json.dumps({"model": model, "max_tokens": 1, "prompt": prompt}, separators=(",", ":")).encode()
        for kind, prompt in bodies.items()
    }
