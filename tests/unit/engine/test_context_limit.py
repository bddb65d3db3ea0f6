"""Models whose whole context does not fit into memory: one limit, fixed at the start, for every request."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from clients.tools_model import write
from forerun import LLM, SamplingParams
from forerun.config import MEMORY_LOG, EngineConfig
from forerun.drafters.models.head_files.folder import save_head
from forerun.engine import Engine, memory_division, opening
from forerun.engine.memory_division import MemoryPlan
from forerun.errors import ConfigError, ContextLengthError, NotEnoughMemoryError
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import identity, load_model
from forerun.speculation.cost_model import forward_costs
from forerun.utils.machine import GIB
from heads import random_head

OWN = 131072
PAGES = 16
GREEDY = SamplingParams(temperature=0, max_tokens=2 * OWN, ignore_eos=True)
TALK = [{"role": "user", "content": "hello"}]
NEED_NOTHING = ("suffix", "prompt-lookup", "lookahead", "recycling", "early-exit", "prediction", "none", "auto")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load calibrates."""
    monkeypatch.setattr("forerun.speculation.cost_model._known", {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a long context, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    write(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": OWN}))
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> float:
    """GiB of a page."""
    return load_model(folder).pool.page_nbytes / GIB


def check_limit(llm: LLM) -> int:
    """Check that one sequence of the context fills the pool."""
    pool, length = llm.target.pool, llm.target.context_length
    assert pool is not None and pool.num_pages is not None and llm.target.full_context_length == OWN
    pages_for = llm.target.new_cache().pages_wanted
    assert pages_for(length) <= pool.num_pages < pages_for(length + 1)
    return length


@pytest.mark.parametrize(
    "drafter",
    [
        NEED_NOTHING[0],
        *(pytest.param(name, marks=pytest.mark.slow) for name in NEED_NOTHING[1:]),
        "draft-model",
        "hybrid:sources=suffix+draft-model",
        "eagle",
    ],
)
def test_a_chat_without_max_tokens(drafter: str, folder: Path, page: float, tmp_path: Path) -> None:
    text = drafter.replace("draft-model", f"draft-model:model={folder}") if drafter == "draft-model" else drafter
    text = text.replace("+draft-model", f"+draft-model:model={folder}") if "+" in drafter else text
    if drafter == "eagle":
        head = random_head(load_model(folder))
        save_head(tmp_path, head.config, head.tensors)
        text = f"eagle:model={tmp_path}"
    with LLM(folder, text, cache_memory=PAGES * page) as llm:
        length = check_limit(llm)
        assert length <= PAGES * PAGE
        answer = llm.chat(TALK, GREEDY)
        assert answer.finish_reason == "length"
        assert len(answer.prompt_token_ids) + len(answer.token_ids) == length
        with pytest.raises(ContextLengthError, match=rf"holds {length} \(memory; the model's own 131,072\)"):
            llm.generate([[1] * length])
        with pytest.raises(ContextLengthError, match=rf"more than the {length} \(memory; the model's own 131,072\)"):
            llm.generate("a" * 10**6)


def test_available_memory_is_a_limit_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is available bounds the context as `cache_memory` does."""
    plan = MemoryPlan.of(folder, "auto", EngineConfig())
    available = plan.target.loading + plan.scratch + 2**20 * 20
    monkeypatch.setattr(memory_division, "available_memory", lambda: available)
    monkeypatch.setattr(memory_division, "total_memory", lambda: 2 * available)
    plan = MemoryPlan.of(folder, "auto", EngineConfig())
    assert 4096 < plan.context_length < OWN
    with LLM(folder) as llm:
        assert check_limit(llm) >= plan.context_length
        assert llm.chat(TALK, max_tokens=3).token_ids


@pytest.mark.parametrize("num_pages", [1, 2, 4])
@pytest.mark.parametrize("drafter", ["suffix", "draft-model"])
def test_tiny_pools(num_pages: int, drafter: str, folder: Path, page: float) -> None:
    text = f"draft-model:model={folder}" if drafter == "draft-model" else drafter
    memory = num_pages * page
    if load_model(folder).new_cache().pages_wanted(2) > num_pages:  # the reference's caches begin with four
        with pytest.raises(NotEnoughMemoryError, match="raise cache_memory"):
            LLM(folder, text, cache_memory=memory)
        return
    with LLM(folder, text, cache_memory=memory) as llm:
        length = check_limit(llm)
        answers = llm.generate([[1], [2], [3], [4], [5]], GREEDY)
        assert [len(answer.token_ids) for answer in answers] == [length - 1] * 5
        known = forward_costs(identity(llm.target)).costs._target
        assert ("greedy", 1) in known and (num_pages > 1 or ("greedy", 4) not in known)


def test_load_changes_no_length(folder: Path, page: float) -> None:
    with LLM(folder, "suffix", cache_memory=PAGES * page, max_batch=4) as llm:
        prompts = [[5 + index] * (40 + 60 * index) for index in range(4)]
        alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        together = llm.generate(prompts, GREEDY)
        assert [each.token_ids for each in together] == [each.token_ids for each in alone]
        assert {each.finish_reason for each in together} == {"length"}
        assert {len(each.prompt_token_ids) + len(each.token_ids) for each in alone} == {llm.target.context_length}


def test_calibration_leaves_the_pools_to_their_user(folder: Path, page: float) -> None:
    with LLM(folder, f"draft-model:model={folder}", cache_memory=PAGES * page, max_batch=3) as llm:
        assert llm.target.pool is not None and llm.drafter is not None
        assert llm.target.pool.num_pages == PAGES
        assert [pool.num_pages for pool in llm.drafter.pools] == [2 * PAGES + 4 * 3]
        costs = forward_costs(identity(llm.target)).costs
        assert all(costs.target("greedy", batch, 16 * batch) is not None for batch in (1, 4))
        assert llm.target.pool.num_taken == 0 and 2 * costs._position.reach <= PAGES * PAGE


def test_an_engine_alone_has_the_limit_too(folder: Path, page: float) -> None:
    model = load_model(folder)
    Engine(model, config=EngineConfig(cache_memory=PAGES * page))
    held = model.context_length
    assert held < model.full_context_length == OWN
    Engine(model, config=EngineConfig(cache_memory=2 * PAGES * page))
    assert held < model.context_length <= 2 * PAGES * PAGE


def test_a_context_that_memory_does_not_hold_is_refused(
    folder: Path, page: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder, "suffix", cache_memory=PAGES * page, max_model_len=200) as llm:
        assert llm.target.context_length == llm.target.full_context_length == 200
        with pytest.raises(NotEnoughMemoryError, match=r"max_model_len is 200, .* 0\.\d MiB are there"):
            LLM(llm.target, None, cache_memory=1e-9, max_model_len=200)
    monkeypatch.setattr(opening, "load_model", None)  # no weights are read
    with pytest.raises(NotEnoughMemoryError, match=r"max_model_len is 5000, .* Lower max_model_len, raise cache"):
        LLM(folder, "suffix", cache_memory=PAGES * page, max_model_len=5000)
    with pytest.raises(ConfigError, match=r"max_model_len is 131073, but the context of .* holds 131072"):
        LLM(folder, "suffix", cache_memory=PAGES * page, max_model_len=OWN + 1)


def test_the_limit_is_told(folder: Path, page: float, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, MEMORY_LOG),
        LLM(folder, None, cache_memory=PAGES * page, max_model_len="auto") as llm,
    ):
        lines = [record.getMessage() for record in caplog.records if record.name == MEMORY_LOG]
        assert lines[1:] == [f"contexts up to {check_limit(llm):,} tokens: memory; the model's own 131,072"]
    told: dict[str, Any] = MemoryPlan.of(folder, None, EngineConfig(cache_memory=PAGES * page)).as_object()
    assert (told["context_length"], told["full_context_length"]) == (llm.target.context_length, OWN)
