"""Every family of the fused decoder beside Transformers, in any batch, quantized, with drafters and adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from families import DESCRIBED, SCANNED, VOCAB, make_family, tiny_config, tiny_model
from forerun import LLM, Medusa, SamplingParams, Suffix
from forerun.drafters import Drafter
from forerun.drafters.early_exit import EarlyExit
from forerun.errors import UnsupportedModelError
from forerun.export.quantized import export_quantized
from forerun.models import Model, Rows, load_model
from forerun.models.families.mla import MLA_FAMILIES
from forerun.models.families.table import description_of, refusal, spec_of
from forerun.models.fused.experts import take_experts_apart
from forerun.models.loading.fused_modules import FusedModules, read_fused
from forerun.models.loading.source import find_source
from forerun.models.memory_plan import attention_widths
from medusa_heads import random_medusa

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
FEW = ("int8", "int4")

WEIGHTS = "model.safetensors"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_UNSCALED = {"attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0}
PROPORTIONAL = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    "sliding_attention": YARN,
}
GROWN = {**YARN, "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
GEMMA = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
GEMMA_31B = {"enable_moe_block": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in DESCRIBED),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    ("qwen3", {"rope_parameters": YARN}),
    ("qwen3", {"rope_parameters": PROPORTIONAL["full_attention"]}),
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
    ("granitemoehybrid", {"position_embedding_type": None, "layer_types": ["attention", "attention"]}),
    ("granitemoehybrid", {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_groups": 1}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}}),
    ("hyperclovax", {"use_post_norm": False, "mlp_bias": True}),
    ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 500.0}}}),
    ("gemma3_text", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 4.0}),
    ("mistral", {"sliding_window": None, "rope_parameters": {**YARN, "rope_type": "linear"}}),
    ("helium", {"attention_bias": True, "mlp_bias": True}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("apertus", {"hidden_act": "relu2", "attention_bias": True}),
    ("bamba", {"time_step_limit": [0.3, 1.2]}),  # which Transformers reads in prompts alone
    ("bamba", {"mamba_n_groups": 4, "mlp_bias": True, "attention_bias": True}),
    ("mamba2", {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "tie_word_embeddings": True}),
    ("nemotron_h", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}),
    ("nemotron_h", {"time_step_min": 0.4}),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp"]}),
    ("falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True, "mlp_bias": True}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False}),
    ("falcon_h1", {"attention_bias": True, "mamba_proj_bias": True, **_UNSCALED}),
    ("deepseek_v2", {"q_lora_rank": 32, "topk_method": "greedy", "attention_bias": True, "rope_parameters": GROWN}),
    ("deepseek_v2", {"mlp_bias": True}),
    ("deepseek_v3", {"rope_interleave": False, "attention_bias": True, "rope_parameters": GROWN}),
    ("glm4_moe_lite", {"q_lora_rank": None}),
    ("minicpm3", {"num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 40, "mlp_bias": True}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 5, "layer_types": ["full_attention", "conv"]}),
    ("lfm2", {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}),
    ("lfm3", {"conv_bias": True, "attention_bias": True}),
    ("lfm3", {"use_attention_gate": False, "use_sandwich_norm": False, "rope_parameters": PROPORTIONAL}),
    ("qwen3_next", {**MIXTURE, "mlp_only_layers": [0, 1], "attention_bias": True}),
    ("qwen3_next", {**MIXTURE, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 40}),
    ("qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": True, "qkv_bias": False}),
    ("mixtral", {"sliding_window": 24, "num_local_experts": 20, "num_experts_per_tok": 5}),
    ("glm4_moe", {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "norm_topk_prob": False}),
    ("granitemoeshared", {"shared_intermediate_size": 0, "attention_bias": True}),
    ("granitemoehybrid", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("hunyuan_v1_moe", {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}}),
    ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 0.7}),
    ("cohere2_moe", {"shared_expert_combination_strategy": "average"}),
    ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0}),
    ("cohere2_moe", {"rms_norm_eps": 1e-5, "prefix_dense_sliding_window_pattern": 4, "expert_selection_fn": "sigmoid"}),
    ("gemma4_text", {**GEMMA_31B, "use_bidirectional_attention": "vision"}),
    ("gemma4_text", {**GEMMA_31B, "enable_moe_block": True, "top_k_experts": 3, "attention_bias": True}),
    ("gemma4_text", {**GEMMA, "enable_moe_block": False, "attention_k_eq_v": False, "use_double_wide_mlp": True}),
    ("gpt_oss", {"num_local_experts": 3, "swiglu_limit": 0.4}),
    ("qwen3_next", {"linear_key_head_dim": 12, "linear_value_head_dim": 40, "linear_num_key_heads": 4}),
    ("olmo_hybrid", {"linear_allow_neg_eigval": False, "layer_types": ["full_attention", "linear_attention"]}),
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}, "attention_bias": True, "num_key_value_heads": 4}),
]

CHUNKED = {"layer_types": ["chunked_attention", "full_attention"]}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
_LONG |= {"original_max_position_embeddings": 64, "short_mscale": 1.2, "long_mscale": 1.3}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_experts_per_tok": 5}, "5 of 4 experts"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, "0 of 4 experts"),
    ("qwen3_moe", {"hidden_act": "tanh"}, "activation 'tanh'"),
    ("glm4_moe", {"n_group": 3}, "2 of 3 groups of 8 experts"),
    ("glm4_moe", {"num_experts_per_tok": 5}, "5 experts of 2 groups of 2"),
    ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("phimoe", {"rope_parameters": _LONG}, "rope_parameters="),
    ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "layers have different numbers of experts"),
    ("apertus", {"hidden_act": "tanh"}, "activation 'tanh'"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "a latent of 0 numbers"),
    ("falcon", {"alibi": True}, "alibi=True"),
    ("falcon", {"parallel_attn": False}, "parallel_attn=False"),
    ("falcon_h1", {"attention_bias": True}, "attention_bias=True"),
    ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias=True"),
    ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
    ("gemma4_text", {"use_double_wide_mlp": True}, "feed-forward layers of several widths"),
    ("gemma4_text", {"num_kv_shared_layers": 3}, "its values describe no gemma4_text"),
    ("gemma4_text", {"per_layer_config": {0: {"intermediate_size": 96}}}, "layers that differ in intermediate_size"),
    ("gemma4_text", {"sliding_window": 0}, "4 query heads and 1 key heads of width 20"),
    ("gemma4_text", {"global_head_dim": 21}, "4 query heads and 1 key heads of width 21"),
    ("glm", {"rope_parameters": PROPORTIONAL["full_attention"]}, "a rotation of 1.0 of each head"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("gpt_bigcode", {"add_cross_attention": True, "multi_query": False}, "add_cross_attention=True"),
    ("granitemoehybrid", CHUNKED, "layers of type chunked_attention"),
    ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, "rope type 'dynamic'"),
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "moe"]}, "layers of type moe"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
    ("nemotron_h", {"mlp_hidden_act": "tanh"}, "activation 'tanh'"),
    ("lfm2", {"layer_types": ["mamba", "full_attention"]}, "layers of type linear_attention"),
    ("lfm2", {"conv_L_cache": 18}, "a convolution of 18 inputs"),
    ("lfm3", {"layer_types": ["conv", "linear_attention", "full_attention"]}, "layers of type linear_attention"),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim=32"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
    ("qwen3", CHUNKED, "layers of type chunked_attention"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen3_5_text", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    ("qwen3_5_text", {"linear_num_value_heads": 3}, "3 heads, 2 key heads"),
]


STATE_SPACES = ("bamba", "falcon_h1", "mamba2", "nemotron_h")
DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    "suffix": lambda target: Suffix(),
    "early exit": lambda target: EarlyExit(1),
    "head": lambda target: Medusa(random_medusa(target, draft_vocab_size=60)),
}


def names(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *variant[1]])


@pytest.fixture(params=VARIANTS, ids=map(names, VARIANTS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    family, options = request.param
    model = tiny_model(family, **options)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


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
    tolerance = max(1e-4, 3 * tolerance) if reference.config.model_type in SCANNED else tolerance
    with torch.inference_mode():
        expected = reference.to(getattr(torch, dtype))(torch.tensor([text]), use_cache=False).logits[0].to(model.dtype)
    torch.testing.assert_close(in_parts(model, text, [50, 1, 4, 15]), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("dtype", "quantize"), [("float32", None), ("bfloat16", None), *((None, q) for q in FEW)])
def test_bits_are_the_same_in_any_batch(dtype: str | None, quantize: Any, made: tuple[PreTrainedModel, Path]) -> None:
    model = load_model(made[1], dtype or "bfloat16", quantize=quantize)
    assert model.kind == "fused" and model.exactness.exact
    text, other = tokens(290), tokens(61, 1)
    one_by_one = in_parts(model, text, [240, *[1] * 50])
    assert torch.equal(in_parts(model, text, [17, 223, 4, 9, 2, 17, 6, 8, 4])[240:], one_by_one[240:])
    beside = model.forward([Rows(model.new_cache(), other), Rows(model.new_cache(), text)]).logits
    assert torch.equal(beside[61 + 240 :], one_by_one[240:])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("quantize", [None, *FEW])
def test_speculation_says_what_plain_decoding_says(
    quantize: Any, drafter: str, made: tuple[PreTrainedModel, Path]
) -> None:
    target = load_model(made[1], "bfloat16", quantize=quantize)
    prompts = [tokens(20) * 2, tokens(9, 1), tokens(30, 2) * 2]
    params = [replace(GREEDY, logprobs=1), replace(GREEDY, temperature=0.9, seed=3, logprobs=1), GREEDY]

    def answers(drafter: Drafter | None) -> list[Any]:
        results: Any = LLM(target, drafter, num_draft_tokens=4).generate(prompts, params)
        return [(each.token_ids, each.logprobs) for each in results]

    assert answers(DRAFTERS[drafter](target)) == answers(None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("quantize", FEW)
def test_a_quantized_folder_computes_what_quantizing_at_load_does(
    quantize: Any, made: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    export_quantized(made[1], tmp_path / "out", quantize)
    ours, text = load_model(tmp_path / "out"), tokens(30)
    assert ours.kind == "fused"
    assert torch.equal(in_parts(ours, text, [30]), in_parts(load_model(made[1], quantize=quantize), text, [30]))


@pytest.mark.sampled(4)
def test_an_adapter_is_merged(made: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    reference, folder = made
    refused = {"falcon_h1": "out_proj", "mamba2": "out_proj", "nemotron_h": "out_proj", "phimoe": "router"}  # by PEFT
    but = refused.get(reference.config.model_type)
    config = peft.LoraConfig(r=4, target_modules="all-linear", exclude_modules=but and [but], init_lora_weights=False)
    wrapped = peft.get_peft_model(reference.to(torch.float32), config)
    wrapped.save_pretrained(tmp_path / "adapter")
    if config.target_parameters:  # PEFT adds those of experts
        with pytest.raises(UnsupportedModelError, match="target_parameters"):
            load_model(folder, adapter=tmp_path / "adapter")
        return
    model, text = load_model(folder, "float32", adapter=tmp_path / "adapter"), tokens(30)
    with torch.inference_mode():
        expected = wrapped(torch.tensor([text]), use_cache=False).logits[0]
    assert model.kind == "fused"
    torch.testing.assert_close(in_parts(model, text, [30]), expected, atol=2e-3, rtol=2e-3)


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
    spec = spec_of(theirs.config)
    ours = FusedModules(theirs.config, spec, torch.float32).state_dict()
    take_experts_apart(spec, theirs)
    assert {key: each.shape for key, each in ours.items()} == {
        key: each.shape for key, each in theirs.state_dict().items()
    }


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_a_position_keeps_its_latent_twice_and_one_rotated_key(family: str, dtype: str, tmp_path: Path) -> None:
    config, model = tiny_config(family), load_model(make_family(family, tmp_path), dtype)
    widths = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
    assert model.new_cache().shapes == [(1, *widths)] * config.num_hidden_layers  # type: ignore[attr-defined]
    assert attention_widths(config, description_of(config).served) == (config.num_attention_heads, 1, *widths)


@pytest.mark.parametrize("family", ["gpt2", "falcon", "opt", "granitemoehybrid", "biogpt", *STATE_SPACES])
def test_quantized_weights_have_their_places(family: str, tmp_path: Path) -> None:
    """Compare with the float model: a weight in the wrong place, or transposed, gives other logits altogether."""
    folder, text = make_family(family, tmp_path), tokens(30)
    exact, rounded = (in_parts(load_model(folder, "float32", quantize=each), text, [30]) for each in (None, "int8"))
    assert (exact - rounded).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_keys_that_no_layer_reads(quantize: str | None, tmp_path: Path) -> None:
    """Read files as they are published: layers that read another's keys and values have weights for their own."""
    folder, text = make_family("gemma4_text", tmp_path), tokens(30)
    expected = in_parts(load_model(folder, "float32", quantize=quantize), text, [30])
    tensors, layer = load_file(folder / WEIGHTS), "model.layers.{}.self_attn.{}.weight"
    for name in ("k_proj", "k_norm"):
        tensors[layer.format(2, name)] = tensors[layer.format(1, name)].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = find_source(folder).plain_config()
    assert (
        read_fused("it", config, spec_of(config), find_source(folder).checkpoint(config, torch.float32), torch.float32)
        is not None
    )
    assert torch.equal(in_parts(load_model(folder, "float32", quantize=quantize), text, [30]), expected)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_keys_and_values_are_as_wide_as_each_layer_says(dtype: str, tmp_path: Path) -> None:
    model = load_model(make_family("gemma4_text", tmp_path), dtype)
    assert model.new_cache().shapes == [(2, 12, 12), (1, 20, 20)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("family", ["gpt2", "falcon", "nemotron_h"])
def test_files_with_the_names_of_the_base_model(family: str, quantize: str | None, tmp_path: Path) -> None:
    """Read what Transformers has to convert: names without the base, or with another; an output layer that is the
    embedding again."""
    folder, text = make_family(family, tmp_path), tokens(30)
    expected = in_parts(load_model(folder, "float32", quantize=quantize), text, [30])
    tensors = {name.removeprefix("transformer."): each for name, each in load_file(folder / WEIGHTS).items()}
    if family == "nemotron_h":
        tensors = {name.replace("model.", "backbone.", 1): each for name, each in tensors.items()}
    if family == "falcon":
        tensors = {f"transformer.{name}": each for name, each in tensors.items()}
        tensors["lm_head.weight"] = tensors["transformer.word_embeddings.weight"].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert torch.equal(in_parts(load_model(folder, "float32", quantize=quantize), text, [30]), expected)
