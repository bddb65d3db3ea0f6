"""Speed of whole generations: forerun's methods beside Hugging Face's, on the prompts of a workload.

One sequence, greedy or with a seed for each prompt; a fixed number of tokens, or up to the end of text. Either way
forerun's methods write the same text. Speeds are compared per prompt and round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import numpy as np

from forerun.config import SamplingParams
from forerun.engine import LLM
from forerun.lab.bench.compare import MethodRun
from forerun.lab.bench.measure import Interval, Timed, bootstrap, interleave, ratio
from forerun.lab.bench.methods import PLAIN, Reference, generate_watched, with_prediction
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.bench.tables import Columns, Table, decimal, percent

HF_PLAIN = "transformers, plain"
_ASSISTED = "transformers, assisted"
UNNAMED = "no category"
"""What the prompts without a category are called beside others."""


def assisted_name(k: int) -> str:
    """The name of Transformers' assisted generation with K draft tokens."""
    return f"{_ASSISTED}, K={k}"


@dataclass(frozen=True, slots=True)
class Methods:
    """What is compared.

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
        """One generation of each method. Transformers takes part in greedy runs only."""
        plain, prompt, max_tokens = self.engines[PLAIN], request.token_ids, params.max_tokens
        ends = () if params.ignore_eos else plain.target.eos_token_ids
        methods: dict[str, Callable[[], MethodRun]] = {}
        for name, llm in self.engines.items():
            methods[name] = partial(generate_watched, llm, prompt, with_prediction(params, llm.drafter, request))
        if self.reference is not None and params.greedy:
            methods[HF_PLAIN] = partial(self.reference.generate, prompt, max_tokens, ends=ends)
            for k in self.assisted_counts if self.draft is not None else ():
                methods[assisted_name(k)] = partial(
                    self.reference.generate, prompt, max_tokens, self.draft, k, ends=ends
                )
        return methods


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method. Ratios are above 1 where this method is faster; they are over the same prompts and rounds.

    Attributes:
        method: its name.
        tokens_per_second: median.
        over_plain: speed over forerun's plain decoding.
        over_transformers: speed over Transformers' plain generate.
        over_assisted: speed over Transformers' assisted generation at its best K; None without a draft model.
        mean_acceptance_length: tokens per target forward; None where unknown.
        acceptance_rate: accepted over drafted; None where nothing was drafted or it is unknown.
        first_token: median seconds to the first token; None where unknown.
        first_token_p90: nine tenths of the first tokens came within so many seconds; None where unknown.
        acceptance_per_position: [position] accepted over drafted there, below what was accepted before it.
        same_text: share of prompts on which its tokens are those of forerun's plain decoding.
        num_runs: how many generations are behind it.
        step: median milliseconds of a step, of the target's forwards in it, and of the drafter's work; empty where
            unknown.
    """

    method: str
    tokens_per_second: Interval
    over_plain: Interval
    over_transformers: Interval | None
    over_assisted: Interval | None
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    first_token: float | None
    first_token_p90: float | None
    acceptance_per_position: Sequence[float]
    same_text: float
    num_runs: int = 0
    step: Sequence[float] = ()


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
"""Draft positions whose acceptance tables and figures tell; single runs and CSV have all."""


def reduce_by_category(
    runs: Mapping[str, Sequence[Timed[MethodRun]]], requests: Sequence[BenchPrompt], rounds: int
) -> dict[str, list[MethodRow]]:
    """A row per method under "", and where there are several categories, one under the name of each."""
    categories = [request.category for request in requests for _ in range(rounds)]
    rows = {"": reduce_runs(runs)}
    if len(set(categories)) > 1:
        for category in dict.fromkeys(categories):
            places = [place for place, each in enumerate(categories) if each == category]
            part = {name: [timed[place] for place in places] for name, timed in runs.items()}
            rows[category or UNNAMED] = reduce_runs(part)
    return rows


