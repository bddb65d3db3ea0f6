"""`forerun demo`: plain decoding against every drafter, on held-out prompts, before your eyes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from forerun import workloads
from forerun.bench.compare import Row, Run, compare
from forerun.bench.measure import PADDED_NOTE, Timed, describe, interleave, is_cost_padded, machine
from forerun.bench.report import Columns, Table, decimal, percent
from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED
from forerun.cli.options import WORKLOAD_FILE, LLMOptions
from forerun.cli.output import plain, print_json
from forerun.config import AUTO, BUNDLED_TARGET, NumDraftTokens, SamplingParams
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.cli.stage import Stage
    from forerun.engine import LLM

PLAIN = "plain"
DRAFT_MODEL = "draft-model"


@with_flags
def demo(
    *,
    model: options.ModelName = BUNDLED_TARGET,
    draft: options.DraftName = None,
    drafters: Annotated[
        str | None,
        typer.Option(help="Drafters to show, with commas between them.", metavar="DRAFTER,...", show_default="all"),
    ] = None,
    workload: Annotated[str, typer.Option(help=f"A bundled workload, {WORKLOAD_FILE}", metavar="WORKLOAD")] = "code",
    prompts: Annotated[int, typer.Option(help="How many of its prompts, from the first.", min=1, metavar="INT")] = 4,
    rounds: Annotated[int, typer.Option(help="Measured rounds per prompt.", min=1, metavar="INT")] = 3,
    sampling: Annotated[SamplingParams, Flags("max_tokens")],
    settings: Annotated[
        LLMOptions, Flags("num_draft_tokens", "dtype", "device", "adapter", base=LLMOptions(num_draft_tokens=AUTO))
    ],
    json: options.Json = False,
) -> None:
    """Show plain decoding and every drafter on held-out prompts, then measure them: same text, sooner."""
    cases = workloads.load(workload, prompts)
    chosen = choose_drafters(model, draft, drafters)
    from forerun.cli.stage import Stage

    stage = Stage(quiet=json)
    if drafters is None and (missing := left_out(chosen, draft)):
        stage.say(f"Left out: {missing}")
    stage.say(f"Loading {model} ...")
    count: NumDraftTokens = AUTO if settings.num_draft_tokens is None else settings.num_draft_tokens
    methods = open_methods(model, chosen, settings, count)
    # Past any end of text: a prompt whose answer is one token long would measure the prompt.
    params = replace(sampling, temperature=0, ignore_eos=True)
    rows, interrupted = perform(stage, methods, cases, params, rounds)
    exact, padded = methods[PLAIN].exact, is_cost_padded(model)
    if json:
        facts = {"model": model, "adapter": settings.adapter, "cost_padded": padded, "dtype": settings.dtype}
        facts["num_draft_tokens"] = count
        results = [{**plain(row), "speedup": row.speedup.median} for row in rows]
        print_json({"results": results, **facts, "prompts": len(cases), "exact": exact, "machine": machine()})
    else:
        if interrupted:
            stage.say("Interrupted. The table holds the complete rounds." if rows else "Interrupted.")
        if rows:
            stage.table(Table.of("", COLUMNS, rows))
            if padded:
                stage.say(PADDED_NOTE)
            stage.say(closing_line(exact, count, len(cases), rounds, params.max_tokens))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def perform(
    stage: Stage, methods: Mapping[str, LLM], cases: Sequence[workloads.Case], params: SamplingParams, rounds: int
) -> tuple[list[Row], bool]:
    """Show, then measure; returns the rows, and whether Ctrl-C ended it. Then the rows are of the complete rounds."""
    runs: dict[str, list[Timed[Run]]] = {name: [] for name in methods}
    interrupted = False
    try:
        with stage:
            show(stage, methods, cases, params)
            measure(stage, methods, cases, params, rounds, runs)
    except KeyboardInterrupt:
        interrupted = True
    complete = min(len(timed) for timed in runs.values())
    whole = {name: timed[:complete] for name, timed in runs.items()}
    return (compare(whole, PLAIN) if complete else []), interrupted


def choose_drafters(model: str, draft: str | None, names: str | None) -> dict[str, str]:
    """Method name -> what LLM is given as its drafter.

    Args:
        draft: the draft model for whichever drafter wants one.
        names: drafters with commas between them, each perhaps with one option (NAME:key=value); None takes all that
            can serve this target.

    Raises:
        ConfigError: an unknown name, or a draft model asked for without saying which.
    """
    from forerun.drafters import DRAFTERS

    bundled = model == BUNDLED_TARGET
    wanted = options.comma_list(names, "--drafters") if names else list(DRAFTERS)
    chosen: dict[str, str] = {}
    for spec in wanted:
        name, colon, _ = spec.partition(":")
        if name not in DRAFTERS:
            raise ConfigError(f"There is no drafter {name!r}. Known: {', '.join(DRAFTERS)}.")
        row = DRAFTERS[name]
        serves = bundled or colon or row.needed_option is None
        if not colon and draft is not None and row.with_draft_model is not None:
            chosen[name] = row.with_draft_model.format(draft)
        elif serves:
            chosen[spec] = spec
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
    parts += [f"{name} (give --drafters {name}:{option}=...)" for name, option in others.items()]
    return "; ".join(parts) + "." if parts else ""


def open_methods(
    model: str, drafters: Mapping[str, str], settings: LLMOptions, num_draft_tokens: NumDraftTokens
) -> dict[str, LLM]:
    """Plain first, then one engine per drafter, all over one target. The seam that tests replace."""
    from forerun.bench.engines import beside
    from forerun.engine import LLM

    plain = LLM(model, drafter=None, dtype=settings.dtype, device=settings.device, adapter=settings.adapter)
    return {PLAIN: plain} | {name: beside(plain, spec, num_draft_tokens) for name, spec in drafters.items()}


def show(stage: Stage, methods: Mapping[str, LLM], cases: Sequence[workloads.Case], params: SamplingParams) -> None:
    """Stream every prompt through every method once: something to watch, and the warm-up of what follows."""
    from forerun.bench.engines import with_prediction

    for number, case in enumerate(cases, 1):
        for name, llm in methods.items():
            with stage.performance(f"{name}  ·  prompt {number} of {len(cases)}, {case.name}", case.prompt) as scene:
                for chunk in llm.stream(case.prompt, with_prediction(params, llm.drafter, case)):
                    scene.add(llm.tokenizer, chunk)


def measure(
    stage: Stage,
    methods: Mapping[str, LLM],
    cases: Sequence[workloads.Case],
    params: SamplingParams,
    rounds: int,
    runs: dict[str, list[Timed[Run]]],
) -> None:
    """Time every method on every prompt, in turn; `runs` grows as they finish."""
    from forerun.bench.engines import generate, with_prediction

    with stage.progress("Measuring, methods in turn", len(cases) * rounds * len(methods)) as advance:

        def after(name: str, result: Timed[Run]) -> None:
            runs[name].append(result)
            advance()

        for case in cases:
            runners = {
                name: partial(generate, llm, case.prompt, with_prediction(params, llm.drafter, case))
                for name, llm in methods.items()
            }
            interleave(runners, rounds, warmup=0, after=after)


COLUMNS: Columns[Row] = {
    "method": lambda row: row.method,
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "speedup": lambda row: f"{row.speedup.median:.2f}×",
    "mean acceptance length": lambda row: decimal(row.mean_acceptance_length),
    "acceptance rate": lambda row: percent(row.acceptance_rate),
    "identical": lambda row: "yes" if row.identical else "no",
}


def closing_line(exact: bool, num_draft_tokens: NumDraftTokens, prompts: int, rounds: int, max_tokens: int) -> str:
    """What the table stands on."""
    promise = (
        "Exact: a self-test found the target's logits bit-identical with and without speculation."
        if exact
        else "Not exact here: rounding may differ between plain and speculative runs, so texts may part at a near-tie."
    )
    how = (
        f"Greedy, K={num_draft_tokens}, {max_tokens} tokens each; prompts: {prompts}, interleaved rounds: {rounds}; "
        "medians over both."
    )
    return f"{promise}\n{how}\n{describe(machine())}"
