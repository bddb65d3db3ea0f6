"""forerun's engines as methods of a measurement: their names, how they are opened, and one generation of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

from forerun.bench.compare import Run
from forerun.bench.prompts import Request
from forerun.config import AUTO, OFF, NumDraftTokens, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import LLM, SequenceStats
from forerun.engine.results import StepOutput
from forerun.workloads import Case

PLAIN = "forerun, plain"


def method_name(drafter: str, k: NumDraftTokens) -> str:
    """The name of one of forerun's methods."""
    return f"forerun, {drafter}, {k}" if k == AUTO else f"forerun, {drafter}, K={k}"


def beside(plain: LLM, drafter: str, num_draft_tokens: NumDraftTokens) -> LLM:
    """An engine with a drafter over the target of another engine, with its draws seeded.

    num_draft_tokens: "auto" keeps a K that is part of the drafter's text.
    """
    k = None if num_draft_tokens == AUTO else num_draft_tokens
    return LLM(
        plain.target,
        drafter=drafter,
        num_draft_tokens=k,
        tokenizer=plain.tokenizer,
        seed=0,
        prefix_reuse=OFF,  # no method is to find a prompt that another has computed
    )


def with_prediction(params: SamplingParams, drafter: Drafter | None, case: Case | Request) -> SamplingParams:
    """The params with the case's reference as the client's prediction, if the drafter reads predictions."""
    if case.reference and drafter is not None and drafter.traits.reads_prediction:
        return replace(params, prediction=case.reference)
    return params


def generate(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Run:
    """One generation. prompt: text or token ids."""
    generation: Any = llm.generate(prompt, params)
    return _run(generation.token_ids, generation.stats)


def _run(token_ids: Sequence[int], stats: SequenceStats) -> Run:
    return Run(
        token_ids,
        stats.num_forwards,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.time_first_token,
        stats.reached_per_position,
        stats.accepted_per_position,
        time_target=stats.time_target,
        time_draft=stats.time_draft,
    )


def generate_watched(llm: LLM, prompt: list[int], params: SamplingParams) -> Run:
    """The same, step by step, with the times between tokens. Nothing is done that `LLM.generate` does not do.

    params: one choice.
    """
    ids: list[int] = []
    inbox: deque[StepOutput] = deque()
    arrivals: list[tuple[float, int]] = []
    try:
        llm.shared.add(prompt, params, False, ids, inbox)
        while not inbox:
            llm.shared.advance(inbox, lambda: False)
            if count := llm.engine.last_step.num_tokens:
                arrivals.append((perf_counter(), count))
    finally:
        llm.shared.forget(ids)
    output = inbox.popleft()
    if output.error is not None:
        raise output.error
    assert output.choice is not None
    return replace(_run(output.choice.token_ids, output.choice.stats), gaps=gaps_of(arrivals))


def gaps_of(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds between tokens: those that come together share the time since the tokens before.

    arrivals: (seconds, tokens) of everything that came.
    """
    found: list[float] = []
    for (before, _), (now, count) in pairwise(arrivals):
        found += [(now - before) / count] * count
    return found
