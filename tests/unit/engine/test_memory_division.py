"""The memory of target, drafts, keys and values, planned before weights are read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from blocks import random_block
from forerun import LLM
from forerun.config import MEMORY_LOG, EngineConfig
from forerun.drafters import Binding, make_drafter
from forerun.drafters.models.head_files.folder import save_head
from forerun.drafters.models.heads.config import StoredHead
from forerun.engine import Engine, memory_division, opening
from forerun.engine.kv_cache_manager import bound_memory
from forerun.engine.memory_division import AvailableMemory, MemoryPlan, num_draft_pages, num_pages
from forerun.errors import ModelLoadError, NotEnoughMemoryError
from forerun.models import load_model
from forerun.utils.machine import GIB
from heads import random_head
from medusa_heads import random_medusa

MIB = 2**20


def limit(monkeypatch: pytest.MonkeyPatch, available: int | None, total: int | None = 64 * GIB) -> None:
    monkeypatch.setattr(memory_division, "available_memory", lambda: available)
    monkeypatch.setattr(memory_division, "total_memory", lambda: total)


@pytest.fixture
def never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any, **arguments: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(opening, "load_model", read)


@pytest.mark.usefixtures("never_read")
def test_what_does_not_fit_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 1 * MIB)
    with pytest.raises(NotEnoughMemoryError, match=r"bundled takes [\d.]+ MiB .* 1\.0 MiB are available.*quantize"):
        LLM("bundled", None)
    limit(monkeypatch, None)
    plan = MemoryPlan.of("bundled", None, EngineConfig())
    limit(monkeypatch, plan.target.loading + MIB)  # they can be loaded, but nothing can be computed
    with pytest.raises(NotEnoughMemoryError, match=r"one sequence of \d+ tokens .* together") as caught:
        LLM("bundled", None)
    assert caught.value.needed > caught.value.available == plan.target.loading + MIB


@pytest.mark.usefixtures("never_read")
def test_cache_memory_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 2 * GIB)
    with pytest.raises(NotEnoughMemoryError, match=r"cache_memory is 2 GiB, but beside weights .* 1\.9\d GiB"):
        LLM("bundled", cache_memory=2)
    plan = MemoryPlan.of("bundled", None, EngineConfig(cache_memory=1.5))
    assert plan.num_pages == int(1.5 * GIB) // plan.target.page_nbytes
    limit(monkeypatch, None)
    assert MemoryPlan.of("bundled", None, EngineConfig(cache_memory=2000)).num_pages > 10**6


def test_what_is_remembered_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 2 * GIB)
    remember = str(tmp_path / "answers")
    with monkeypatch.context() as patched:
        patched.delattr(opening, "load_model")  # it is refused before
        with pytest.raises(NotEnoughMemoryError, match=r"up to 4096 MiB of answers, .* Lower remember_size"):
            LLM("bundled", "suffix", remember=remember, remember_size=4096)
    (tmp_path / "answers").write_bytes(bytes(40 * MIB))
    plain, ordinary, as_it_is = (
        MemoryPlan.of("bundled", "suffix", EngineConfig(max_batch=10**4, **given))
        for given in ({}, {"remember": remember, "remember_size": 16}, {"remember": remember})
    )
    page = plain.target.page_nbytes
    assert (plain.num_pages - as_it_is.num_pages) * page == pytest.approx(40 * 25 * MIB, abs=page)
    assert (plain.num_pages - ordinary.num_pages) * page == pytest.approx(16 * 25 * MIB, abs=page)


def test_draft_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 8 * GIB)
    config = EngineConfig()
    plain, drafting, hybrid = (
        MemoryPlan.of("bundled", drafter, config) for drafter in (None, "draft-model", "hybrid:sources=suffix+staged")
    )
    assert plain.drafts == () and [each.name for each in drafting.drafts] == ["bundled-draft"]
    assert [each.name for each in hybrid.drafts] == ["bundled-draft"]
    assert [each.name for each in MemoryPlan.of("bundled", "cross-vocab", config).drafts] == ["bundled-other-vocab"]
    own = MemoryPlan.of("bundled", "draft-model:quantize=int4", config).drafts
    assert [(each.name, each.number_format) for each in own] == [("bundled-draft", "int4")]
    wide = MemoryPlan.of("bundled", "draft-model:quantize=int4", config, dtype="float64").drafts
    assert [(each.dtype, each.number_format) for each in wide] == [(torch.float32, "int4")]
    assert MemoryPlan.of("bundled", "early-exit", config).drafts == ()
    needed = plain.target.weights + drafting.drafts[0].weights
    limit(monkeypatch, plain.target.loading + 1)
    with pytest.raises(NotEnoughMemoryError) as caught:
        MemoryPlan.of("bundled", "draft-model", config)
    assert caught.value.needed > needed


def test_a_draft_larger_than_its_target_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    text = "hybrid:sources=suffix+draft-model:model=bundled"
    assert LLM("bundled-draft", text).drafter_name == text
    assert "bundled is larger than its target" in caplog.text and "quantize=int4" in caplog.text
    caplog.clear()
    LLM("bundled", "draft-model")
    assert not caplog.text


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa"])
def test_heads_count_as_draft_models_do(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 8 * GIB)
    target, config = load_model("bundled", "float32"), EngineConfig()
    made: Any = {"eagle": random_head, "block": random_block, "medusa": random_medusa}[kind]
    stored: StoredHead[Any] = made(target, draft_vocab_size=512)  # whole blocks
    save_head(tmp_path, stored.config, stored.tensors, stored.d2t)
    text = f"{kind}:model={tmp_path}"
    plan = MemoryPlan.of("bundled", ["suffix", text], config, dtype="float32")
    (head,) = plan.drafts
    numbers = sum(tensor.numel() for tensor in stored.tensors.values())
    assert head.weights == 4 * (2 * numbers + 512 * stored.config.target_hidden_size), "as they are read, and packed"
    assert (head.number_format, str(tmp_path) in str(plan)) == ("float32", True)
    drafter, _ = make_drafter(text, Binding(target))
    assert [pool.page_nbytes for pool in drafter.pools] == [head.page_nbytes] * (kind != "medusa")
    assert plan.as_object()["models"][1]["pages"] == num_draft_pages(plan.num_pages, config) * (kind != "medusa")


def test_shipped_heads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 8 * GIB)
    plain = MemoryPlan.of("bundled", None, EngineConfig())
    sizes = [
        MemoryPlan.of("bundled", "eagle", EngineConfig(), quantize=quantize).drafts[0] for quantize in (None, "int4")
    ]
    assert [size.number_format for size in sizes] == ["int8", "int4"], "as the head's file is, or the target's bits"
    assert sizes[0].weights > sizes[1].weights > sizes[1].page_nbytes > 0
    limit(monkeypatch, plain.target.loading + 1)
    with pytest.raises(NotEnoughMemoryError):
        MemoryPlan.of("bundled", "eagle", EngineConfig())


def test_the_automatic_pool_shrinks_to_what_is_left() -> None:
    config, page, drafts = EngineConfig(max_batch=8), MIB, [MIB // 4]
    assert num_pages(config, 100, page, drafts, AvailableMemory(None, None)) == 100
    assert num_pages(config, 100, page, drafts, AvailableMemory(50 * MIB, None)) == 25
    room = AvailableMemory(GIB, 80 * MIB)
    count = num_pages(config, 100, page, drafts, room)
    taken = [count + more for more in (0, 1)]
    sizes = [target * page + num_draft_pages(target, config) * drafts[0] for target in taken]
    assert sizes[0] <= 80 * MIB < sizes[1]
    assert num_pages(config, 100, page, drafts, AvailableMemory(GIB, 0)) == 1


def test_the_engine_bounds_its_pool_by_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 4 * GIB)
    plan = MemoryPlan.of("bundled", "draft-model", EngineConfig())
    llm = LLM("bundled", "draft-model")
    assert llm.target.pool is not None and llm.target.pool.num_pages == plan.num_pages
    assert llm.drafter is not None
    assert [pool.num_pages for pool in llm.drafter.pools] == [num_draft_pages(plan.num_pages, EngineConfig())]
    small = load_model("bundled")
    limit(monkeypatch, 40 * MIB)
    Engine(small)
    assert small.pool.num_pages is not None
    assert 1 <= small.pool.num_pages <= 40 * MIB // small.pool.page_nbytes < plan.num_pages
    remembering = EngineConfig(remember="there is none")
    with pytest.raises(NotEnoughMemoryError, match="up to 16 MiB of answers"):
        bound_memory(load_model("bundled"), None, remembering)
    with pytest.raises(NotEnoughMemoryError, match="cache_memory is 1 GiB"):
        Engine(small, config=EngineConfig(cache_memory=1))


def test_one_line_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 4 * GIB)
    with caplog.at_level(logging.INFO, MEMORY_LOG):
        LLM("bundled", None, quantize="int8")
    (line,) = [record.getMessage() for record in caplog.records if record.name == MEMORY_LOG]
    assert line.startswith("weights 12.") and "(int8), keys and values up to" in line
    assert line.endswith("available 4.00 GiB")
    json.dumps(MemoryPlan.of("bundled", None, EngineConfig()).as_object())


def test_what_is_wrong_with_a_model_is_told_by_loading_it(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        LLM(tmp_path)


def test_a_device_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 5 * GIB))
    limit(monkeypatch, 1)
    assert AvailableMemory.on(torch.device("cuda", 0)) == AvailableMemory(5 * GIB, 3 * GIB)
