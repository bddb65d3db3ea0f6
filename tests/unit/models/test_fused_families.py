"""Every family that a specification describes, beside Transformers, and with the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from families import DESCRIBED, VOCAB, make_family, tiny_config, tiny_model
from forerun.models import Model, Rows, load_model
from forerun.models.fused.families import refusal
from forerun.models.loading.fused_modules import FusedModules

WEIGHTS = "model.safetensors"
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
    ("falcon", {"num_kv_heads": 4, "new_decoder_architecture": False, "multi_query": False, "parallel_attn": False}),
    ("falcon", {"num_ln_in_parallel_attn": 1}),
    ("gpt2", {"n_inner": 96, "scale_attn_weights": False, "activation_function": "relu"}),
    ("biogpt", {"scale_embedding": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("opt", {"enable_bias": False, "activation_function": "gelu"}),
    ("granitemoehybrid", {"position_embedding_type": None}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}}),
    ("hyperclovax", {"use_post_norm": False, "mlp_bias": True}),
    ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 500.0}}}),
    ("gemma3_text", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 4.0}),
    ("mistral", {"sliding_window": None, "rope_parameters": {**YARN, "rope_type": "linear"}}),
    ("helium", {"attention_bias": True, "mlp_bias": True}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("apertus", {"hidden_act": "relu2", "attention_bias": True}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
]

CHUNKED = {"layer_types": ["chunked_attention", "full_attention"]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("apertus", {"hidden_act": "tanh"}, "activation 'tanh'"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("falcon", {"alibi": True}, "alibi=True"),
    ("falcon", {"parallel_attn": False}, "parallel_attn=False"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("gpt_bigcode", {"add_cross_attention": True, "multi_query": False}, "add_cross_attention=True"),
    ("granitemoehybrid", {"num_local_experts": 4}, "num_local_experts=4"),
    ("granitemoehybrid", {"layer_types": ["linear_attention", "attention"]}, "layers of type linear_attention"),
    ("llama", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, "rope type 'dynamic'"),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim=32"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
    ("qwen3", CHUNKED, "layers of type chunked_attention"),
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
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("float32", 1e-4)])
def test_logits_are_those_of_transformers(dtype: str, tolerance: float, made: tuple[PreTrainedModel, Path]) -> None:
    reference, folder = made
    model = load_model(folder, dtype)
    assert model.kind == "fused"
    text = tokens(70)
    with torch.inference_mode():
        expected = reference.to(getattr(torch, dtype))(torch.tensor([text])).logits[0]
    torch.testing.assert_close(in_parts(model, text, [50, 1, 4, 15]), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("family", "options", "reason"), REFUSED, ids=lambda each: each if isinstance(each, str) else ""
)
def test_what_is_not_described_is_refused_by_option_and_value(
    family: str, options: dict[str, Any], reason: str
) -> None:
    assert refusal(tiny_config(family)) is None
    found = refusal(tiny_config(family, **options))
    assert found is not None and reason in found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("variant", VARIANTS, ids=names)
def test_parameters_made_without_modelling_code(variant: tuple[str, dict[str, Any]]) -> None:
    theirs = tiny_model(variant[0], **variant[1])
    ours = FusedModules(theirs.config, torch.float32).state_dict()
    assert {key: each.shape for key, each in ours.items()} == {
        key: each.shape for key, each in theirs.state_dict().items()
    }


@pytest.mark.parametrize("family", ["gpt2", "falcon", "opt", "granitemoehybrid", "biogpt"])
def test_quantized_weights_have_their_places(family: str, tmp_path: Path) -> None:
    """Compare with the float model: a weight in the wrong place, or transposed, gives other logits altogether."""
    folder, text = make_family(family, tmp_path), tokens(30)
    exact, rounded = (in_parts(load_model(folder, "float32", quantize=each), text, [30]) for each in (None, "int8"))
    assert (exact - rounded).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("family", ["gpt2", "falcon"])
def test_files_with_the_names_of_the_base_model(family: str, quantize: str | None, tmp_path: Path) -> None:
    """Read what Transformers has to convert: names without the base, an output layer that is the embedding again."""
    folder, text = make_family(family, tmp_path), tokens(30)
    expected = in_parts(load_model(folder, "float32", quantize=quantize), text, [30])
    tensors = {name.removeprefix("transformer."): each for name, each in load_file(folder / WEIGHTS).items()}
    if family == "falcon":
        tensors = {f"transformer.{name}": each for name, each in tensors.items()}
        tensors["lm_head.weight"] = tensors["transformer.word_embeddings.weight"].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert torch.equal(in_parts(load_model(folder, "float32", quantize=quantize), text, [30]), expected)
