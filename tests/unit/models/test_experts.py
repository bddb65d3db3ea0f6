"""Mixtures of experts: what files may lack, and what steps count."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import make_family, tiny_model
from forerun import LLM, SamplingParams, Suffix
from forerun.config import EngineConfig
from forerun.engine import memory_division
from forerun.engine.memory_division import MemoryPlan
from forerun.errors import ModelLoadError, NotEnoughMemoryError
from forerun.kernels.cpu import linear, native
from forerun.models import Rows, load_model
from forerun.models.fused.experts import route
from forerun.models.spec.feed_forward import Experts

WEIGHTS = "model.safetensors"
ROUTER = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.{}.w2.weight"
Change = Callable[[dict[str, Tensor]], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "an expert is missing": (lambda tensors: tensors.pop(EXPERT.format(2)), "layers.0"),
    "the last is missing": (lambda tensors: tensors.pop(EXPERT.format(3)), "layers.0"),
    "one more": (lambda tensors: tensors.update({EXPERT.format(4): tensors[EXPERT.format(3)].clone()}), "layers.0"),
    "the router is missing": (lambda tensors: tensors.pop(ROUTER), "layers.1"),
    "the router is not finite": (lambda tensors: tensors[ROUTER][1, 2:3].fill_(torch.nan), "gate.weight holds NaN"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_do_not_fit_are_refused(change: str, tmp_path: Path) -> None:
    folder = make_family("mixtral", tmp_path)
    tensors = load_file(folder / WEIGHTS)
    do, message = CHANGES[change]
    do(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for quantize in (None, "int4"):
        with pytest.raises(ModelLoadError, match=message):
            load_model(folder, quantize=quantize)


def test_a_model_without_a_loader_has_its_experts_taken_apart(tmp_path: Path) -> None:
    """Transformers reads it, and its modules hold all experts of a layer in one tensor."""
    model, folder = tiny_model("qwen3_moe"), make_family("qwen3_moe", tmp_path)
    tensors = load_file(folder / WEIGHTS) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for quantize, tolerance in ((None, 1e-4), ("int8", 0.1)):
        ours = load_model(folder, "float32", quantize=quantize)
        logits = ours.forward([Rows(ours.new_cache(), [*range(20)])]).logits
        with torch.inference_mode():
            expected = model(torch.arange(20)[None]).logits[0]
        assert (logits - expected).norm() < tolerance * expected.norm()


def experts(top: int = 2, **options: Any) -> Experts:
    return Experts(num_experts=4, num_experts_per_tok=top, moe_intermediate_size=8, **options)


def test_equal_scores_go_to_the_first_experts_and_groups_bound_the_choice() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    assert route(experts(), scores, None)[0].tolist() == [[0, 1]]
    assert route(experts(1, n_group=2, topk_group=1), torch.tensor([[0.0, 5.0, 4.9, 4.9]]), None)[0].item() == 2
    scaled = experts(scoring="sigmoid", routed_scaling_factor=3.0)
    chosen, shares = route(scaled, scores, torch.tensor([0.0, 0, 9, 0]))
    assert chosen.tolist() == [[2, 0]]
    assert shares.sum().item() == pytest.approx(3.0)


def test_shares_of_near_scores() -> None:
    sparse = experts(scoring="sparsemixer", distance=0.5, norm_topk_prob=False)
    chosen, shares = route(sparse, torch.tensor([[2.0, 4.0, -1.0, 3.0], [-4.0, -1.0, -1.2, -3.0]]), None)
    assert chosen.tolist() == [[1, 3], [1, 2]]
    # 2, 3 and 4 are near 4; 2 and 3 near 3. -1.2 and -1 are near -1, and no other is near -1.2
    exact = [[1 / (1 + math.exp(-1) + math.exp(-2)), 1 / (1 + math.exp(-1))], [1 / (1 + math.exp(-0.2)), 1.0]]
    torch.testing.assert_close(shares, torch.tensor(exact))


def test_steps_count_the_experts_that_they_read(tmp_path: Path) -> None:
    target = load_model(make_family("mixtral", tmp_path))
    if native() is None:
        pytest.skip("the native kernels are not available")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    stats = [LLM(target, drafter).generate([[1, 2, 3] * 6], params)[0].stats for drafter in (None, Suffix())]
    assert stats[0] is not None and stats[1] is not None
    # two layers of two experts a row; the prompt may read all four of each
    assert 12 * 4 <= stats[0].num_experts <= 12 * 4 + 4
    assert stats[1].num_forwards * 4 <= stats[1].num_experts <= stats[1].num_forwards * 8
    llm, given = LLM(target, None), target.experts_given()
    llm.generate([[1, 2, 3] * 6], params)
    more = target.experts_given()
    assert given is not None and more is not None
    assert (more - given).reshape(2, 4).sum(1).tolist() == [2 * (18 + 11)] * 2  # rows, two experts each


def test_experts_that_memory_does_not_hold_lie_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if native() is None:
        pytest.skip("the native kernels are not available")
    folder, prompt = make_family("mixtral", tmp_path), [[1, 2, 3] * 6]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine = {"quantize": "int4", "cache_memory": 1e-4, "max_batch": 1}
    expected = LLM(folder, None, **engine).generate(prompt, params)[0].token_ids
    plan = MemoryPlan.of(folder, None, EngineConfig(max_batch=1), quantize="int4")
    least = plan.target.weights + plan.scratch + plan.target.page_nbytes * plan.target.pages_for(2048)
    monkeypatch.setattr(memory_division, "available_memory", lambda: least - plan.target.experts // 2)
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    llm = LLM(folder, "suffix", **engine)
    assert "on the disk, of which a token reads" in caplog.text
    assert tmp_path / "home" in linear._chunks and not list((tmp_path / "home").glob("tmp*"))
    assert llm.generate(prompt, params)[0].token_ids == expected

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(linear, "_chunks", {})
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ModelLoadError, match=r"No space left on device\. Free space there"):
        LLM(folder, None, **engine)
    monkeypatch.setattr(memory_division, "available_memory", lambda: plan.scratch)
    with pytest.raises(NotEnoughMemoryError):
        LLM(folder, None, **engine)
