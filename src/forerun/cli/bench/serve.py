"""`forerun bench serve`: servers that speak OpenAI's API under load, by what their clients see."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.bench.report import Report
from forerun.cli import options
from forerun.cli.bench.serve_options import OF_MODEL, BenchServeOptions, Served
from forerun.cli.bench.shared import Compared, JsonFile, begin, print_report, say
from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import open_llm
from forerun.cli.options import LLMOptions
from forerun.cli.served_drafters import served_drafters
from forerun.config import OFF, EngineConfig
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.serve.arm import Arm
    from forerun.bench.serve.asks import Prompts
    from forerun.bench.serve.measure import Measured

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
_SETTINGS = LLMOptions(prefix_reuse=OFF)
"""No answer is to find a prompt that another has computed."""
_COMPARED = Compared(prompts="code,prose,copying", max_tokens=96)
_PANEL = "The server that is started"


@with_flags
def serve(
    *,
    model: Model = None,
    asked: Annotated[BenchServeOptions, Flags()],
    compared: Annotated[Compared, Flags("prompts", "num_prompts", "max_tokens", base=_COMPARED)],
    settings: Annotated[LLMOptions, Flags(*OF_MODEL, base=_SETTINGS, panel=_PANEL)],
    engine: Annotated[EngineConfig, Flags("max_batch", panel=_PANEL)],
    threads: options.Threads = None,
    json: JsonFile = None,
    markdown: options.Markdown = False,
) -> None:
    """Servers under load: time to the first token, per token, between pieces, whole; speed, goodput, client's CPU."""
    from forerun.bench.serve.asks import Prompts
    from forerun.bench.serve.server import client_library

    client_library()
    loads, goal, others = asked.loads(), asked.goal(), asked.servers()
    if model is None and not others:
        model = chosen_model(None, "MODEL")
    if model is None:
        _refuse_unused(asked, settings, engine)
    elif asked.ask_for is not None and not others:
        raise ConfigError("--ask-for is for a server at --url, and there is none. Leave it out.")
    served = None if model is None else Served(model, asked.drafter, settings, engine.max_batch)
    places = [*([OWN] if served else []), *others]
    baseline, prompts = asked.chosen_baseline(places), Prompts.of(compared.cases())
    watch = begin(threads, json)
    measured = asyncio.run(_measured(asked, served, others, prompts, compared.max_tokens, threads))
    if not measured:
        raise KeyboardInterrupt
    from forerun.bench.serve import recorded
    from forerun.bench.serve.rows import rows as made_rows

    rows = made_rows(measured, goal, baseline)
    rounds = min(row.samples for row in rows)
    about = f"{rounds} rounds, answers up to {compared.max_tokens} tokens; 90th percentiles in parentheses"
    report = Report(
        "serve",
        [recorded.table(f"{', '.join(places)}: {about}", rows, baseline)],
        None if served is None else served.facts(),
        settings={"loads": [load.name for load in loads], "baseline": baseline, **asked.settings()},
        prompts=prompts.facts(recorded.prompt_tokens(measured)),
        rows=() if asked.no_details else recorded.run_rows(measured, asked.temperature),
        figures=recorded.figures(rows),
    )
    print_report(report, watch, json, markdown)


def _refuse_unused(asked: BenchServeOptions, settings: LLMOptions, engine: EngineConfig) -> None:
    """Raise ConfigError where something is said of a server that is not started."""
    if asked.in_process:
        raise ConfigError("--in-process needs a MODEL, which is loaded here and by a server that is started.")
    if asked.drafter is not None or settings != _SETTINGS or engine.max_batch != EngineConfig().max_batch:
        raise ConfigError(
            "--drafter, --dtype and the like are for a server that is started here, but there is no MODEL. Give one, "
            "or leave them out."
        )


async def _measured(
    asked: BenchServeOptions,
    served: Served | None,
    others: Mapping[str, str],
    prompts: Prompts,
    max_tokens: int,
    threads: int | None,
) -> list[Measured]:
    """Everything is started, measured and ended."""
    from forerun.bench.serve.measure import measure
    from forerun.bench.serve.server import Server
    from forerun.bench.serve.started import started

    asks = prompts.asks(max_tokens, asked.temperature, asked.ignore_eos)
    arms: list[Arm] = []
    with ExitStack() as stack:
        async with AsyncExitStack() as sessions:
            urls = dict(others)
            if served is not None:
                own = stack.enter_context(started(served.arguments(asked.large_bodies), threads, asked.load_limit, say))
                urls = {OWN: own, **urls}
            for name, url in urls.items():
                called = None if name == OWN and served is not None else asked.ask_for
                server = Server(url, called, asked.api_key, asked.extra_fields(), asked.request_limit)
                arms += asked.arms(name, await sessions.enter_async_context(server))
            if served is not None and asked.in_process:
                arms += _inside(stack, served, asked)
            return await measure(arms, asked.loads(), asks, asked.requests, asked.rounds, say)


def _inside(stack: ExitStack, served: Served, asked: BenchServeOptions) -> Sequence[Arm]:
    """The same engine in this process."""
    from forerun.bench.serve.inside import Inside

    say(f"loading {served.model}")
    drafters = served_drafters([served.drafter] if served.drafter else [], None, None)
    llm = open_llm(served.model, drafters, chat=False, **asdict(served.settings) | {"max_batch": served.max_batch})
    return asked.arms_inside(stack.enter_context(Inside(llm)))
