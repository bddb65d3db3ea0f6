"""Speed of whole generations: forerun's methods beside Hugging Face's, on the prompts of a workload.

One sequence, a fixed number of tokens, greedy or with a seed for each prompt: every method has the same work, and
forerun's methods write the same text. Speeds are compared per prompt and round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from forerun.bench.compare import Run
from forerun.bench.engines import BARE, PLAIN, bare_loop, generate, prompt_ids, with_prediction
from forerun.bench.measure import Interval, Timed, bootstrap, interleave, ratio
from forerun.bench.reference import Reference
from forerun.bench.report import Columns, decimal, percent
from forerun.config import SamplingParams
from forerun.engine import LLM
from forerun.workloads import Case

HF_PLAIN = "transformers, plain"
_ASSISTED = "transformers, assisted"


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

    def for_case(self, case: Case, params: SamplingParams) -> dict[str, Callable[[], Run]]:
        """One generation of each method. The bare loop and Transformers take part in greedy runs only."""
        plain, max_tokens = self.engines[PLAIN], params.max_tokens
        prompt = prompt_ids(plain, case)
        methods: dict[str, Callable[[], Run]] = {}
        if params.greedy:
            methods[BARE] = partial(bare_loop, plain.target, prompt, max_tokens)
        for name, llm in self.engines.items():
            methods[name] = partial(generate, llm, prompt, with_prediction(params, llm.drafter, case))
        if self.reference is not None and params.greedy:
            methods[HF_PLAIN] = partial(self.reference.generate, prompt, max_tokens)
            for k in self.assisted_counts if self.draft is not None else ():
                methods[assisted_name(k)] = partial(self.reference.generate, prompt, max_tokens, self.draft, k)
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
        same_text: share of prompts on which its tokens are those of forerun's plain decoding.
    """

    method: str
    tokens_per_second: Interval
    over_plain: Interval
    over_transformers: Interval | None
    over_assisted: Interval | None
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    same_text: float


COLUMNS: Columns[MethodRow] = {
    "method": lambda row: row.method,
    "tokens/s": lambda row: f"{row.tokens_per_second.median:.1f}",
    "over forerun plain": lambda row: decimal(row.over_plain),
    "over transformers plain": lambda row: decimal(row.over_transformers),
    "over best assisted": lambda row: decimal(row.over_assisted),
    "mean acceptance length": lambda row: decimal(row.mean_acceptance_length),
    "acceptance rate": lambda row: percent(row.acceptance_rate),
    "same text": lambda row: percent(row.same_text),
}


def measure(
    methods: Methods,
    cases: Sequence[Case],
    max_tokens: int,
    rounds: int,
    temperature: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[MethodRow]:
    """One row per method; every method on every prompt, in turn."""
    return reduce_runs(timed_runs(methods, cases, max_tokens, rounds, temperature, say))


def timed_runs(
    methods: Methods,
    cases: Sequence[Case],
    max_tokens: int,
    rounds: int,
    temperature: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Timed[Run]]]:
    """Every method on every prompt, in turn. Run i of all methods is of the same prompt and round."""
    runs: dict[str, list[Timed[Run]]] = {}
    for number, case in enumerate(cases, 1):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=max_tokens, ignore_eos=True)
        ready = methods.for_case(case, params)
        say(f"prompt {number} of {len(cases)}: {len(ready)} methods, {rounds} rounds")
        for name, timed in interleave(ready, rounds, warmup=1 if number == 1 else 0).items():
            runs.setdefault(name, []).extend(timed)
    return runs


def reduce_runs(runs: Mapping[str, Sequence[Timed[Run]]]) -> list[MethodRow]:
    """One row per method."""
    seconds = {name: [run.seconds for run in timed] for name, timed in runs.items()}
    assisted = [name for name in seconds if name.startswith(_ASSISTED)]
    best = min(assisted, key=lambda name: statistics.median(seconds[name]), default=None)
    rows = []
    for name, timed in runs.items():
        forwards = sum(run.value.num_forwards for run in timed)
        drafted = sum(run.value.num_drafted for run in timed)
        same = [list(a.value.token_ids) == list(b.value.token_ids) for a, b in zip(timed, runs[PLAIN], strict=True)]
        rows.append(
            MethodRow(
                name,
                bootstrap([len(run.value.token_ids) / run.seconds for run in timed]),
                ratio(seconds[PLAIN], seconds[name]),
                ratio(seconds[HF_PLAIN], seconds[name]) if HF_PLAIN in seconds else None,
                ratio(seconds[best], seconds[name]) if best else None,
                sum(len(run.value.token_ids) for run in timed) / forwards if forwards else None,
                sum(run.value.num_accepted for run in timed) / drafted if drafted else None,
                sum(same) / len(same),
            )
        )
    return rows
