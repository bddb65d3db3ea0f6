"""Families whose attention keeps latents (multi-head latent attention)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Any

from forerun.models.families.build import biases_of, decoder, feed_forward, layer, mixture, require
from forerun.models.families.gguf_keys import (
    EXPERTS,
    FACTOR,
    GATING,
    NEXT_TOKENS,
    NORM,
    ROUTED,
    SIGMOID,
    SOFTMAX,
    Architecture,
    num_dense,
    read_corrected_experts,
    read_latent,
    refuse,
)
from forerun.models.families.moe import (
    behind_dense,
    corrected_experts,
    shared_mlp,
    some_with_experts,
    sparse_of,
)
from forerun.models.spec.attention import LatentAttention
from forerun.models.spec.decoder import DecoderSpec, Embeddings, Output
from forerun.utils.json_file import Fields


def _scale(config: Any, width: int) -> float:
    """Return the factor of scores; some scalings of the rotation have a part in it."""
    rope = config.rope_parameters
    every = 0 if rope["rope_type"] == "default" else rope.get("mscale_all_dim") or 0
    growth = 0.1 * every * log(rope["factor"]) + 1.0 if every and rope["factor"] > 1 else 1.0
    return float(width**-0.5 * growth * growth)


def _latent(config: Any, *, is_interleaved: bool = False) -> LatentAttention:
    rank = config.q_lora_rank or 0
    modules = {"query": "q_proj"}
    if rank:
        modules = {"query": "q_b_proj", "q_a_proj": "q_a_proj", "q_a_layernorm": "q_a_layernorm"}
    modules |= {"kv_a_proj": "kv_a_proj_with_mqa", "kv_a_layernorm": "kv_a_layernorm", "out": "o_proj"}
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return LatentAttention(
        num_heads=config.num_attention_heads,
        head_dim=width,
        rotated=config.qk_rope_head_dim,
        scale=_scale(config, width),
        is_interleaved=is_interleaved,
        kv_lora_rank=config.kv_lora_rank,
        v_head_dim=config.v_head_dim,
        q_lora_rank=rank,
        modules={role: f"self_attn.{name}" for role, name in modules.items()},
        biases=frozenset({"q_a_proj", "kv_a_proj", "out"} if config.attention_bias else ()),
    )


def _deepseek_v2(config: Any) -> DecoderSpec:
    require(config, "topk_method", "greedy", "group_limited_greedy")
    shared = config.n_shared_experts or 0
    width = config.moe_intermediate_size
    groups = config.n_group if config.topk_method == "group_limited_greedy" else 0
    biases = biases_of(config, "mlp_bias")
    experts = mixture(
        config,
        shared_mlp("mlp.shared_experts") if shared else {},
        biases=frozenset(f"shared_{role}" for role in biases),
        num_experts=config.n_routed_experts,
        moe_intermediate_size=width,
        shared_intermediate_size=width * shared,
        unrounded=True,
        n_group=groups,
        topk_group=config.topk_group if groups else 0,
        scores_of_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    own = _latent(config, is_interleaved=True)
    dense = feed_forward(config, biases=biases)
    return decoder(config, some_with_experts(config, own, dense, experts, behind_dense(config)))


def _deepseek_v3(config: Any, are_sparse: list[bool] | None = None) -> DecoderSpec:
    """Return DeepSeek V3, or a successor. are_sparse: which layers have experts; None: all behind the first ones."""
    experts = corrected_experts(config, config.n_routed_experts, config.n_shared_experts or 0)
    own = _latent(config, is_interleaved=bool(config.rope_interleave))
    sparse = behind_dense(config) if are_sparse is None else are_sparse
    return decoder(config, some_with_experts(config, own, feed_forward(config), experts, sparse))


def _glm4_moe_lite(config: Any) -> DecoderSpec:
    return _deepseek_v3(config, sparse_of(config))


def _minicpm3(config: Any) -> DecoderSpec:
    return decoder(
        config,
        layer(config, _latent(config), feed_forward(config, biases=biases_of(config, "mlp_bias"))),
        embeddings=Embeddings(scale=config.scale_emb),
        residual_scale=config.scale_depth / config.num_hidden_layers**0.5,
        output=Output(scale=config.dim_model_base / config.hidden_size),
    )


MLA_FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "minicpm3": _minicpm3,
}


def _read_deepseek2(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of DeepSeek V3, or of V2, whose scores are a softmax; older files do not say of which."""
    function = fields.integer(GATING, 0)
    is_corrected = any(".exp_probs_b." in name for name in tensors)
    is_v3 = function in SIGMOID or (not function and is_corrected)
    if fields.string("rope.scaling.type", "linear") == "linear" and fields.number(FACTOR, 1.0) not in (0, 1):
        refuse(fields, f"{FACTOR} is {fields.number(FACTOR)} and rope.scaling.type linear")
    found = read_corrected_experts(fields, ROUTED, "n_shared_experts", SIGMOID if is_v3 else SOFTMAX)
    if not is_v3 and found["norm_topk_prob"]:
        refuse(fields, f"{NORM} is True and {GATING} a softmax")
    method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    own = {"model_type": "deepseek_v3"} if is_v3 else {"topk_method": method}
    return {**read_latent(fields, width), **found, **own, "first_k_dense_replace": num_dense(fields)}


def _read_deepseek_yarn(fields: Fields) -> dict[str, Any]:
    """Return the parameters of DeepSeek's YaRN scaling. It multiplies scores, and no cosines and sines; the converter
    writes a tenth of the logarithm's multiplier."""
    if (attention := fields.number("rope.scaling.attn_factor", 1.0)) != 1:
        refuse(fields, f"rope.scaling.attn_factor is {attention}")
    multiplier = 10 * fields.number("rope.scaling.yarn_log_multiplier", low=1e-6)
    factor = fields.number("rope.scaling.yarn_attn_factor", 1.0, low=0)
    return {"attention_factor": factor, "mscale": multiplier, "mscale_all_dim": multiplier}


def _read_minicpm3(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return read_latent(fields, width)


MLA_ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": Architecture(
        "deepseek_v2",
        is_latent=True,
        constants={"attention_bias": False, "mlp_bias": False, "rope_interleave": True},
        options=_read_deepseek2,
        reads=(EXPERTS, NEXT_TOKENS),
        yarn=_read_deepseek_yarn,
    ),
    # its factors are constants in llama.cpp, too
    "minicpm3": Architecture(
        "minicpm3",
        is_latent=True,
        constants={
            "attention_bias": False,
            "mlp_bias": False,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        options=_read_minicpm3,
    ),
}
