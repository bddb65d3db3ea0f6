"""`forerun bench generate`: whole generations, where the time of their steps goes, and acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.report import Report, Table
from forerun.cli import options
from forerun.cli.bench.shared import (
    Compared,
    JsonFile,
    begin,
    draft_counts,
    non_negative,
    print_report,
    say,
    whole_numbers,
)
from forerun.cli.default_model import chosen_model
from forerun.cli.demo import DRAFT_MODEL, choose_drafters
from forerun.cli.flags import Flags, with_flags
from forerun.cli.memory_line import memory_told
from forerun.cli.options import LLMOptions
from forerun.config import AUTO, BUNDLED_DRAFT, OFF, NumDraftTokens, SamplingParams
from forerun.errors import ConfigError
from forerun.fields import option
from forerun.files.write import refuse_to_overwrite
from forerun.workloads import temperatures

if TYPE_CHECKING:
    from forerun.bench.generate import MethodRow, Methods
    from forerun.bench.prompts import Request
    from forerun.engine import LLM
    from forerun.results import Figure, PromptFacts, RunRow, TargetFacts


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How every method generates, and where the rows go beside the report."""

    num_draft_tokens: str = option(AUTO, "Values of K, with commas between them; 'auto' is one.", metavar="K,...")
    temperatures: str = option("0", "With commas between them; a workload may have its own.", metavar="FLOAT,...")
    rounds: int = option(1, "Interleaved rounds per prompt.", low=1)
    assisted: str = option("2,4,6,8", "Values of K for Transformers' assisted generation.", metavar="K,...")
    stop_at_eos: bool = option(
        False, "Stop at the end of text. Without it all go on past it, chats too, so that all do the same work."
    )
    baseline: str | None = option(
        None, "One of --drafters, at the first K, that the others' speed is compared with as well.", metavar="DRAFTER"
    )
    training_data: Sequence[str] = option(
        (),
        "What drafters were trained on: texts, JSON lines, folders. Prompts that share 13 words in a row with it are "
        "counted, and reports warn of them.",
        metavar="FILE",
    )
    csv: Path | None = option(None, "Write every row with all its figures into this CSV file.", metavar="FILE")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured together.

    Attributes:
        name: of the workload.
        requests: its prompts.
        heats: temperatures at which they are sampled.
    """

    name: str
    requests: Sequence[Request]
    heats: Sequence[float]


@with_flags
def generate(
    *,
    model: options.ModelName = None,
    draft: options.DraftName = None,
    compared: Annotated[Compared, Flags()],
    settings: Annotated[GenerateOptions, Flags()],
    llm: Annotated[LLMOptions, Flags("dtype", "quantize", "adapter")],
    reference: Annotated[bool, typer.Option(help="Measure Transformers' generate as well (greedy only).")] = True,
    details: Annotated[bool, typer.Option(help="Measure overhead and acceptance as well.")] = True,
    threads: options.Threads = None,
    json: JsonFile = None,
    markdown: options.Markdown = False,
) -> None:
    """Whole generations, batch 1: forerun's methods against Transformers', overhead, and acceptance."""
    cases, counts = compared.cases(), draft_counts(settings.num_draft_tokens)
    heats = non_negative(settings.temperatures, "--temperatures")
    assisted = whole_numbers(settings.assisted, "--assisted")
    model = chosen_model(model)
    chosen = choose_drafters(model, draft, compared.drafters)
    baseline = baseline_method(settings.baseline, chosen, counts)
    check_csv(settings.csv)
    watch = begin(threads, json)
    from forerun.bench.prompts import prepare
    from forerun.bench.recorded import drafter_facts, target_facts
    from forerun.bench.rows_file import write_rows
    from forerun.bench.training_data import seen_cases, with_seen

    seen = seen_cases(cases, [Path(each) for each in settings.training_data])
    opened = open_all(model, chosen, counts, llm)
    prompts = prepare(opened.plain, cases, compared.max_tokens)
    workloads = [Workload(name, prompts[name], temperatures(each) or heats) for name, each in cases.items()]
    assistant = (draft or BUNDLED_DRAFT) if DRAFT_MODEL in chosen else None
    methods = opened.methods(model, assistant, llm, assisted, baseline, reference=reference)
    target = target_facts(model, opened.plain.target)
    measured = speeds(methods, workloads, compared.max_tokens, settings, target, opened.drafters)
    found, tables = measure_details(opened, workloads, compared.max_tokens) if details else ({}, [])
    report = Report(
        "generate",
        [*measured.tables, *tables],
        target,
        with_seen(drafter_facts(chosen, counts), opened.by_name, prompts, seen),
        {"max_tokens": compared.max_tokens, "rounds": settings.rounds, "stop_at_eos": settings.stop_at_eos},
        measured.prompts,
        measured.rows,
        measured.figures,
        found,
    )
    print_report(report, watch, json, markdown)
    if settings.csv is not None:
        write_rows(settings.csv, measured.methods)


@dataclass(frozen=True, slots=True)
class Opened:
    """Engines over one loaded target.

    Attributes:
        plain: the target alone.
        by_method: by the name of a method, plain decoding among them.
        by_drafter: by drafter and the K at which its acceptance is told.
        by_name: one of each drafter.
        drafters: method -> drafter's name.
    """

    plain: LLM
    by_method: Mapping[str, LLM]
    by_drafter: Mapping[tuple[str, int], LLM]
    by_name: Mapping[str, LLM]
    drafters: Mapping[str, str]

    def methods(
        self,
        model: str,
        assistant: str | None,
        llm: LLMOptions,
        assisted: Sequence[int],
        baseline: str | None,
        *,
        reference: bool,
    ) -> Methods:
        """What is compared. assistant: the model of Transformers' assisted generation; None leaves that out."""
        from forerun.bench.generate import Methods
        from forerun.bench.reference import Reference

        hf = Reference(model, llm.dtype, llm.adapter) if reference else None
        hf_draft = Reference(assistant, llm.dtype) if reference and assistant else None
        return Methods(self.by_method, hf, hf_draft, assisted, baseline)


