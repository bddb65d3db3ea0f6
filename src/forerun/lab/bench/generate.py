"""Speed of whole generations: forerun's methods beside Hugging Face's, on the prompts of a workload.

One sequence, greedy or with a seed for each prompt; a fixed number of tokens, or up to the end of text. Either way
forerun's methods write the same text. Speeds are compared per prompt and round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from forerun.config import SamplingParams
from forerun.engine import LLM
from forerun.lab.bench.compare import HF_PLAIN, PLAIN, MethodRow, MethodRun, assisted_name, reduce_runs
from forerun.lab.bench.measure import Timed, interleave
from forerun.lab.bench.methods import Reference, generate_once, with_prediction
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.bench.tables import Columns, Table, decimal, percent

UNNAMED = "no category"
"""The name of the prompts without a category where others have one."""


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods that are compared.

    Attributes:
        engines: forerun's methods by name; PLAIN must be one of them.
        reference: Transformers with the target; None leaves Transformers out.
        draft: Transformers with the draft model, for assisted generation; None leaves that out.
        assisted_counts: values of K of assisted generation.
    """

    engines: Mapping[str, LLM]
    reference: Reference | None = None
    draft: Reference | None = None
    assisted_counts: Sequence[int] = ()

    def for_request(self, request: BenchPrompt, params: SamplingParams) -> dict[str, Callable[[], MethodRun]]:
        """Return a function for each method that generates once. Transformers takes part in greedy runs only."""
        plain = self.engines[PLAIN]
        prompt = request.token_ids
        max_tokens = params.max_tokens
        ends = () if params.ignore_eos else plain.target.eos_token_ids
        methods: dict[str, Callable[[], MethodRun]] = {}
        for name, llm in self.engines.items():
            methods[name] = partial(generate_once, llm, prompt, with_prediction(params, llm.drafter, request))
        if self.reference is not None and params.greedy:
            methods[HF_PLAIN] = partial(self.reference.generate, prompt, max_tokens, ends=ends)
            for k in self.assisted_counts if self.draft is not None else ():
                methods[assisted_name(k)] = partial(
                    self.reference.generate, prompt, max_tokens, self.draft, k, ends=ends
                )
        return methods


COLUMNS: Columns[MethodRow] = {
    "method": lambda row: row.method,
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "over forerun plain": lambda row: decimal(row.over_plain),
    "over transformers plain": lambda row: decimal(row.over_transformers),
    "over best assisted": lambda row: decimal(row.over_assisted),
    "mean acceptance length": lambda row: decimal(row.mean_acceptance_length),
    "acceptance rate": lambda row: percent(row.acceptance_rate),
    "first token ms, median": lambda row: _milliseconds(row.first_token),
    "p90": lambda row: _milliseconds(row.first_token_p90),
    "same text": lambda row: percent(row.same_text),
}
STEP_COLUMNS: Columns[MethodRow] = {
    "method": lambda row: row.method,
    "step": lambda row: f"{row.step[0]:.2f}",
    "target": lambda row: f"{row.step[1]:.2f}",
    "draft": lambda row: f"{row.step[2]:.2f}",
    "engine share": lambda row: percent(1 - (row.step[1] + row.step[2]) / row.step[0]),
}

POSITIONS = 8
"""Draft positions whose acceptance tables and figures show; single runs have all."""


def reduce_by_category(
    runs: Mapping[str, Sequence[Timed[MethodRun]]], requests: Sequence[BenchPrompt], rounds: int
) -> dict[str, list[MethodRow]]:
    """Reduce runs to rows by method under "", and under each category's name where there are several."""
    categories = [request.category for request in requests for _ in range(rounds)]
    rows = {"": reduce_runs(runs)}
    if len(set(categories)) > 1:
        for category in dict.fromkeys(categories):
            of_category = [index for index, each in enumerate(categories) if each == category]
            part = {name: [timed[index] for index in of_category] for name, timed in runs.items()}
            rows[category or UNNAMED] = reduce_runs(part)
    return rows


def run_methods(
    methods: Methods,
    requests: Sequence[BenchPrompt],
    params: SamplingParams,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Timed[MethodRun]]]:
    """Run every method on every prompt, in turn. Run i of all methods is of the same prompt and round."""
    runs: dict[str, list[Timed[MethodRun]]] = {}
    for number, request in enumerate(requests, 1):
        ready = methods.for_request(request, replace(params, seed=number))
        say(f"prompt {number} of {len(requests)}: {len(ready)} methods, {rounds} rounds")
        for name, timed in interleave(ready, rounds, warmup=1 if number == 1 else 0).items():
            runs.setdefault(name, []).extend(timed)
    return runs


def tables(title: str, name: str, rows: Sequence[MethodRow], *, details: bool) -> list[Table]:
    """Make the tables of speeds, and of acceptance by position where anything was drafted. name: what was measured,
    without the model.

    details: where the time of a step goes, too.
    """
    made = [Table.of(title, COLUMNS, rows)]
    if details:
        made.append(Table.of(f"Time per step in ms, {name}", STEP_COLUMNS, [row for row in rows if row.step]))
    positions = position_table(f"Acceptance by draft position, {name}", rows)
    return made if positions is None else [*made, positions]


def position_table(title: str, rows: Sequence[MethodRow]) -> Table | None:
    """Make the table of acceptance at each draft position, of the drafts that reached it; None without drafts."""
    drafting = [row for row in rows if row.acceptance_per_position]
    count = min(POSITIONS, max((len(row.acceptance_per_position) for row in drafting), default=0))
    cells = [
        [row.method, *(percent(share) for share, _ in zip_longest(row.acceptance_per_position[:count], range(count)))]
        for row in drafting
    ]
    return Table(title, ["method", *map(str, range(1, count + 1))], cells) if drafting else None


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.0f}"
