"""`forerun bench acceptance`: how much of their drafts the target accepts, by category; nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated

from forerun.bench.report import Report, Table
from forerun.cli import options
from forerun.cli.bench.shared import Compared, JsonFile, begin, non_negative, print_report, say, whole_numbers
from forerun.cli.default_model import chosen_model
from forerun.cli.demo import choose_drafters
from forerun.cli.flags import Flags, with_flags
from forerun.cli.memory_line import memory_told
from forerun.cli.options import LLMOptions
from forerun.config import OFF
from forerun.fields import option
from forerun.workloads import Case

if TYPE_CHECKING:
    from forerun.bench.acceptance_rate import AcceptanceRow
    from forerun.results import PromptFacts, TargetFacts

MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """What is drafted, and how the target samples."""

    num_draft_tokens: str = option("4", "Values of K, with commas between them.", metavar="K,...")
    temperatures: str = option("0", "With commas between them.", metavar="FLOAT,...")
    ignore_eos: bool = option(False, "Go on past the end of text, as `bench generate` does.")
    max_batch: int = option(8, "Prompts at once.", low=1)


@with_flags
def acceptance(
    *,
    model: options.ModelName = None,
    draft: options.DraftName = None,
    compared: Annotated[Compared, Flags(base=Compared(prompts="questions", max_tokens=MAX_TOKENS))],
    settings: Annotated[AcceptanceOptions, Flags()],
    llm: Annotated[LLMOptions, Flags("dtype", "quantize", "adapter")],
    threads: options.Threads = None,
    json: JsonFile = None,
    markdown: options.Markdown = False,
) -> None:
    """Acceptance of drafts of K tokens by category and position, many prompts at once: for machines that are busy."""
    cases, counts = compared.cases(), whole_numbers(settings.num_draft_tokens, "--num-draft-tokens")
    non_negative(settings.temperatures, "--temperatures")
    model = chosen_model(model)
    chosen = choose_drafters(model, draft, compared.drafters)
    watch = begin(threads, json)
    from forerun.bench import acceptance_rate
    from forerun.bench.recorded import drafter_facts
    from forerun.bench.recorded_parts import acceptance_figures

    target, prompts, rows = measured(model, chosen, counts, cases, compared.max_tokens, settings, llm)
    tables = [
        Table.of(
            f"{target.name}, {name}: acceptance, answers of up to {compared.max_tokens} tokens",
            acceptance_rate.BY_CATEGORY,
            [row for row in rows if row.workload == name],
        )
        for name in cases
    ]
    report = Report(
        "acceptance",
        tables,
        target,
        drafter_facts(chosen, counts),
        {"max_tokens": compared.max_tokens, "ignore_eos": settings.ignore_eos, "max_batch": settings.max_batch},
        prompts,
        figures=acceptance_figures(rows),
    )
    print_report(report, watch, json, markdown)


def measured(
    model: str,
    drafters: Mapping[str, str],
    counts: Sequence[int],
    cases: Mapping[str, Sequence[Case]],
    max_tokens: int,
    settings: AcceptanceOptions,
    llm: LLMOptions,
) -> tuple[TargetFacts, list[PromptFacts], list[AcceptanceRow]]:
    """The target, the prompts, and the rows of every drafter at every K. drafters: name -> text."""
    from forerun.bench import acceptance_rate
    from forerun.bench.prompts import prepare
    from forerun.bench.recorded import prompt_facts, target_facts
    from forerun.engine import LLM

    say(f"loading {model}")
    with memory_told(say):
        plain = LLM(model, drafter=None, dtype=llm.dtype, adapter=llm.adapter, quantize=llm.quantize, prefix_reuse=OFF)
    prompts, heats = prepare(plain, cases, max_tokens), non_negative(settings.temperatures, "--temperatures")
    rows = []
    for (name, spec), k in product(drafters.items(), counts):
        say(f"{name}, K={k}")
        engine = LLM(
            plain.target,
            drafter=spec,
            num_draft_tokens=k,
            tokenizer=plain.tokenizer,
            seed=0,
            max_batch=settings.max_batch,
            prefix_reuse=OFF,
        )
        rows += acceptance_rate.measure(
            {(name, k): engine}, prompts, max_tokens, heats, by_category=True, ignore_eos=settings.ignore_eos
        )
    every = [each for workload, requests in prompts.items() for each in prompt_facts(workload, requests)]
    return target_facts(model, plain.target), every, rows