def open_all(model: str, chosen: Mapping[str, str], counts: Sequence[NumDraftTokens], llm: LLMOptions) -> Opened:
    """Load the target, and every drafter at every K. chosen: name -> the drafter's text."""
    from forerun.bench import engines
    from forerun.bench.reference import quieten
    from forerun.engine import LLM

    quieten()
    say(f"loading {model}")
    with memory_told(say):
        plain = LLM(
            model,
            drafter=None,
            dtype=llm.dtype,
            adapter=llm.adapter,
            quantize=llm.quantize,
            prefix_reuse=OFF,
        )
    by_method, by_drafter = engines.open_engines(plain, chosen, counts)
    drafters = {engines.method_name(name, k): name for name in chosen for k in counts}
    by_name = {name: by_method[engines.method_name(name, counts[0])] for name in chosen}
    return Opened(plain, by_method, by_drafter, by_name, drafters)


def baseline_method(drafter: str | None, chosen: Mapping[str, str], counts: Sequence[NumDraftTokens]) -> str | None:
    """The name of the method that others are compared with. Raises ConfigError where it is not measured."""
    from forerun.bench.engines import method_name

    if drafter is None:
        return None
    if drafter not in chosen:
        raise ConfigError(f"--baseline is {drafter!r}, which is not measured. Measured are {', '.join(chosen)}.")
    return method_name(drafter, counts[0])


def check_csv(path: Path | None) -> None:
    """Raise ConfigError where the file exists, or is a folder."""
    if path is None:
        return
    refuse_to_overwrite(path, ConfigError, "Give another name.")
    if path.is_dir():
        raise ConfigError(f"--csv is {path}, which is a folder. Give the name of a file.")


@dataclass(slots=True)
class Speeds:
    """What was measured of whole generations, as it grows.

    Attributes:
        methods: rows by workload, temperature and category.
        tables, prompts, rows, figures: see `Report`.
    """

    methods: dict[str, list[MethodRow]] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    prompts: list[PromptFacts] = field(default_factory=list)
    rows: list[RunRow] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def speeds(
    methods: Methods,
    workloads: Sequence[Workload],
    max_tokens: int,
    settings: GenerateOptions,
    target: TargetFacts,
    drafters: Mapping[str, str],
) -> Speeds:
    """The speed of every method, by workload, temperature and category. drafters: method -> drafter's name."""
    from forerun.bench import generate as bench
    from forerun.bench.engines import PLAIN
    from forerun.bench.recorded import method_figures, prompt_facts, run_rows

    ends = "up to the end of text" if settings.stop_at_eos else "past any end of text"
    rounds, made = settings.rounds, Speeds()
    for workload in workloads:
        first, requests = len(made.prompts), workload.requests
        made.prompts += prompt_facts(workload.name, requests)
        for heat in workload.heats:
            label = f"{workload.name}, {'greedy' if heat == 0 else f'temperature {heat:g}'}"
            say(f"measuring {label}")
            params = SamplingParams(temperature=heat, max_tokens=max_tokens, ignore_eos=not settings.stop_at_eos)
            about = f"{len(requests)} prompts of {max_tokens} tokens, {ends}, rounds: {rounds}"
            about += f", baseline: {methods.baseline}" * bool(methods.baseline)
            runs = bench.timed_runs(methods, requests, params, rounds, say)
            found = bench.reduce_by_category(runs, requests, rounds, methods.baseline)
            made.rows += run_rows(runs, drafters, PLAIN, heat, rounds, first)
            made.figures += method_figures(workload.name, heat, found, drafters)
            for category, rows in found.items():
                name = f"{label}, {category}" if category else label
                made.methods[name] = rows
                title = f"{target.name}, {target.number_format}, " + (name if category else f"{label}, {about}")
                made.tables += bench.tables(title, name, rows, has_baseline=methods.baseline is not None)
    return made


def measure_details(
    opened: Opened, workloads: Sequence[Workload], max_tokens: int
) -> tuple[dict[str, Any], list[Table]]:
    """Where the time of a step goes, and acceptance: as facts for JSON and as tables."""
    from forerun.bench import acceptance_rate, step_time

    say("measuring overhead")
    prompts = [request.token_ids for workload in workloads for request in workload.requests]
    times = step_time.measure(opened.by_method, prompts, max_tokens)
    say("measuring acceptance")
    by_name = {workload.name: workload.requests for workload in workloads}
    rates = acceptance_rate.measure(opened.by_drafter, by_name, max_tokens)
    return {"overhead": times, "acceptance": rates}, [
        Table.of("Time per step in ms", step_time.COLUMNS, times),
        Table.of("Acceptance", acceptance_rate.COLUMNS, rates),
    ]
