"""How the families that are made like GPT-2 differ from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.models.fused.options import Difference, biases_of, head_shape, rotated_share
from forerun.models.spec.attention import ATTENTION
from forerun.models.spec.feed_forward import FEED


def _gpt2(config: Any) -> Difference:
    qkv = "attn.c_attn"
    norm = {"input_norm": "ln_1", "mlp_norm": "ln_2"}
    feed = {"gate": None, "up": "mlp.c_fc", "down": "mlp.c_proj"}
    _, _, width = head_shape(config)
    return {
        "modules": {"query": qkv, "key": qkv, "value": qkv, "out": "attn.c_proj"} | norm | feed,
        "is_transposed": True,
        "biases": ATTENTION | FEED | {"norms"},
        "base": "transformer",
        "embedding": "wte",
        "positions": "wpe",
        "layer_list": "h",
        "norm": "ln_f",
        "norm_kind": "layer",
        "eps": config.layer_norm_epsilon,
        "intermediate": config.n_inner or 4 * config.hidden_size,
        "scale": width**-0.5 if config.scale_attn_weights else 1.0,
        "turned": [False] * config.num_hidden_layers,
        "unserved": [] if not config.add_cross_attention else ["add_cross_attention"],
    }


def _gpt_bigcode(config: Any) -> Difference:
    # its attention of several key heads has each head's query, key and value side by side
    heads = config.num_attention_heads
    kv_heads = 1 if config.multi_query else config.num_attention_heads
    groups = 1 if config.multi_query else heads
    return {**_gpt2(config), "is_transposed": False, "num_kv_heads": kv_heads, "qkv_groups": groups}


def _gpt_neox(config: Any) -> Difference:
    qkv = "attention.query_key_value"
    names = {"query": qkv, "key": qkv, "value": qkv, "out": "attention.dense"}
    feed = {"gate": None, "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    return {
        "num_kv_heads": config.num_attention_heads,
        "qkv_groups": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "scale": (config.hidden_size // config.num_attention_heads) ** -0.5,
        "modules": names | feed,
        "biases": FEED | {"norms"} | biases_of(config, "attention_bias"),
        "base": "gpt_neox",
        "embedding": "embed_in",
        "norm": "final_layer_norm",
        "norm_kind": "layer",
        "eps": config.layer_norm_eps,
        "is_parallel": bool(config.use_parallel_residual),
        "rotated_share": rotated_share(config),
    }


def _gptj(config: Any) -> Difference:
    _, _, width = head_shape(config)
    norms = {"input_norm": "ln_1", "mlp_norm": "ln_1"}
    return {
        "modules": {"query": "attn.q_proj", "key": "attn.k_proj", "value": "attn.v_proj", "out": "attn.out_proj"}
        | {"gate": None, "up": "mlp.fc_in", "down": "mlp.fc_out"}
        | norms,
        "biases": FEED | {"norms", "head"},
        "base": "transformer",
        "embedding": "wte",
        "layer_list": "h",
        "norm": "ln_f",
        "norm_kind": "layer",
        "eps": config.layer_norm_epsilon,
        "intermediate": config.n_inner or 4 * config.hidden_size,
        "is_parallel": True,
        "is_interleaved": True,
        "rotated_share": config.rotary_dim / width,
    }


def _opt(config: Any) -> Difference:
    names = {"out": "self_attn.out_proj", "gate": None, "up": "fc1", "down": "fc2"}
    needed = ("do_layer_norm_before", "layer_norm_elementwise_affine")
    unserved = [name for name in needed if not getattr(config, name)]
    unserved += ["_remove_final_layer_norm"] if config._remove_final_layer_norm else []
    return {
        "modules": names | {"input_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
        "biases": frozenset({"norms"}) | (ATTENTION | FEED if config.enable_bias else frozenset()),
        "base": "model.decoder",
        "positions": "embed_positions",
        "first_position": 2,
        "norm": "final_layer_norm",
        "norm_kind": "layer",
        "eps": 1e-5,
        "intermediate": config.ffn_dim,
        "turned": [False] * config.num_hidden_layers,
        "unserved": unserved + (["word_embed_proj_dim"] if config.word_embed_proj_dim != config.hidden_size else []),
    }


def _biogpt(config: Any) -> Difference:
    names = {"out": "self_attn.out_proj", "gate": None, "up": "fc1", "down": "fc2"}
    return {
        "modules": names | {"input_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
        "biases": ATTENTION | FEED | {"norms"},
        "base": "biogpt",
        "positions": "embed_positions",
        "first_position": 2,
        "norm": "layer_norm",
        "head": "output_projection",
        "norm_kind": "layer",
        "eps": 1e-5,
        "embedding_scale": config.hidden_size**0.5 if config.scale_embedding else 1.0,
        "turned": [False] * config.num_hidden_layers,
    }


def _falcon(config: Any) -> Difference:
    heads = config.num_attention_heads
    is_new = config.new_decoder_architecture
    qkv = "self_attention.query_key_value"
    kv_heads = config.num_kv_heads if is_new else 1 if config.multi_query else heads
    norms = {"mlp_norm": "input_layernorm"} if config.parallel_attn else {}
    if is_new and config.num_ln_in_parallel_attn in (None, 2):
        norms = {"input_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    return {
        "num_kv_heads": kv_heads,
        "qkv_groups": kv_heads,
        "modules": {"query": qkv, "key": qkv, "value": qkv, "out": "self_attention.dense"}
        | {"gate": None, "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
        | norms,
        "biases": frozenset({"norms"}) | (ATTENTION | FEED if config.bias else frozenset()),
        "base": "transformer",
        "embedding": "word_embeddings",
        "layer_list": "h",
        "norm": "ln_f",
        "norm_kind": "layer",
        "eps": config.layer_norm_epsilon,
        "intermediate": config.ffn_hidden_size,
        "is_parallel": bool(config.parallel_attn),
        "unserved": ["alibi"] if config.alibi else ["parallel_attn"] if is_new and not config.parallel_attn else [],
    }


def _phi(config: Any) -> Difference:
    names = {"out": "self_attn.dense", "gate": None, "up": "mlp.fc1", "down": "mlp.fc2", "mlp_norm": "input_layernorm"}
    return {
        "modules": names,
        "biases": ATTENTION | FEED | {"norms", "head"},
        "norm": "final_layernorm",
        "norm_kind": "layer",
        "eps": config.layer_norm_eps,
        "is_parallel": True,
        "rotated_share": rotated_share(config),
    }


GPT_FAMILIES: Mapping[str, Callable[[Any], Difference]] = {
    "biogpt": _biogpt,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "opt": _opt,
    "phi": _phi,
}
