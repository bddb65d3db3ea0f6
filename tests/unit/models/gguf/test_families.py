"""GGUF files of every described family compute what the model computes that they were written of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from families import DESCRIBED, VOCAB, tiny_model
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.kernels.cpu import native
from forerun.models import Rows, load_model, load_transformers_model
from gguf_files import write_gguf

TEXT = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
# llama.cpp has no output layer beside the embedding for these
_TIED = {"tie_word_embeddings": True}
_FOUR = {"num_hidden_layers": 4}
_WINDOW = {"sliding_window": 24}
_SIZES: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma", "gemma2", "cohere"), _TIED),
    "cohere2": {**_TIED, **_FOUR},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": None},
    "smollm3": {**_FOUR, "no_rope_layers": None},
    "mistral": {},
}
# of no architecture of llama.cpp, or of one that older tests read
_ELSEWHERE = {"helium", "ministral", "llama", "qwen2", "qwen3"}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
_KINDS = {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in DESCRIBED if family not in _ELSEWHERE),
    ("cohere", {**_TIED, "attention_bias": True}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("gemma2", {**_TIED, "head_dim": 32, "query_pre_attn_scalar": 32}),
    ("glm4", {"attention_bias": True}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("granite", {"attention_bias": True, "mlp_bias": True, **_TIED}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    ("olmo3", {"rope_parameters": _KINDS}),
    ("phi3", _WINDOW),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("starcoder2", {"use_bias": False}),
]


def names(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *variant[1]])


def tiny(family: str, **options: Any) -> PreTrainedModel:
    model = tiny_model(family, **{**_SIZES.get(family, {}), **options})
    model.set_attn_implementation("eager")
    return model


def ours(path: Path, dtype: str = "float32", **options: Any) -> torch.Tensor:
    model = load_model(path, dtype, **options)
    assert model.kind == "fused"
    return model.forward([Rows(model.new_cache(), TEXT)]).logits


@torch.inference_mode()
def theirs(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([TEXT])).logits[0]
    return logits


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 2e-5), ("float32", 1e-4)])
@pytest.mark.parametrize("variant", VARIANTS, ids=map(names, VARIANTS))
def test_logits_are_those_of_the_model(
    variant: tuple[str, dict[str, Any]], dtype: str, tolerance: float, tmp_path: Path
) -> None:
    path, model = tmp_path / "it.gguf", tiny(variant[0], **variant[1])
    write_gguf(path, model)
    expected = theirs(model.to(getattr(torch, dtype)))
    torch.testing.assert_close(ours(path, dtype), expected, atol=tolerance, rtol=tolerance)
    if dtype == "float64":  # Transformers' classes take the configuration and the tensors, too
        torch.testing.assert_close(theirs(load_transformers_model(path, dtype)), expected, atol=1e-5, rtol=1e-5)
