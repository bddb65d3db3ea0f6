"""`forerun bench replay`: compare the automatic K with the best fixed K, by measured costs of a step's parts."""

from __future__ import annotations

from typing import Annotated

from forerun.cli import options
from forerun.cli.bench.shared import CompareOptions, JsonFile, begin, open_plain, print_report, say
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions, choose_drafters, chosen_model
from forerun.lab.bench.tables import Report, Table
from forerun.utils.workloads import temperatures

CONTEXT = 384
"""Cached positions at which the target's forward is timed."""
ROUNDS = 20
"""Rounds in which it is timed."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Fixed values of K that are replayed."""


@with_flags
def replay(
    *,
    model: options.TargetArgument = None,
    compared: Annotated[
        CompareOptions, Flags(base=CompareOptions(prompts="code,prose,copying,high-temperature", num_prompts=6))
    ],
    json: JsonFile = None,
) -> None:
    """Replay every drafter at every K and with K chosen automatically, by measured step costs."""
    cases = compared.cases()
    model = chosen_model(model)
    chosen = choose_drafters(model, None, compared.drafters)
    watch = begin(None, json)
    from forerun.config import AUTO
    from forerun.lab.bench import replay as bench
    from forerun.lab.bench.prompts import prepare
    from forerun.lab.bench.recorded import drafter_facts, prompt_facts, target_facts
    from forerun.lab.results.files import without_folders
    from forerun.models import number_format

    most = compared.max_tokens
    plain = open_plain(model, LLMOptions())
    prompts = prepare(plain, cases, most)
    workload_temperatures = {name: temperatures(each) for name, each in cases.items()}
    say("timing the target's forward")
    target = bench.target_costs(plain.target, CONTEXT, ROUNDS)
    results = bench.replay_drafters(plain, chosen, target, prompts, workload_temperatures, COUNTS, most, say)
    about = f"{sum(map(len, prompts.values()))} prompts of {most} tokens"
    title = f"{without_folders(model)}, {number_format(plain.target)}: auto against the best fixed K, {about}"
    report = Report(
        "replay",
        [Table.of(title, bench.COLUMNS, sorted(results, key=lambda row: row.workload))],
        target_facts(model, plain.target),
        drafter_facts(chosen, [*COUNTS, AUTO]),
        {"cost_of": without_folders(model), "max_tokens": most},
        [each for name, some in prompts.items() for each in prompt_facts(name, some)],
        details={"target": target, "results": results},
    )
    print_report(report, watch, json)
