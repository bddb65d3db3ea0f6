"""Requests of all kinds for a long time (FORERUN_SOAK minutes): when nobody is there, nothing has grown."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.utils import workloads
from forerun.utils.machine import GIB
from pool_integrity import check_integrity

MINUTES = float(os.environ.get("FORERUN_SOAK", "1"))
ROUND = 24
"""Requests between two looks."""


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def request(rng: random.Random, texts: list[list[int]]) -> tuple[list[int], SamplingParams]:
    text = rng.choice(texts)
    start = min(rng.choice([0, 0, 0, 64, 128]), len(text) // 2)
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.choice([None, 3]),
        max_tokens=rng.choice([4, 16, 40]),
        tenant=rng.choice([None, "a", "b"]),
        priority=rng.choice([0, 0, 1]),
        logprobs=rng.choice([None, None, 1]),
        stop=rng.choice([(), ("\n\n",)]),
    )
    if params.temperature and rng.random() < 0.2:
        params = SamplingParams(n=3, temperature=0.8, max_tokens=8)
    return text[start : start + rng.choice([20, 90, 150])], params


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_nothing_grows() -> None:
    llm = LLM("bundled", "hybrid:sources=suffix+draft-model,mode=merge", max_batch=8, seed=0)
    pool, drafter, engine = llm.target.pool, llm.drafter, llm.engine
    assert pool is not None
    assert drafter is not None
    assert llm.tokenizer is not None
    pool.limit(int(0.05 * GIB / pool.page_nbytes))
    for each in drafter.pools:
        each.limit(32)  # what is kept for later prompts is then full before memory is looked at
    texts = [llm.tokenizer(case.prompt)["input_ids"] for case in workloads.load_workload("code", 8)]
    rng, started, looks = random.Random(0), time.monotonic(), []
    while time.monotonic() < started + 60 * MINUTES:
        ids = [engine.add(*request(rng, texts)) for _ in range(ROUND)]
        while engine.has_work:
            engine.step()
            if rng.random() < 0.01:
                engine.abort(rng.choice(ids))
        pools = (pool, *drafter.pools)
        for each in pools:
            check_integrity(each)
            assert each.num_pages is not None
            assert each.num_taken <= each.num_pages
        held = tuple(each.num_taken - each.num_published for each in pools)  # type: ignore[attr-defined]
        tables = (len(engine.scheduler), len(engine.outputs), drafter.nbytes)
        looks.append((time.monotonic() - started, held, tables, resident()))
    assert len({(held, tables) for _, held, tables, _ in looks}) == 1, looks[-1]
    quarter = next(look for look in looks if look[0] >= 15 * MINUTES)
    print(
        f"{len(looks)} rounds of {ROUND} requests, {MINUTES} minutes: {quarter[3]}, then {looks[-1][3]} bytes resident"
    )
    assert looks[-1][3] < 1.02 * quarter[3]
