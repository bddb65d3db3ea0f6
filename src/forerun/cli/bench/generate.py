"""`forerun bench generate`: time whole generations, their steps and their acceptance, beside Transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options
from forerun.cli.bench.shared import (
    CompareOptions,
    JsonFile,
    begin,
    draft_counts,
    non_negative,
    open_plain,
    print_report,
    say,
    whole_numbers,
)
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions, choose_drafters, chosen_model
from forerun.config import AUTO, BUNDLED_DRAFT, SamplingParams
from forerun.lab.bench.tables import Report, Table
from forerun.utils.fields import option
from forerun.utils.workloads import temperatures

if TYPE_CHECKING:
    from forerun.lab.bench.generate import Methods
    from forerun.lab.bench.prompts import BenchPrompt
    from forerun.lab.results.schema import Figure, PromptFacts, RunRow


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How every method generates."""

    num_draft_tokens: str = option(AUTO, "Values of K, with commas between them; 'auto' is one.", metavar="K,...")
    temperatures: str = option("0", "With commas between them; a workload may have its own.", metavar="FLOAT,...")
    rounds: int = option(1, "Interleaved rounds per prompt.", low=1)
    assisted: str = option("2,4,6,8", "Values of K for Transformers' assisted generation.", metavar="K,...")


@with_flags
def bench_generate(
    *,
    model: options.TargetArgument = None,
    draft: options.DraftName = None,
    compared: Annotated[CompareOptions, Flags()],
    settings: Annotated[GenerateOptions, Flags()],
    llm: Annotated[LLMOptions, Flags("dtype", "quantize")],
    reference: Annotated[bool, typer.Option(help="Measure Transformers' generate as well (greedy only).")] = True,
    details: Annotated[bool, typer.Option(help="Report the time of the parts of a step as well.")] = True,
    threads: options.Threads = None,
    json: JsonFile = None,
) -> None:
    """Time whole generations, batch 1: forerun's methods against Transformers', time per step, and acceptance."""
    cases = compared.cases()
    counts = draft_counts(settings.num_draft_tokens)
    temperature_list = non_negative(settings.temperatures, "--temperatures")
    assisted = whole_numbers(settings.assisted, "--assisted")
    chosen = choose_drafters(model := chosen_model(model), draft, compared.drafters)
    watch = begin(threads, json)
    from forerun.lab.bench.compare import PLAIN
    from forerun.lab.bench.generate import Methods
    from forerun.lab.bench.methods import Reference, beside, method_name
    from forerun.lab.bench.prompts import prepare
    from forerun.lab.bench.recorded import drafter_facts, target_facts

    plain = open_plain(model, llm)
    named = {method_name(name, k): (name, k) for name, k in product(chosen, counts)}
    engines = {method: beside(plain, chosen[name], k) for method, (name, k) in named.items()}
    prompts = prepare(plain, cases, compared.max_tokens)
    hf_draft = Reference(draft or BUNDLED_DRAFT, llm.dtype) if reference and "draft-model" in chosen else None
    hf = Reference(model, llm.dtype) if reference else None
    methods = Methods({PLAIN: plain, **engines}, hf, hf_draft, assisted)
    target = target_facts(model, plain.target)
    measured = Speeds(f"{target.name}, {target.number_format}", {method: name for method, (name, _) in named.items()})
    for name, requests in prompts.items():
        ends = all(case.is_chat for case in cases[name])  # past its end an answer repeats itself, which drafts gain by
        for temperature in temperatures(cases[name]) or temperature_list:
            params = SamplingParams(temperature=temperature, max_tokens=compared.max_tokens, ignore_eos=not ends)
            measured.add(methods, name, requests, params, settings.rounds, details=details)
    report = Report(
        "generate",
        measured.tables,
        target,
        drafter_facts(chosen, counts),
        {"max_tokens": compared.max_tokens, "rounds": settings.rounds, "stop_at_eos": measured.stops},
        measured.prompts,
        measured.rows,
        measured.figures,
    )
    print_report(report, watch, json)


class Speeds:
    """Measurements of whole generations, collected by workload and temperature.

    Args:
        about: description of the target, for titles.
        drafters: method -> drafter's name.

    Attributes:
        tables, prompts, rows, figures: see `Report`.
        stops: workloads whose answers end where the model ends them.
    """

    def __init__(self, about: str, drafters: Mapping[str, str]) -> None:
        self._about = about
        self._drafters = drafters
        self._firsts: dict[str, int] = {}
        self.tables: list[Table] = []
        self.stops: list[str] = []
        self.prompts: list[PromptFacts] = []
        self.rows: list[RunRow] = []
        self.figures: list[Figure] = []

    def add(
        self,
        methods: Methods,
        workload: str,
        requests: Sequence[BenchPrompt],
        params: SamplingParams,
        rounds: int,
        *,
        details: bool,
    ) -> None:
        """Measure every method on the prompts of a workload at one temperature; rows by category too."""
        from forerun.lab.bench import generate as bench
        from forerun.lab.bench.compare import PLAIN
        from forerun.lab.bench.recorded import method_figures, prompt_facts, run_rows

        temperature = params.temperature
        label = f"{workload}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}"
        say(f"measuring {label}")
        if workload not in self._firsts:
            self._firsts[workload] = len(self.prompts)
            self.prompts += prompt_facts(workload, requests)
            self.stops += [] if params.ignore_eos else [workload]
        runs = bench.run_methods(methods, requests, params, rounds, say)
        found = bench.reduce_by_category(runs, requests, rounds)
        self.rows += run_rows(runs, self._drafters, PLAIN, temperature, rounds, self._firsts[workload])
        self.figures += method_figures(workload, temperature, found, self._drafters)
        ends = "past any end of text" if params.ignore_eos else "up to the end of text"
        about = f"{len(requests)} prompts of {params.max_tokens} tokens, {ends}, rounds: {rounds}"
        for category, rows in found.items():
            name = f"{label}, {category}" if category else label
            title = f"{self._about}, " + (name if category else f"{label}, {about}")
            self.tables += bench.tables(title, name, rows, details=details)
