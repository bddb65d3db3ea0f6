"""Keys and values in a format of choice: what is computed, what is kept, and where there is none to choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from families import make_family
from forerun import LLM, DraftModel, Eagle, EagleTree, EarlyExit, Hybrid, Suffix
from forerun.config import KV_CACHE_DTYPES, EngineConfig
from forerun.engine.memory_division import MemoryPlan
from forerun.errors import ConfigError
from forerun.kernels.cpu import native, references
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import Model, Rows, identity, load_model
from forerun.models.memory_plan import model_memory
from head_rig import OPTIONS, Rig
from heads import random_head
from kernel_cases import THREADS, threads

TOKENS = [(7 * i * i + 3 * i + 11) % 90 for i in range(2 * PAGE + 21)]
TREE = [-1, 0, 0, 1, 3, 2]


native_only = pytest.mark.usefixtures("native_library")


def logits(model: Model) -> Tensor:
    """Return the logits of a prompt over three pages, and of a tree after it."""
    cache = model.new_cache()
    parts = [model.forward([Rows(cache, TOKENS)]).logits]
    cache.commit(range(len(TOKENS)))
    parts.append(model.forward([Rows(cache, [1, 2, 3, 4, 5, 6], TREE)]).logits)
    return torch.cat(parts)


@native_only
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt2"])
def test_every_format_is_exact_and_near_the_references(family: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path)
    with references():
        theirs = logits(load_model(folder, "float32"))
    errors = {}
    for name in KV_CACHE_DTYPES:
        model = load_model(folder, "float32", kv_cache_dtype=name)
        assert model.exactness.exact
        ours = logits(model)
        errors[name] = float((ours - theirs).norm() / theirs.norm())
        with threads(3):
            assert torch.equal(logits(model), ours)
    assert errors["auto"] == errors["float32"] < 1e-5
    assert 1e-5 < errors["bfloat16"] < 0.03 and 1e-5 < errors["int8"] < 0.03


@native_only
def test_rows_are_the_same_one_by_one_in_chunks_in_trees_and_with_any_number_of_threads(tmp_path: Path) -> None:
    model = load_model(make_family("mistral", tmp_path), kv_cache_dtype="int8")
    together = logits(model)
    for count in THREADS:
        with threads(count):
            assert torch.equal(logits(model), together)
    cache, other, alone = model.new_cache(), model.new_cache(), []
    for start in range(0, len(TOKENS), 13):
        part = TOKENS[start : start + 13]
        crowd = [Rows(other, [9, 8]), Rows(cache, part)]
        alone.append(model.forward(crowd).logits[2:])
        cache.commit(range(len(part)))
        other.commit([0])
    for token in (1, 2, 4):  # a path of the tree
        alone.append(model.forward([Rows(cache, [token])]).logits)
        cache.commit([0])
    assert torch.equal(torch.cat(alone), torch.cat([together[: len(TOKENS)], together[len(TOKENS) :][[0, 1, 3]]]))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    if native() is None:
        pytest.skip("there are no native kernels here")
    folder = make_family("llama", tmp_path_factory.mktemp("family"))
    return Rig(load_model(folder, kv_cache_dtype="int8"), lambda target: random_head(target, seed=2))


DRAFTERS: dict[str, Any] = {
    "suffix": lambda _: Suffix(),
    "early exit": lambda _: EarlyExit(exit_layer=1),
    "eagle": lambda rig: Eagle(rig.head),
    "merged": lambda rig: Hybrid([Suffix(), EagleTree(rig.head)], "merge"),
    "draft model": lambda rig: DraftModel(rig.target),
}


@pytest.mark.parametrize("option", ["in chunks", "alone"])  # of these K is fixed, so there are drafts
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_that_of_plain_decoding(rig: Rig, drafter: str, option: str) -> None:
    assert rig.answers(DRAFTERS[drafter](rig), **OPTIONS[option]) == rig.expected
    assert rig.drafted > 0


@native_only
def test_memory_is_planned_and_halves() -> None:
    sizes = {name: model_memory("bundled", kv_cache_dtype=name) for name in KV_CACHE_DTYPES}
    for name, planned in sizes.items():
        assert planned.page_nbytes == load_model("bundled", kv_cache_dtype=name).pool.page_nbytes
    assert sizes["float32"].page_nbytes == 2 * sizes["bfloat16"].page_nbytes == 2 * sizes["auto"].page_nbytes
    assert sizes["int8"].page_nbytes <= 0.57 * sizes["bfloat16"].page_nbytes
    pages = {
        name: MemoryPlan.of("bundled", None, EngineConfig(cache_memory=0.25), kv_cache_dtype=name).num_pages
        for name in ("bfloat16", "int8")
    }
    assert pages["int8"] > 1.75 * pages["bfloat16"]


@native_only
def test_stored_costs_tell_the_formats_apart() -> None:
    names = {identity(load_model("bundled-draft", kv_cache_dtype=name)) for name in KV_CACHE_DTYPES}
    assert len(names) == len(KV_CACHE_DTYPES)
    assert all(name in identity(load_model("bundled-draft", kv_cache_dtype=name)) for name in KV_CACHE_DTYPES[1:])


@pytest.mark.parametrize("plan", [True, False])
def test_other_kernels_have_no_choice(plan: bool) -> None:
    def of(**options: Any) -> object:
        return model_memory("bundled-draft", **options) if plan else load_model("bundled-draft", **options)

    with pytest.raises(ConfigError, match=r"'fp8', but must be one of auto, bfloat16, float32, int8"):
        of(kv_cache_dtype="fp8")
    refused = r"only the native CPU kernels.*do not compute {} on cpu here.*Leave kv_cache_dtype out.*forerun info"
    with pytest.raises(ConfigError, match=refused.format("float64")):
        of(dtype="float64", kv_cache_dtype="int8")
    with references(), pytest.raises(ConfigError, match=refused.format("bfloat16")):
        of(kv_cache_dtype="int8")
    with references():
        of(kv_cache_dtype="auto")


@native_only
def test_a_loaded_target_has_its_format() -> None:
    target = load_model("bundled", kv_cache_dtype="int8")
    assert LLM(target, None, kv_cache_dtype="int8").target is target
    assert LLM(target, None).target.kv_cache_dtype == "int8"
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'float32', but the target is a loaded model"):
        LLM(target, None, kv_cache_dtype="float32")
    llm = LLM("bundled", "suffix", kv_cache_dtype="int8", max_batch=2)
    assert llm.target.new_cache().dtype == torch.int8 and llm.exact
