"""`forerun bench serve`: measure servers of OpenAI's API under load, from the clients' side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli.bench.shared import CompareOptions, JsonFile, begin, non_negative, print_report, say, whole_numbers
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import open_llm
from forerun.cli.options import DRAFTER_HELP, LLMOptions, Threads, chosen_model, model_argument, named_drafter
from forerun.cli.serve import served_drafters
from forerun.config import AUTO, OFF
from forerun.errors import ConfigError
from forerun.lab.bench.tables import Report
from forerun.utils.fields import Checked, option

if TYPE_CHECKING:
    from forerun.lab.bench.serve.load import Load, MeasuredLoad, ServingArm
    from forerun.lab.bench.serve.requests import LoadRequest
    from forerun.lab.bench.serve.rows import Goal


@dataclass(frozen=True, slots=True)
class BenchServeOptions(Checked):
    """Servers, loads and requests of `forerun bench serve`."""

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
    draft_model: str | None = option(
        None, "A draft model of the server that is started.", metavar="MODEL", default_text="what auto finds"
    )
    no_details: bool = option(False, "Leave single requests out of the results.")

    def loads(self) -> list[Load]:
        """Return closed loops, then open ones. Raises ConfigError."""
        from forerun.lab.bench.serve.load import Load

        closed = self.concurrency if self.concurrency or self.rate else "1,4,16"
        made = [Load(concurrency=each) for each in whole_numbers(closed, "--concurrency")] if closed else []
        rates = non_negative(self.rate, "--rate") if self.rate else []
        if not all(rates):
            raise ConfigError(f"--rate is {self.rate!r}, but must be numbers above 0 with commas between them.")
        return made + [Load(rate=each) for each in rates]

    def goal(self) -> Goal:
        """Parse --goodput. Raises ConfigError."""
        from forerun.lab.bench.serve.rows import GOALS

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
        """Return name -> address. Raises ConfigError."""
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
        """Return the settings that are recorded in the results."""
        values = {name: getattr(self, name) for name in ("requests", "temperature", "goodput", "ignore_eos")}
        return {name: value for name, value in values.items() if value not in (None, False, 0)}


Model = Annotated[
    str | None,
    model_argument(
        "Start `forerun serve` with this model, on a free port, and measure it; beside --url if there is one.",
        "without --url: smollm2 if it is fetched, else bundled",
    ),
]
OWN = "forerun"
"""The name of the server that is started here."""
_COMPARED = CompareOptions(prompts="code,prose,copying", max_tokens=96)
_PANEL = "The server that is started"


@with_flags
def bench_serve(
    *,
    model: Model = None,
    options: Annotated[BenchServeOptions, Flags()],
    compared: Annotated[CompareOptions, Flags("prompts", "num_prompts", "max_tokens", base=_COMPARED)],
    settings: Annotated[LLMOptions, Flags("quantize", panel=_PANEL)],
    threads: Threads = None,
    json: JsonFile = None,
) -> None:
    """Measure servers under load: times to the first token, per token, between chunks; speed, goodput, client's CPU."""
    from forerun.lab.bench.serve import rows as bench
    from forerun.lab.bench.serve.load import DRIVER
    from forerun.lab.bench.serve.requests import Prompts
    from forerun.lab.bench.serve.servers import client_library
    from forerun.lab.results.files import without_folders
    from forerun.lab.results.schema import TargetFacts

    client_library()
    loads = options.loads()
    goal = options.goal()
    urls = options.servers()
    model = chosen_model(None, "MODEL") if model is None and not urls else model
    own = OwnServer(model, named_drafter(options.drafter, options.draft_model), settings.quantize)
    if model is None:
        _refuse_unused(options, own)
    elif options.ask_for is not None and not urls:
        raise ConfigError("--ask-for is for a server at --url, and there is none. Leave it out.")
    names = [*([OWN] if model else []), *urls]
    baseline = DRIVER if options.in_process else names[-1]
    prompts = Prompts.of(compared.cases())
    watch = begin(threads, json)
    asks = prompts.requests(compared.max_tokens, options.temperature, options.ignore_eos)
    measured = asyncio.run(_measured(options, own, urls, asks, threads))
    if not measured:
        raise KeyboardInterrupt
    rows = bench.rows(measured, goal, baseline)
    about = f"{min(row.samples for row in rows)} rounds, answers up to {compared.max_tokens} tokens"
    title = f"{', '.join(names)}: {about}; 90th percentiles in parentheses"
    report = Report(
        "serve",
        [bench.serve_table(title, rows, baseline)],
        TargetFacts(without_folders(model), settings.dtype, own.quantize) if model else None,
        settings={"loads": [load.name for load in loads], "baseline": baseline, **options.settings()},
        prompts=prompts.facts(bench.prompt_tokens(measured)),
        rows=[
            row
            for each in measured * (not options.no_details)
            for row in bench.serve_run_rows(each, options.temperature)
        ],
        figures=bench.figures(rows),
    )
    print_report(report, watch, json)


@dataclass(frozen=True, slots=True)
class OwnServer:
    """The server that is started, by its flags. model: None where none is."""

    model: str | None
    drafter: str | None
    quantize: str | None

    def arguments(self) -> list[str]:
        """Return the arguments of `forerun serve`; without prefix reuse, so that answers are independent."""
        flags = {"drafter": self.drafter, "quantize": self.quantize, "prefix-reuse": OFF}
        given = [(f"--{name}", str(value)) for name, value in flags.items() if value is not None]
        return [str(self.model), *(part for each in given for part in each)]

    def opened(self) -> Any:
        """Open the same engine in this process."""
        say(f"loading {self.model}")
        drafters = served_drafters([self.drafter] if self.drafter else [], None, None)
        more = {"quantize": self.quantize, "prefix_reuse": OFF}
        return open_llm(str(self.model), drafters, chat=False, adapter=None, **more)


def _refuse_unused(options: BenchServeOptions, own: OwnServer) -> None:
    """Raise ConfigError if an option is for a server that is not started."""
    if options.in_process:
        raise ConfigError("--in-process needs a MODEL, which is loaded here and by a server that is started.")
    if own != OwnServer(None, None, None):
        raise ConfigError(
            "--drafter and --quantize are for a server that is started here, but there is no MODEL. Give one, or "
            "leave them out."
        )


async def _measured(
    options: BenchServeOptions,
    own: OwnServer,
    urls: Mapping[str, str],
    asks: Sequence[LoadRequest],
    threads: int | None,
) -> list[MeasuredLoad]:
    """Start the servers, measure them, and stop them."""
    from forerun.lab.bench.serve.load import DRIVER, PLAIN, ServingArm, measure_loads
    from forerun.lab.bench.serve.servers import InProcessEngine, MeasuredServer, started

    arms: list[ServingArm] = []

    def add(name: str, send: Callable[..., Any]) -> None:
        arms.append(ServingArm(name, "", send))
        if options.plain:
            arms.append(ServingArm(name, PLAIN, partial(send, speculative=False)))

    async with AsyncExitStack() as stack:
        servers = {name: MeasuredServer(url, options.ask_for, options.api_key) for name, url in urls.items()}
        if own.model is not None:
            address = stack.enter_context(started(own.arguments(), threads, say))
            servers = {OWN: MeasuredServer(address, None, options.api_key), **servers}
        for name, server in servers.items():
            add(name, (await stack.enter_async_context(server)).send)
        if options.in_process:
            add(DRIVER, stack.enter_context(InProcessEngine(own.opened())).send)
        return await measure_loads(arms, options.loads(), asks, options.requests, options.rounds, say)
