"""Models that the native kernels compute, beside the same models computed by the references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import make_family
from forerun.kernels.native import native
from forerun.kernels.native_linear import NativeLinear
from forerun.models import Model, Rows, identity, load_model
from forerun.models.native_llama import NativeLlamaDecoder

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8] * 12
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2")


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if native() is None:
        pytest.skip("there are no native kernels here")


def logits(model: Model) -> Tensor:
    """Of a prompt over several pages, whose last rows come one by one and as a tree."""
    cache = model.new_cache()
    parts = [model.forward([Rows(cache, TOKENS[:-2])]).logits]
    cache.commit(range(len(TOKENS) - 2))
    parts.append(model.forward([Rows(cache, [7, TOKENS[-2], TOKENS[-1]], [-1, -1, 1])]).logits[1:])
    return torch.cat(parts)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_the_references(
    family: str, quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(family, tmp_path)
    model = load_model(folder, quantize=quantize)
    assert model.exactness.exact
    ours = logits(model)
    if family in FAMILIES[:4]:
        assert isinstance(model.decoder, NativeLlamaDecoder)
    else:
        modules = model.decoder.model.modules()  # type: ignore[attr-defined]
        assert quantize is None or any(isinstance(module, NativeLinear) for module in modules)
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    reference = load_model(folder, quantize=quantize)
    assert not isinstance(reference.decoder, NativeLlamaDecoder)
    theirs = logits(reference)
    assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_stored_costs_tell_the_kernels_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_family("llama", tmp_path)
    ours = load_model(folder)
    assert ours.kernels.startswith("native ") and identity(ours).endswith(ours.kernels)
    assert load_model(folder, "float32").kernels == "reference"
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    assert identity(load_model(folder)) == identity(ours).replace(ours.kernels, "reference")


def test_float32_codes_give_nearly_the_bits_of_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_family("qwen3", tmp_path)
    ours = logits(load_model(folder, "float32", quantize="int4"))
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    theirs = logits(load_model(folder, "float32", quantize="int4"))
    # a number that is rounded to another code changes more than a rounding error
    assert (ours - theirs).norm() < 0.01 * theirs.norm()
