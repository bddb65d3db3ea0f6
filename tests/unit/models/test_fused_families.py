"""Every family that a specification describes, beside Transformers, and with the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from families import DESCRIBED, VOCAB, tiny_model
from forerun.models import Model, Rows, load_model

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in DESCRIBED),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    ("qwen3", {"rope_parameters": YARN}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("gemma3_text", {"head_dim": 32, "num_key_value_heads": 1}),
    ("starcoder2", {"sliding_window": 24, "hidden_act": "gelu"}),
    ("falcon", {"new_decoder_architecture": False, "multi_query": True, "bias": True}),
    ("falcon", {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False}),
    ("falcon", {"num_ln_in_parallel_attn": 1}),
    ("gpt2", {"n_inner": 96, "scale_attn_weights": False, "activation_function": "relu"}),
    ("gpt_bigcode", {"multi_query": False}),
    ("opt", {"enable_bias": False, "activation_function": "gelu"}),
    ("granitemoehybrid", {"position_embedding_type": None}),
    ("apertus", {"hidden_act": "relu2", "attention_bias": True}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
]


def names(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *variant[1]])


@pytest.fixture(params=VARIANTS, ids=map(names, VARIANTS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    family, options = request.param
    model = tiny_model(family, **options)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    return model, tmp_path


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def in_parts(model: Model, text: list[int], sizes: list[int]) -> torch.Tensor:
    cache, logits, done = model.new_cache(), [], 0
    for size in sizes:
        logits.append(model.forward([Rows(cache, text[done : done + size])]).logits)
        cache.commit(range(size))
        done += size
    return torch.cat(logits)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 2e-5), ("float32", 1e-4)])
def test_logits_are_those_of_transformers(dtype: str, tolerance: float, made: tuple[PreTrainedModel, Path]) -> None:
    reference, folder = made
    model = load_model(folder, dtype)
    assert model.kind == "fused"
    text = tokens(70)
    with torch.inference_mode():
        expected = reference.to(getattr(torch, dtype))(torch.tensor([text])).logits[0]
    torch.testing.assert_close(in_parts(model, text, [50, 1, 4, 15]), expected, atol=tolerance, rtol=tolerance)
