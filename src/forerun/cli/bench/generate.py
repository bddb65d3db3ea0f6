"""`forerun bench generate`: whole generations, where the time of their steps goes, and acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.measure import is_cost_padded
from forerun.bench.report import Report, Table
from forerun.cli import options
from forerun.cli.bench.shared import Compared, draft_counts, non_negative, print_report, say, set_threads, whole_numbers
from forerun.cli.demo import DRAFT_MODEL, choose_drafters
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions
from forerun.config import AUTO, BUNDLED_DRAFT, BUNDLED_TARGET
from forerun.fields import option
from forerun.workloads import Case, temperatures

if TYPE_CHECKING:
    from forerun.bench.generate import MethodRow, Methods
    from forerun.engine import LLM


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How every method generates."""

    num_draft_tokens: str = option(AUTO, "Values of K, with commas between them; 'auto' is one.", metavar="K,...")
    temperatures: str = option("0", "With commas between them; a workload may have its own.", metavar="FLOAT,...")
    rounds: int = option(1, "Interleaved rounds per prompt.", low=1)
    assisted: str = option("2,4,6,8", "Values of K for Transformers' assisted generation.", metavar="K,...")


@with_flags
def generate(
    *,
    model: options.ModelName = BUNDLED_TARGET,
    draft: options.DraftName = None,
    compared: Annotated[Compared, Flags()],
    settings: Annotated[GenerateOptions, Flags()],
    llm: Annotated[LLMOptions, Flags("dtype", "adapter")],
    reference: Annotated[bool, typer.Option(help="Measure Transformers' generate as well (greedy only).")] = True,
    details: Annotated[bool, typer.Option(help="Measure overhead and acceptance as well.")] = True,
    threads: options.Threads = None,
    json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Whole generations, batch 1: forerun's methods against Transformers', overhead, and acceptance."""
    cases, counts = compared.cases(), draft_counts(settings.num_draft_tokens)
    heats = non_negative(settings.temperatures, "--temperatures")
    assisted = whole_numbers(settings.assisted, "--assisted")
    chosen = choose_drafters(model, draft, compared.drafters)
    set_threads(threads)
    from forerun.bench import engines
    from forerun.bench.generate import Methods
    from forerun.bench.reference import Reference, quieten
    from forerun.engine import LLM

    quieten()
    say(f"loading {model}")
    plain = LLM(model, drafter=None, dtype=llm.dtype, adapter=llm.adapter)
    by_method, by_drafter = engines.open_engines(plain, chosen, counts)
    assistant = (draft or BUNDLED_DRAFT) if DRAFT_MODEL in chosen else None
    hf = Reference(model, llm.dtype, llm.adapter) if reference else None
    hf_draft = Reference(assistant, llm.dtype) if reference and assistant else None
    methods = Methods(by_method, hf, hf_draft, assisted)
    measured, tables = speeds(methods, cases, heats, compared, settings.rounds, f"{model}, {llm.dtype}")
    facts = {
        "model": model,
        "adapter": llm.adapter,
        "cost_padded": is_cost_padded(model),
        "dtype": llm.dtype,
        "methods": measured,
    }
    facts |= {"overhead": [], "acceptance": []}
    if details:
        found, more = measure_details(by_method, by_drafter, cases, compared.max_tokens)
        facts, tables = facts | found, tables + more
    print_report(Report(facts, tables, model), json, markdown)


def speeds(
    methods: Methods,
    cases: Mapping[str, Sequence[Case]],
    heats: Sequence[float],
    compared: Compared,
    rounds: int,
    target: str,
) -> tuple[dict[str, list[MethodRow]], list[Table]]:
    """The speed of every method, by workload and temperature; and a table for each of these."""
    from forerun.bench import generate as bench

    about = f"{compared.prompts} prompts of {compared.max_tokens} tokens, rounds: {rounds}"
    measured, tables = {}, []
    for workload, prompts in cases.items():
        for heat in temperatures(prompts) or heats:
            label = f"{workload}, {'greedy' if heat == 0 else f'temperature {heat:g}'}"
            say(f"measuring {label}")
            rows = measured[label] = bench.measure(methods, prompts, compared.max_tokens, rounds, heat, say)
            tables.append(Table.of(f"{target}, {label}, {about}", bench.COLUMNS, rows))
    return measured, tables


def measure_details(
    by_method: Mapping[str, LLM],
    by_drafter: Mapping[tuple[str, int], LLM],
    cases: Mapping[str, Sequence[Case]],
    max_tokens: int,
) -> tuple[dict[str, Any], list[Table]]:
    """Where the time of a step goes, and acceptance: as facts for JSON and as tables."""
    from forerun.bench import acceptance_rate, engines, step_time

    say("measuring overhead")
    prompts = [engines.prompt_ids(by_method[engines.PLAIN], case) for each in cases.values() for case in each]
    times = step_time.measure(by_method, prompts, max_tokens)
    say("measuring acceptance")
    rates = acceptance_rate.measure(by_drafter, cases, max_tokens)
    return {"overhead": times, "acceptance": rates}, [
        Table.of("Time per step in ms", step_time.COLUMNS, times),
        Table.of("Acceptance", acceptance_rate.COLUMNS, rates),
    ]