def measure(
    methods: Methods,
    requests: Sequence[BenchPrompt],
    params: SamplingParams,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Timed[MethodRun]]]:
    """Every method on every prompt, in turn. Run i of all methods is of the same prompt and round."""
    runs: dict[str, list[Timed[MethodRun]]] = {}
    for number, request in enumerate(requests, 1):
        ready = methods.for_request(request, replace(params, seed=number))
        say(f"prompt {number} of {len(requests)}: {len(ready)} methods, {rounds} rounds")
        for name, timed in interleave(ready, rounds, warmup=1 if number == 1 else 0).items():
            runs.setdefault(name, []).extend(timed)
    return runs


def reduce_runs(runs: Mapping[str, Sequence[Timed[MethodRun]]]) -> list[MethodRow]:
    """One row per method. Speeds are compared per token: where texts end by themselves, they may differ in length."""
    per_token = {name: [run.seconds / len(run.value.token_ids) for run in timed] for name, timed in runs.items()}
    assisted = [name for name in per_token if name.startswith(_ASSISTED)]
    best = min(assisted, key=lambda name: statistics.median(per_token[name]), default=None)
    rows = []
    for name, timed in runs.items():
        forwards = sum(run.value.num_forwards for run in timed)
        drafted = sum(run.value.num_drafted for run in timed)
        first = [run.value.first_seconds for run in timed if run.value.first_seconds is not None]
        same = [list(a.value.token_ids) == list(b.value.token_ids) for a, b in zip(timed, runs[PLAIN], strict=True)]
        rows.append(
            MethodRow(
                name,
                tokens_per_second=bootstrap([1 / seconds for seconds in per_token[name]]),
                over_plain=ratio(per_token[PLAIN], per_token[name]),
                over_transformers=ratio(per_token[HF_PLAIN], per_token[name]) if HF_PLAIN in per_token else None,
                over_assisted=ratio(per_token[best], per_token[name]) if best else None,
                mean_acceptance_length=sum(len(run.value.token_ids) for run in timed) / forwards if forwards else None,
                acceptance_rate=sum(run.value.num_accepted for run in timed) / drafted if drafted else None,
                first_token=statistics.median(first) if first else None,
                first_token_p90=float(np.quantile(first, 0.9)) if first else None,
                acceptance_per_position=_per_position([run.value for run in timed]),
                same_text=sum(same) / len(same),
                num_runs=len(timed),
                step=_step(timed),
            )
        )
    return rows


def tables(title: str, name: str, rows: Sequence[MethodRow], *, details: bool) -> list[Table]:
    """Speeds, and acceptance by position where anything was drafted. name: of what was measured, without the model.

    details: where the time of a step goes, too.
    """
    made = [Table.of(title, COLUMNS, rows)]
    if details:
        made.append(Table.of(f"Time per step in ms, {name}", STEP_COLUMNS, [row for row in rows if row.step]))
    positions = position_table(f"Acceptance by draft position, {name}", rows)
    return made if positions is None else [*made, positions]


def position_table(title: str, rows: Sequence[MethodRow]) -> Table | None:
    """Acceptance at each draft position, of the drafts that reached it; None where nobody drafted."""
    drafting = [row for row in rows if row.acceptance_per_position]
    count = min(POSITIONS, max((len(row.acceptance_per_position) for row in drafting), default=0))
    cells = [
        [
            row.method,
            *(
                percent(row.acceptance_per_position[i] if i < len(row.acceptance_per_position) else None)
                for i in range(count)
            ),
        ]
        for row in drafting
    ]
    return Table(title, ["method", *(str(place) for place in range(1, count + 1))], cells) if drafting else None


def _per_position(runs: Sequence[MethodRun]) -> list[float]:
    """Accepted over reached, up to the last position that any draft reached."""
    pairs = [zip_longest(*(getattr(run, kind) for run in runs), fillvalue=0) for kind in ("reached", "accepted")]
    counts = [(sum(reached), sum(accepted)) for reached, accepted in zip(*pairs, strict=True)]
    return [accepted / reached for reached, accepted in counts if reached]


def _step(timed: Sequence[Timed[MethodRun]]) -> list[float]:
    """See `MethodRow.step`."""
    parts = [
        [1e3 * part / run.value.num_forwards for part in (run.seconds, run.value.time_target, run.value.time_draft)]
        for run in timed
        if run.value.time_target
    ]
    return [statistics.median(part) for part in zip(*parts, strict=True)]


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.0f}"
