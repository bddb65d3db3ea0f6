"""`forerun bench replay`: the automatic K against the best fixed K, by measured costs of a step's parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from forerun.bench.report import Report, Table
from forerun.cli import options
from forerun.cli.bench.shared import Compared, JsonFile, begin, print_report, say, whole_numbers
from forerun.cli.default_model import chosen_model
from forerun.cli.demo import choose_drafters
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions
from forerun.fields import option
from forerun.workloads import temperatures

CONTEXT = 384
"""Cached positions at which the target's forward is timed."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Which values of K are replayed, and at whose costs."""

    num_draft_tokens: str = option(
        "1,2,3,4,6,8,12,16,24,32,48", "Fixed values of K, with commas between them.", metavar="K,..."
    )
    cost_of: str | None = option(
        None, "Price the target's forwards as those of this model.", default_text="the target itself"
    )
    rounds: int = option(20, "Rounds in which the target's forward is timed.", low=1)


@with_flags
def replay(
    *,
    model: options.ModelName = None,
    draft: options.DraftName = None,
    compared: Annotated[Compared, Flags(base=Compared(prompts="code,prose,copying,high-temperature", num_prompts=6))],
    priced: Annotated[ReplayOptions, Flags()],
    llm: Annotated[LLMOptions, Flags("dtype", "quantize", "adapter")],
    threads: options.Threads = None,
    json: JsonFile = None,
    markdown: options.Markdown = False,
) -> None:
    """Every drafter at every K and with K chosen automatically, priced by measured step costs."""
    counts, cases = whole_numbers(priced.num_draft_tokens, "--num-draft-tokens"), compared.cases()
    model = chosen_model(model)
    chosen = choose_drafters(model, draft, compared.drafters)
    watch = begin(threads, json)
    from forerun.bench import replay as bench
    from forerun.bench.prompts import prepare
    from forerun.bench.recorded import drafter_facts, prompt_facts, target_facts
    from forerun.bench.reference import quieten
    from forerun.config import AUTO, OFF
    from forerun.engine import LLM
    from forerun.models import load_model, number_format
    from forerun.plan.step_times import target_costs
    from forerun.results.write import without_folders

    quieten()
    cost_of, dtype = priced.cost_of, llm.dtype
    plain = LLM(model, drafter=None, dtype=dtype, adapter=llm.adapter, quantize=llm.quantize, prefix_reuse=OFF)
    prompts = prepare(plain, cases, compared.max_tokens)
    heats = {name: temperatures(each) for name, each in cases.items()}
    say("timing the target's forward")
    timed = plain.target if cost_of is None else load_model(cost_of, dtype, quantize=llm.quantize)
    target = target_costs(timed, CONTEXT, priced.rounds)
    results = bench.measure(plain, chosen, target, prompts, heats, counts, compared.max_tokens, say)
    settings = {"cost_of": without_folders(cost_of or model), "max_tokens": compared.max_tokens}
    about_target = target_facts(model, plain.target, cost_of=cost_of)
    drafters = drafter_facts(chosen, [*counts, AUTO])
    every = [each for name, some in prompts.items() for each in prompt_facts(name, some)]
    at = f" at the cost of {without_folders(cost_of)}" if cost_of else ""
    about = f"{sum(map(len, prompts.values()))} prompts of {compared.max_tokens} tokens"
    title = f"{without_folders(model)}{at}, {number_format(plain.target)}: auto against the best fixed K, {about}"
    table = Table.of(title, bench.COLUMNS, sorted(results, key=lambda row: row.workload))
    details = {"target": target, "results": results}
    report = Report("replay", [table], about_target, drafters, settings, every, details=details)
    print_report(report, watch, json, markdown)
