"""The fuzzers find what they are for: each is run on the engine as it was before it was mended."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from forerun import config
from forerun.engine import Engine, step, text as text_module
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kv_cache import page_pool, paged as paged_cache, prefix_tree, sequence_cache
from fuzzing import fails

from .interrupting import Interrupts
from .test_drafters import test_others_are_as_without_it as drafters_fuzzer
from .test_interrupts import (
    DRAFTERS,
    GIVEN,
    open_llm,
    plain,
    requests,
    test_a_step_is_interrupted as steps_fuzzer,
    test_another_call_is_interrupted as calls_fuzzer,
    work,
)
from .test_options import test_every_field_takes_or_refuses_any_value as options_fuzzer
from .test_pool import Pools, walk as pool_fuzzer
from .test_text import test_the_text_does_not_depend_on_the_blocks as text_fuzzer


def forget(engine: Engine, error: Exception | None = None) -> None:
    """An engine that goes on after an interrupt as if nothing had been half done."""
    for state in engine._ending:
        engine._loop.end(state)
    engine._ending, engine._loop.under_way = [], []


def finds(fuzzer: Any) -> bool:
    """Whether it fails for some drafter, in whatever way."""
    return any(fails(fuzzer, 4, GIVEN, kind=kind) for kind in DRAFTERS)


@pytest.mark.parametrize("fuzzer", [steps_fuzzer, calls_fuzzer])
def test_steps_that_are_not_taken_back_are_found(fuzzer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_recover", forget)
    for kind in ("none", "suffix", "staged"):  # where nothing is interrupted, it does what it is to do
        assert work(kind, open_llm(kind, 4), Interrupts()) == plain(kind, 0)[0]
    llm = open_llm("none", 0)
    llm.engine.abort(llm.engine.add(*requests(None)[0]))
    assert [output.choice.finish_reason for output in llm.engine.step() if output.choice] == ["abort"]
    assert finds(fuzzer)


def test_outputs_that_an_interrupt_loses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Engine.advance

    def losing(engine: Any) -> None:
        try:
            advance(engine)
        except BaseException:
            engine.outputs.clear()
            raise

    monkeypatch.setattr(Engine, "advance", losing)
    assert finds(calls_fuzzer)


def test_drafts_that_nobody_checks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(
        drafter: Any,
        sequences: Any,
        num_draft_tokens: Any,
        min_acceptance_prob: float = 0.0,
        vocab_size: int | None = None,
    ) -> Any:
        return drafter.draft(sequences, num_draft_tokens, min_acceptance_prob)

    monkeypatch.setattr(step, "checked_drafts", ask)
    with pytest.raises(BaseException):  # noqa: B017
        drafters_fuzzer()


def test_options_that_nobody_checks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "check_options", lambda *_: None)
    with pytest.raises(BaseException):  # noqa: B017
        options_fuzzer()


def test_text_that_is_decoded_block_by_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    push = text_module.TextStream.push

    def forgetting(stream: Any, ids: Any, num_exempt: int = 0) -> int | None:
        stream._detokenizer = text_module.Detokenizer(stream._detokenizer._texts, [])
        return push(stream, ids, num_exempt)

    monkeypatch.setattr(text_module.TextStream, "push", forgetting)
    assert fails(text_fuzzer, 60, {"data": st.data()}, name="byte-level")


@pytest.mark.parametrize("fault", ["pages that are shared are written", "tokens are not compared", "NaN is left"])
def test_faults_of_the_pool_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault.startswith("pages"):
        monkeypatch.setattr(paged_cache, "_is_shared", lambda _: False)
    elif fault.startswith("tokens"):
        for module in (page_pool, prefix_tree):
            monkeypatch.setattr(
                module, "tokens_of_page", lambda tokens, i: bytes([sum(tokens[i * 64 : i * 64 + 64]) % 3])
            )
    else:
        take_next = page_pool.PagePool._next

        def uncleaned(pool: Any) -> Any:
            held = [numbers.clone() for numbers in pool._free[-1].content] if pool._free else []
            page = take_next(pool)
            for numbers, before in zip(page.content, held, strict=False):
                numbers.copy_(before)
            return page

        monkeypatch.setattr(page_pool.PagePool, "_next", uncleaned)
    with pytest.raises(BaseException):  # noqa: B017
        walks(40)


def test_a_fork_that_leaves_its_source_writing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = paged_cache.PagedCache._fork

    def forgetting(cache: Any, other: Any, length: int) -> None:
        num_shared = other._num_shared
        fork(cache, other, length)
        other._num_shared = num_shared

    monkeypatch.setattr(paged_cache.PagedCache, "_fork", forgetting)
    with pytest.raises(AssertionError):
        walks(20)


def test_a_page_that_is_published_with_scratch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(cache: Any, token_ids: Any, tenant: str | None) -> None:
        end = min(len(token_ids), cache.length + cache.num_scratch) // PAGE
        if end > cache._num_published:
            cache._num_published = cache._publish(cache._num_published, end, token_ids, tenant)

    monkeypatch.setattr(sequence_cache.SequenceCache, "publish", publish)
    with pytest.raises(AssertionError):
        walks(20)


def walks(count: int) -> None:
    for seed in range(count):
        pool_fuzzer(Pools, seed, 100)
