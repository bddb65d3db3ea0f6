"""`forerun bench replay`: compare the automatic K with the best fixed K, by measured costs of a step's parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from forerun.cli import options
from forerun.cli.bench.shared import CompareOptions, JsonFile, begin, open_plain, print_report, say, whole_numbers
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions, choose_drafters, chosen_model
from forerun.lab.bench.tables import Report, Table
from forerun.utils.fields import option
from forerun.utils.workloads import temperatures

CONTEXT = 384
"""Cached positions at which the target's forward is timed."""
ROUNDS = 20
"""Rounds in which it is timed."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Which values of K are replayed, and at whose costs."""

    num_draft_tokens: str = option(
        "1,2,3,4,6,8,12,16,24,32,48", "Fixed values of K, with commas between them.", metavar="K,..."
    )
    cost_of: str | None = option(
        None, "Use the costs of this model's forwards for the target's.", default_text="the target itself"
    )


@with_flags
def replay(
    *,
    model: options.ModelName = None,
    compared: Annotated[
        CompareOptions, Flags(base=CompareOptions(prompts="code,prose,copying,high-temperature", num_prompts=6))
    ],
    replayed: Annotated[ReplayOptions, Flags()],
    threads: options.Threads = None,
    json: JsonFile = None,
) -> None:
    """Replay every drafter at every K and with K chosen automatically, by measured step costs."""
    counts, cases = whole_numbers(replayed.num_draft_tokens, "--num-draft-tokens"), compared.cases()
    model = chosen_model(model)
    chosen = choose_drafters(model, None, compared.drafters)
    watch = begin(threads, json)
    from forerun.config import AUTO
    from forerun.engine.step_times import target_costs
    from forerun.lab.bench import replay as bench
    from forerun.lab.bench.prompts import prepare
    from forerun.lab.bench.recorded import drafter_facts, prompt_facts, target_facts
    from forerun.lab.results.files import without_folders
    from forerun.models import load_model, number_format

    cost_of, most = replayed.cost_of, compared.max_tokens
    plain = open_plain(model, LLMOptions())
    prompts = prepare(plain, cases, most)
    workload_temperatures = {name: temperatures(each) for name, each in cases.items()}
    say("timing the target's forward")
    timed = plain.target if cost_of is None else load_model(cost_of)
    target = target_costs(timed, CONTEXT, ROUNDS)
    results = bench.measure(plain, chosen, target, prompts, workload_temperatures, counts, most, say)
    at = f" at the cost of {without_folders(cost_of)}" if cost_of else ""
    about = f"{sum(map(len, prompts.values()))} prompts of {most} tokens"
    title = f"{without_folders(model)}{at}, {number_format(plain.target)}: auto against the best fixed K, {about}"
    report = Report(
        "replay",
        [Table.of(title, bench.COLUMNS, sorted(results, key=lambda row: row.workload))],
        target_facts(model, plain.target, cost_of=cost_of),
        drafter_facts(chosen, [*counts, AUTO]),
        {"cost_of": without_folders(cost_of or model), "max_tokens": most},
        [each for name, some in prompts.items() for each in prompt_facts(name, some)],
        details={"target": target, "results": results},
    )
    print_report(report, watch, json)
