"""`forerun bench replay`: how far the automatic budget is from the best fixed K, without a clock's noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.bench import tables
from forerun.bench.measure import machine
from forerun.bench.workloads import Case, load, own_temperatures, with_prediction
from forerun.cli import options
from forerun.cli.bench import (
    print_heading,
    print_machine,
    print_note,
    print_table,
    say,
    set_threads,
    whole_numbers,
)
from forerun.cli.demo import choose_drafters
from forerun.cli.output import print_json
from forerun.config import BUNDLED_TARGET, DEFAULT_DTYPE, SamplingParams

if TYPE_CHECKING:
    from forerun.bench.replay import Comparison
    from forerun.bench.step_costs import Curve
    from forerun.engine import LLM

HEADER = ["workload, temperature, drafter", "best K", "over plain", "auto over plain", "auto / best", "length", "idle"]


def replay(
    model: options.ModelName = BUNDLED_TARGET,
    draft: options.DraftName = None,
    drafters: Annotated[
        str | None, typer.Option(help="Drafters, with commas between them.", show_default="all there are")
    ] = None,
    workloads: Annotated[
        str, typer.Option(help="Bundled workloads or JSONL files, with commas between them.")
    ] = "code,prose,copying,high-temperature",
    num_draft_tokens: Annotated[
        str, typer.Option(help="Fixed values of K, with commas between them.", metavar="K,K,...")
    ] = "1,2,3,4,6,8,12,16,24,32,48",
    prompts: Annotated[int, typer.Option(help="Prompts of each workload, from the first.", min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.", min=2)] = 128,
    cost_of: Annotated[
        str | None,
        typer.Option(help="Price the target's forwards as those of this model.", show_default="the target itself"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds in which the target's forward is timed.", min=1)] = 20,
    dtype: options.DType = DEFAULT_DTYPE,
    threads: options.Threads = None,
    json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Every drafter at every K and with K chosen automatically, priced by measured step costs."""
    counts = whole_numbers(num_draft_tokens, "--num-draft-tokens")
    cases = {name: load(name, prompts) for name in options.comma_list(workloads, "--workloads")}
    chosen = choose_drafters(model, draft, drafters)
    set_threads(threads)
    from forerun.bench.reference import quieten
    from forerun.bench.step_costs import target_costs
    from forerun.engine import LLM
    from forerun.models import load_model

    quieten()
    plain = LLM(model, drafter=None, dtype=dtype)
    say("timing the target's forward")
    priced = plain.target if cost_of is None else load_model(cost_of, dtype)
    target = target_costs(priced, context=384, rounds=rounds)
    results = [
        each for name in chosen for each in compare(plain, name, chosen[name], target, cases, counts, max_tokens)
    ]
    if json:
        facts = {"model": model, "cost_of": cost_of or model, "dtype": dtype, "machine": machine()}
        print_json({**facts, "target": target, "results": results})
        return
    print_note(cost_of or model)
    at = f" at the cost of {cost_of}" if cost_of else ""
    title = f"{model}{at}, {dtype}: auto against the best fixed K, {prompts} prompts of {max_tokens} tokens"
    print_heading(title, markdown)
    print_table(HEADER, [cells(each) for each in sorted(results, key=lambda each: each.workload)], markdown)
    print_machine()


def compare(
    plain: LLM,
    name: str,
    spec: str,
    target: Curve,
    cases: Mapping[str, Sequence[Case]],
    counts: Sequence[int],
    max_tokens: int,
) -> list[Comparison]:
    """One drafter on all workloads and temperatures."""
    from forerun.bench import replay as bench
    from forerun.bench.step_costs import drafter_costs
    from forerun.drafters import DRAFTERS

    encode = plain.tokenizer.encode
    first = encode(next(iter(cases.values()))[0].prompt)
    timed = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    costs = {}
    for source in bench.sources_of(spec)[0]:
        say(f"timing {source}")
        costs[source] = drafter_costs(plain, partial(bench.fresh, plain, source), counts, first, timed)
    rest = max((each.rest for each in costs.values()), key=lambda curve: len(curve.counts))
    echo = all(
        DRAFTERS[source.partition(":")[0]].kind != "target" for source in costs if source.partition(":")[0] in DRAFTERS
    )
    setting = bench.Setting(plain, partial(bench.charged, plain, spec, costs), target, rest, echo)
    results = []
    for workload, own in cases.items():
        for temperature in own_temperatures(own) or (0.0, 1.0):
            say(f"replaying {name} on {workload} at temperature {temperature:g}")
            one = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
            reader = bench.fresh(plain, spec)
            params = [with_prediction(replace(one, seed=i), reader, case) for i, case in enumerate(own)]
            label = f"{workload}, {temperature:g}, {name}"
            results.append(bench.compare(setting, label, [encode(case.prompt) for case in own], params, counts))
    return results


def cells(row: Comparison) -> list[str]:
    """One line of the table."""
    return [
        row.workload,
        row.best.name,
        f"{row.best_over_plain:.2f}",
        f"{row.auto_over_plain:.2f}",
        f"{row.auto_over_best:.3f}",
        f"{row.auto.mean_acceptance_length:.2f}",
        tables.percent(row.auto.idle),
    ]
