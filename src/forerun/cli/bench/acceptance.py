"""`forerun bench acceptance`: measure the acceptance rate of drafts by category, without timing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from forerun.cli import options
from forerun.cli.bench.shared import (
    CompareOptions,
    JsonFile,
    begin,
    non_negative,
    open_plain,
    print_report,
    say,
    whole_numbers,
)
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions, choose_drafters, chosen_model
from forerun.config import OFF
from forerun.lab.bench.tables import Report, Table
from forerun.utils.fields import option

MAX_BATCH = 8
"""Prompts at once."""


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """How drafts are made and how the target samples."""

    num_draft_tokens: str = option("4", "Values of K, with commas between them.", metavar="K,...")
    temperatures: str = option("0", "With commas between them.", metavar="FLOAT,...")


@with_flags
def acceptance(
    *,
    model: options.TargetArgument = None,
    compared: Annotated[CompareOptions, Flags(base=CompareOptions(prompts="questions", max_tokens=64))],
    settings: Annotated[AcceptanceOptions, Flags()],
    json: JsonFile = None,
) -> None:
    """Measure the acceptance of drafts of K tokens by category and position, many prompts at once, without timing."""
    cases = compared.cases()
    counts = whole_numbers(settings.num_draft_tokens, "--num-draft-tokens")
    temperatures = non_negative(settings.temperatures, "--temperatures")
    model = chosen_model(model)
    chosen = choose_drafters(model, None, compared.drafters)
    watch = begin(None, json)
    from forerun.engine import LLM
    from forerun.lab.bench import acceptance as bench
    from forerun.lab.bench.prompts import prepare
    from forerun.lab.bench.recorded import acceptance_figures, drafter_facts, prompt_facts, target_facts

    plain = open_plain(model, LLMOptions())
    most = compared.max_tokens
    prompts = prepare(plain, cases, most)
    rows = []
    fixed: Any = {"tokenizer": plain.tokenizer, "seed": 0, "max_batch": MAX_BATCH, "prefix_reuse": OFF}
    for (name, spec), k in product(chosen.items(), counts):
        say(f"{name}, K={k}")
        engine = LLM(plain.target, spec, num_draft_tokens=k, **fixed)
        rows += bench.measure_acceptance(engine, name, k, prompts, most, temperatures)
    target = target_facts(model, plain.target)
    tables = [
        Table.of(
            f"{target.name}, {name}: acceptance, answers of up to {most} tokens",
            bench.COLUMNS,
            [row for row in rows if row.workload == name],
        )
        for name in cases
    ]
    report = Report(
        "acceptance",
        tables,
        target,
        drafter_facts(chosen, counts),
        {"max_tokens": most, "ignore_eos": False, "max_batch": MAX_BATCH},
        [each for workload, requests in prompts.items() for each in prompt_facts(workload, requests)],
        figures=acceptance_figures(rows),
    )
    print_report(report, watch, json)
