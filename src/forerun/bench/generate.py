"""`forerun bench generate`: whole generations, forerun's methods beside Hugging Face's, on held-out prompts.

One sequence, a fixed number of tokens, greedy or with a seed for each prompt: every method has the same work, and
forerun's write the same text. Speeds are compared per prompt and round; acceptance is measured apart, without seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from forerun.bench.compare import Run
from forerun.bench.measure import Interval, Timed, bootstrap, interleave, ratio
from forerun.bench.reference import Reference
from forerun.bench.workloads import Case, with_prediction
from forerun.config import AUTO, NumDraftTokens, SamplingParams
from forerun.drafters import build_drafter
from forerun.engine import LLM
from forerun.models import Forward, LanguageModel, Rows

BARE = "forerun, bare loop"
PLAIN = "forerun, plain"
CHAIN_NUM_DRAFT_TOKENS = 4
HF_PLAIN = "transformers, plain"


def own_name(drafter: str, k: NumDraftTokens) -> str:
    """The name of a method of forerun."""
    return f"forerun, {drafter}, {k}" if k == AUTO else f"forerun, {drafter}, K={k}"


def assisted_name(k: int) -> str:
    """The name of Transformers' assisted generation with K draft tokens."""
    return f"transformers, assisted, K={k}"


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


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """Where a step's time goes, in milliseconds per step that gives tokens.

    Attributes:
        method: its name.
        step: the whole step.
        target: inside the target's forwards.
        draft: inside the draft model's forwards.
        engine: all the rest, drafting without a model included.
    """

    method: str
    step: float
    target: float
    draft: float
    engine: float


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """What a drafter's proposals are worth on a workload, at one temperature."""

    workload: str
    drafter: str
    num_draft_tokens: int
    temperature: float
    acceptance_rate: float
    mean_acceptance_length: float


def bare_loop(model: LanguageModel, prompt: Sequence[int], max_tokens: int) -> Run:
    """Greedy decoding over forerun's own forward and nothing else: the most that its plain decoding could reach."""
    cache = model.new_cache()
    logits = model.forward([Rows(cache, prompt, num_logits=1)]).logits
    cache.commit(range(len(prompt)))
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < max_tokens:
        logits = model.forward([Rows(cache, tokens[-1:])]).logits
        cache.commit([0])
        tokens.append(int(logits[-1].argmax()))
    cache.free()
    return Run(tokens, len(tokens))


def beside(plain: LLM, drafter: str, num_draft_tokens: NumDraftTokens) -> LLM:
    """An engine with a drafter over the target of another engine. Its own draws are the same each time.

    num_draft_tokens: "auto" leaves a K that is written in the drafter's text as it is.
    """
    k = None if num_draft_tokens == AUTO else num_draft_tokens
    return LLM(plain.target, drafter=drafter, num_draft_tokens=k, tokenizer=plain.tokenizer, seed=0)


def usual_num_draft_tokens(drafter: str) -> int:
    """The K at which a drafter's acceptance is reported: its own, or that of chains in most tables of the field."""
    own = getattr(build_drafter(drafter), "num_draft_tokens", None)
    return own if isinstance(own, int) else CHAIN_NUM_DRAFT_TOKENS


def own_run(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Run:
    """One generation of forerun."""
    generation: Any = llm.generate(list(prompt), params)
    stats = generation.stats
    return Run(generation.token_ids, stats.num_forwards, stats.num_draft_tokens, stats.num_accepted_tokens)


def prompt_ids(llm: LLM, case: Case) -> list[int]:
    """The prompt in the target's tokens; without a tokenizer it holds ids, with spaces between them."""
    if llm.tokenizer is None:
        return [int(each) for each in case.prompt.split()]
    ids: list[int] = llm.tokenizer.encode(case.prompt)
    return ids


def measure_methods(
    own: Mapping[str, LLM],
    reference: Reference | None,
    draft: Reference | None,
    draft_tokens: Sequence[int],
    cases: Sequence[Case],
    max_tokens: int,
    rounds: int,
    say: Callable[[str], None],
    temperature: float = 0.0,
) -> dict[str, list[Timed[Run]]]:
    """Every method on every prompt, in turn; `own` must hold PLAIN. Run i of all methods is of one prompt and round.

    The bare loop and Transformers take part in greedy runs only.
    """
    target = own[PLAIN].target
    runs: dict[str, list[Timed[Run]]] = {}
    for number, case in enumerate(cases, 1):
        prompt = prompt_ids(own[PLAIN], case)
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=max_tokens, ignore_eos=True)
        methods: dict[str, Callable[[], Run]] = {}
        if temperature == 0:
            methods[BARE] = partial(bare_loop, target, prompt, max_tokens)
        for name, llm in own.items():
            methods[name] = partial(own_run, llm, prompt, with_prediction(params, llm.drafter, case))
        if reference is not None and temperature == 0:
            methods[HF_PLAIN] = partial(reference.generate, prompt, max_tokens)
            for k in draft_tokens if draft is not None else ():
                methods[assisted_name(k)] = partial(reference.generate, prompt, max_tokens, draft, k)
        say(f"prompt {number} of {len(cases)}: {len(methods)} methods, {rounds} rounds")
        for name, timed_runs in interleave(methods, rounds, warmup=1 if number == 1 else 0).items():
            runs.setdefault(name, []).extend(timed_runs)
    return runs


