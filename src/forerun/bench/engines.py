"""forerun's engines as methods of a measurement: their names, how they are opened, and one generation of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

from forerun.bench.compare import Run
from forerun.bench.prompts import Request
from forerun.config import AUTO, OFF, NumDraftTokens, SamplingParams
from forerun.drafters import Drafter, build_drafter
from forerun.engine import LLM, SequenceStats
from forerun.engine.results import StepOutput
from forerun.models import LanguageModel, Rows
from forerun.workloads import Case

BARE = "forerun, bare loop"
PLAIN = "forerun, plain"
CHAIN_NUM_DRAFT_TOKENS = 4
"""K at which acceptance is reported for a drafter whose text gives no K, as in most publications."""


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


def open_engines(
    plain: LLM, drafters: Mapping[str, str], counts: Sequence[NumDraftTokens]
) -> tuple[dict[str, LLM], dict[tuple[str, int], LLM]]:
    """Engines over the target of `plain`: by method name for speed, by (drafter, the K of its text) for acceptance.

    drafters: name -> the drafter's text.
    """
    engines: dict[str, LLM] = {PLAIN: plain}
    acceptance: dict[tuple[str, int], LLM] = {}
    for name, spec in drafters.items():
        for k in counts:
            engines[method_name(name, k)] = beside(plain, spec, k)
        _, written = build_drafter(spec)
        usual = written if isinstance(written, int) else CHAIN_NUM_DRAFT_TOKENS
        acceptance[name, usual] = engines.get(method_name(name, usual)) or beside(plain, spec, usual)
    return engines, acceptance


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


def bare_loop(model: LanguageModel, prompt: Sequence[int], max_tokens: int, ends: Collection[int] = ()) -> Run:
    """Greedy decoding over forerun's forward and nothing else: an upper bound for the speed of plain decoding.

    ends: tokens that end it.
    """
    start = perf_counter()
    cache = model.new_cache()
    logits = model.forward([Rows(cache, prompt, num_logits=1)]).logits
    cache.commit(range(len(prompt)))
    tokens = [int(logits[-1].argmax())]
    times = [perf_counter()]
    while len(tokens) < max_tokens and tokens[-1] not in ends:
        logits = model.forward([Rows(cache, tokens[-1:])]).logits
        cache.commit([0])
        tokens.append(int(logits[-1].argmax()))
        times.append(perf_counter())
    cache.free()
    gaps = [now - before for before, now in pairwise(times)]
    return Run(tokens, len(tokens), first_seconds=times[0] - start, gaps=gaps)
