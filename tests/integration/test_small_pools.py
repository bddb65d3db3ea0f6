"""Every drafter in a pool that is too small for its requests: who loses its place writes what it would have written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drafter_rows import TWINS, rows
from forerun import LLM, SamplingParams
from forerun.config import REFERENCE
from forerun.kernels.cpu import native
from forerun.kernels.cpu.page_layout import PAGE
from forerun.utils import workloads
from forerun.utils.machine import GIB
from heads import text_of
from pool_integrity import check_integrity

NUM_NEW, K = 40, 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
PARAMS = [GREEDY, replace(GREEDY, temperature=0.9, seed=4), replace(GREEDY, logprobs=1), replace(GREEDY, priority=1)]
SHARED, LONG = 70, 120
"""Tokens with which the prompts begin alike, and tokens of a prompt."""


@pytest.fixture(scope="module", params=["bfloat16", "int8", pytest.param("float32", marks=pytest.mark.slow)])
def plain(request: pytest.FixtureRequest) -> LLM:
    """Plain decoding in a number format; "int8": of keys and values alone."""
    if request.param == "int8":
        if native() is None:
            pytest.skip("there are no native kernels here")
        return LLM("bundled", None, kv_cache_dtype="int8", prefix_reuse="off")
    return LLM("bundled", None, dtype=request.param, prefix_reuse="off")


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    assert plain.tokenizer is not None
    texts = [plain.tokenizer(case.prompt)["input_ids"] for case in workloads.load_workload("code", 4)]
    return [texts[0][:SHARED] + text[: LONG - SHARED] for text in texts]


@pytest.fixture(scope="module")
def expected(plain: LLM, prompts: list[list[int]]) -> list[Any]:
    """By request, alone, with all the memory that it wants."""
    return [plain.generate(prompt, params) for prompt, params in zip(prompts, PARAMS, strict=True)]


def pages(llm: LLM, num_slots: int) -> int:
    return llm.target.new_cache().pages_wanted(num_slots)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("drafter", rows(slow=TWINS))
def test_nobody_sees_who_lost_its_place(
    plain: LLM, prompts: list[list[int]], expected: list[Any], drafter: str
) -> None:
    pool = plain.target.pool
    assert pool is not None
    assert plain.exact
    room = int(1.9 * pages(plain, LONG + NUM_NEW))  # for less than two of the four, but for what they share
    every = PARAMS
    if drafter == "prediction":
        every = [replace(one, prediction=each.token_ids[::2]) for one, each in zip(PARAMS, expected, strict=True)]
    llm = LLM(
        plain.target,
        text_of(drafter),
        num_draft_tokens=K,
        tokenizer=plain.tokenizer,
        max_batch=4,
        cache_memory=room * pool.page_nbytes / GIB,
    )
    try:
        assert pool.num_pages == room
        results = llm.generate(prompts, every)
        check_integrity(pool)
        for result, reference in zip(results, expected, strict=True):
            assert result.token_ids == reference.token_ids
            assert result.logprobs == reference.logprobs
        if llm.target.kernels != REFERENCE:  # of the reference's caches, which double, one alone finds room
            assert sum(result.stats.num_preemptions for result in results) > 0
        again = llm.generate(prompts[3], every[3])
        assert again.token_ids == expected[3].token_ids
        assert again.stats.num_cached_tokens >= PAGE
        check_integrity(pool)
    finally:
        pool.limit(None)