def reduce_methods(runs: Mapping[str, Sequence[Timed[Run]]]) -> list[MethodRow]:
    """One row per method."""
    seconds = {name: [run.seconds for run in own] for name, own in runs.items()}
    assisted = [name for name in seconds if name.startswith("transformers, assisted")]
    best = min(assisted, key=lambda name: statistics.median(seconds[name]), default=None)
    rows = []
    for name, own in runs.items():
        forwards = sum(run.value.num_forwards for run in own)
        drafted = sum(run.value.num_drafted for run in own)
        same = [list(a.value.token_ids) == list(b.value.token_ids) for a, b in zip(own, runs[PLAIN], strict=True)]
        rows.append(
            MethodRow(
                name,
                bootstrap([len(run.value.token_ids) / run.seconds for run in own]),
                ratio(seconds[PLAIN], seconds[name]),
                ratio(seconds[HF_PLAIN], seconds[name]) if HF_PLAIN in seconds else None,
                ratio(seconds[best], seconds[name]) if best else None,
                sum(len(run.value.token_ids) for run in own) / forwards if forwards else None,
                sum(run.value.num_accepted for run in own) / drafted if drafted else None,
                sum(same) / len(same),
            )
        )
    return rows


class Stopwatch:
    """Adds up the time a model spends in its forward, while the block lasts."""

    def __init__(self, model: LanguageModel | None) -> None:
        self._model = model
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        if self._model is None:
            return self
        forward = self._model.forward

        def watched(batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
            start = perf_counter()
            result = forward(batch, layers)
            self.seconds += perf_counter() - start
            return result

        # On the instance only: taking it away again leaves the class's method.
        self._model.forward = watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        if self._model is not None:
            del self._model.__dict__["forward"]


def measure_overhead(own: Mapping[str, LLM], prompts: Sequence[Sequence[int]], max_tokens: int) -> list[OverheadRow]:
    """Medians over the prompts of where the time of a greedy generation goes, per step."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    rows = []
    for name, llm in own.items():
        draft: LanguageModel | None = getattr(llm.drafter, "model", None)
        own_run(llm, prompts[0], params)
        parts = []
        for prompt in prompts:
            with Stopwatch(llm.target) as target_watch, Stopwatch(draft) as draft_watch:
                start = perf_counter()
                run = own_run(llm, prompt, params)
                total = perf_counter() - start
            rest = total - target_watch.seconds - draft_watch.seconds
            scale = 1000 / run.num_forwards
            parts.append([scale * part for part in (total, target_watch.seconds, draft_watch.seconds, rest)])
        rows.append(OverheadRow(name, *(statistics.median(column) for column in zip(*parts, strict=True))))
    return rows


def measure_acceptance(
    own: Mapping[tuple[str, int], LLM], workloads: Mapping[str, Sequence[Case]], max_tokens: int
) -> list[AcceptanceRow]:
    """Acceptance of every (drafter, K) on every workload at temperature 0 and 1, over all its prompts together."""
    rows = []
    for workload, cases in workloads.items():
        for (drafter, k), llm in own.items():
            for temperature in (0.0, 1.0):
                params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
                generations: Any = llm.generate([case.prompt for case in cases], params)
                stats = [generation.stats for generation in generations]
                drafted = sum(each.num_draft_tokens for each in stats)
                rate = sum(each.num_accepted_tokens for each in stats) / drafted if drafted else 0.0
                length = sum(each.num_tokens for each in stats) / sum(each.num_forwards for each in stats)
                rows.append(AcceptanceRow(workload, drafter, k, temperature, rate, length))
    return rows
