"""`forerun bench serve`: servers that speak OpenAI's API under load, by what their clients see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.report import Report
from forerun.cli import options
from forerun.cli.bench.serve_options import BenchServeOptions
from forerun.cli.bench.shared import Compared, JsonFile, begin, print_report, say
from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import open_llm
from forerun.cli.options import LLMOptions
from forerun.cli.served_drafters import served_drafters
from forerun.config import OFF
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.serve.asks import Ask
    from forerun.bench.serve.load import Arm, Measured

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Start `forerun serve` with this model, on a free port, and measure it; beside --url if there is one.",
        show_default="without --url: smollm2 if it is fetched, else bundled",
    ),
]
OWN = "forerun"
"""The name of the server that is started here."""
_COMPARED = Compared(prompts="code,prose,copying", max_tokens=96)
_PANEL = "The server that is started"


@with_flags
def serve(
    *,
    model: Model = None,
    asked: Annotated[BenchServeOptions, Flags()],
    compared: Annotated[Compared, Flags("prompts", "num_prompts", "max_tokens", base=_COMPARED)],
    settings: Annotated[LLMOptions, Flags("quantize", panel=_PANEL)],
    threads: options.Threads = None,
    json: JsonFile = None,
) -> None:
    """Servers under load: time to the first token, per token, between pieces, whole; speed, goodput, client's CPU."""
    from forerun.bench.serve import rows as bench
    from forerun.bench.serve.asks import Prompts
    from forerun.bench.serve.load import DRIVER
    from forerun.bench.serve.server import client_library
    from forerun.results import TargetFacts
    from forerun.results.write import without_folders

    client_library()
    loads, goal, others = asked.loads(), asked.goal(), asked.servers()
    model = chosen_model(None, "MODEL") if model is None and not others else model
    own = Own(model, asked.drafter, settings.quantize)
    if model is None:
        _refuse_unused(asked, own)
    elif asked.ask_for is not None and not others:
        raise ConfigError("--ask-for is for a server at --url, and there is none. Leave it out.")
    places = [*([OWN] if model else []), *others]
    baseline, prompts = DRIVER if asked.in_process else places[-1], Prompts.of(compared.cases())
    watch = begin(threads, json)
    asks = prompts.asks(compared.max_tokens, asked.temperature, asked.ignore_eos)
    measured = asyncio.run(_measured(asked, own, others, asks, threads))
    if not measured:
        raise KeyboardInterrupt
    rows = bench.rows(measured, goal, baseline)
    about = f"{min(row.samples for row in rows)} rounds, answers up to {compared.max_tokens} tokens"
    title = f"{', '.join(places)}: {about}; 90th percentiles in parentheses"
    report = Report(
        "serve",
        [bench.table(title, rows, baseline)],
        TargetFacts(without_folders(model), settings.dtype, own.quantize) if model else None,
        settings={"loads": [load.name for load in loads], "baseline": baseline, **asked.settings()},
        prompts=prompts.facts(bench.prompt_tokens(measured)),
        rows=[row for each in measured * (not asked.no_details) for row in bench.run_rows(each, asked.temperature)],
        figures=bench.figures(rows),
    )
    print_report(report, watch, json)


@dataclass(frozen=True, slots=True)
class Own:
    """The server that is started, by its flags. model: None where none is."""

    model: str | None
    drafter: str | None
    quantize: str | None

    def arguments(self) -> list[str]:
        """Of `forerun serve`. No answer is to find a prompt that another has computed."""
        flags = {"drafter": self.drafter, "quantize": self.quantize, "prefix-reuse": OFF}
        given = [(f"--{name}", str(value)) for name, value in flags.items() if value is not None]
        return [str(self.model), *(part for each in given for part in each)]

    def opened(self) -> Any:
        """The same engine in this process."""
        say(f"loading {self.model}")
        drafters = served_drafters([self.drafter] if self.drafter else [], None, None)
        more = {"quantize": self.quantize, "prefix_reuse": OFF}
        return open_llm(str(self.model), drafters, chat=False, adapter=None, **more)


def _refuse_unused(asked: BenchServeOptions, own: Own) -> None:
    """Raise ConfigError where something is said of a server that is not started."""
    if asked.in_process:
        raise ConfigError("--in-process needs a MODEL, which is loaded here and by a server that is started.")
    if own != Own(None, None, None):
        raise ConfigError(
            "--drafter and --quantize are for a server that is started here, but there is no MODEL. Give one, or "
            "leave them out."
        )


async def _measured(
    asked: BenchServeOptions, own: Own, others: Mapping[str, str], asks: Sequence[Ask], threads: int | None
) -> list[Measured]:
    """Everything is started, measured and ended."""
    from forerun.bench.serve.inside import Inside
    from forerun.bench.serve.load import DRIVER, PLAIN, Arm, measure
    from forerun.bench.serve.server import Server
    from forerun.bench.serve.started import started

    arms: list[Arm] = []

    def add(place: str, send: Callable[..., Any]) -> None:
        arms.append(Arm(place, "", send))
        if asked.plain:
            arms.append(Arm(place, PLAIN, partial(send, speculative=False)))

    async with AsyncExitStack() as stack:
        urls = {name: Server(url, asked.ask_for, asked.api_key) for name, url in others.items()}
        if own.model is not None:
            address = stack.enter_context(started(own.arguments(), threads, say))
            urls = {OWN: Server(address, None, asked.api_key), **urls}
        for name, server in urls.items():
            add(name, (await stack.enter_async_context(server)).send)
        if asked.in_process:
            add(DRIVER, stack.enter_context(Inside(own.opened())).send)
        return await measure(arms, asked.loads(), asks, asked.requests, asked.rounds, say)
