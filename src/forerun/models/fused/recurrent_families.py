"""How the families with recurrent layers differ from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from forerun.models.fused.expert_families import experts_of_granite, experts_of_qwen
from forerun.models.fused.llama_families import granite
from forerun.models.fused.options import NO_ROTATION, Difference, Has, biases_of, head_shape, rotated_share
from forerun.models.spec.attention import GATED_QUERY, HEAD_NORMS
from forerun.models.spec.feed_forward import EXPERT, Experts
from forerun.models.spec.recurrence import Recurrence

TILED = "linear_heads_are_tiled"
"""Key of forerun's: value heads lie as in llama.cpp's files (`Recurrence.heads_are_tiled`)."""
_IN, _OUT = ("in_proj_z", "in_proj_qkv", "in_proj_a"), "out_proj"
"""Roles of the modules of a state space."""
_ONLY_RECURRENT: Has = {"attends": False, "is_recurrent": True, "feeds": False}
_FEED_FORWARD = {
    "mlp_norm": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}


def _delta_rule(config: Any, norm: str = "linear_attn.norm", **differing: Any) -> Recurrence:
    """Return the gated delta rule (2412.06464) as Qwen3-Next and its successors have it."""
    heads = config.linear_num_value_heads
    key_heads = config.linear_num_key_heads
    key_width = config.linear_key_head_dim
    value_width = config.linear_value_head_dim
    return Recurrence(
        **{
            "kind": "delta_rule",
            "conv_kernel": config.linear_conv_kernel_dim,
            "channels": 2 * key_heads * key_width + heads * value_width,
            "heads": heads,
            "key_heads": key_heads,
            "key_width": key_width,
            "value_width": value_width,
            "heads_are_tiled": getattr(config, TILED, False),
            "parameters": {
                "conv1d": "linear_attn.conv1d",
                "A_log": "linear_attn.A_log",
                "dt_bias": "linear_attn.dt_bias",
                "norm": norm,
            },
            "normed_width": value_width,
            "norm_eps": config.rms_norm_eps,
            **differing,
        }
    )


def _unserved(config: Any, option: str = "hidden_act") -> list[str]:
    """Return the option of the convolution's activation, perhaps that of the feed-forward layer too, if it is not the
    one that the kernels have."""
    return [] if getattr(config, option) == "silu" else [option]


def _qwen3_5(config: Any) -> Difference:
    mixture = experts_of_qwen(config) if hasattr(config, "num_experts") else {}
    recurrent = {
        "in_proj_qkv": "linear_attn.in_proj_qkv",
        "in_proj_z": "linear_attn.in_proj_z",
        "in_proj_b": "linear_attn.in_proj_b",
        "in_proj_a": "linear_attn.in_proj_a",
        "out_proj": "linear_attn.out_proj",
    }
    return {
        **mixture,
        "modules": recurrent | GATED_QUERY | HEAD_NORMS | mixture.get("modules", {}),
        "qkv_groups": config.num_attention_heads,
        "biases": biases_of(config, "attention_bias"),
        "norm_offset": 1.0,
        "rotated_share": rotated_share(config),
        "recurrence": _delta_rule(config),
        "unserved": _unserved(config),
    }


def _state_space(
    module: str, heads: int, width: int, groups: int, size: int, taps: int, eps: float, limits: tuple[float, float]
) -> Difference:
    """Return modules and recurrence of Mamba 2's state space (2405.21060), in the layer's module of this name.

    width: of a head. groups, size: of keys and queries. limits: of steps.
    """
    wide = heads * width
    channels = heads * width + 2 * groups * size
    numbers = {"conv1d": "conv1d", "A_log": "A_log", "dt_bias": "dt_bias", "D": "D", "norm": "norm"}
    recurrence = Recurrence(
        kind="state_space",
        conv_kernel=taps,
        channels=channels,
        heads=heads,
        key_heads=groups,
        key_width=size,
        value_width=width,
        order=("value", "key", "query"),
        parameters={name: f"{module}.{path}" for name, path in numbers.items()},
        places={
            "in_proj_z": ((0, wide, 0, 1),),
            "in_proj_qkv": ((wide, channels, 0, 1),),
            "in_proj_a": ((wide + channels, heads, 0, 1),),
        },
        normed_width=wide // groups,
        norms_each=False,
        gates_first=True,
        norm_eps=eps,
        time_step_limit=(limits[0], limits[1]),
    )
    modules = dict.fromkeys(_IN, f"{module}.in_proj") | {_OUT: f"{module}.out_proj"}
    return {"modules": modules, "recurrence": recurrence}


def _biases(in_products: bool, in_convolution: bool) -> frozenset[str]:
    """Return the roles of a state space with biases."""
    return frozenset({*_IN, _OUT} if in_products else ()) | frozenset({"conv1d"} if in_convolution else ())


def _hybrid(config: Any) -> Difference:
    """Return what Bamba and its successors have beside attention, without the roles of attention and feed-forward
    layer."""
    found = _state_space(
        "mamba",
        *(config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv),
        *(config.rms_norm_eps, config.time_step_limit),
    )
    biases = _biases(config.mamba_proj_bias, config.mamba_conv_bias)
    unserved = _unserved(config) if {"linear_attention", "hybrid"} & {*config.layer_types} else []
    return {**found, "biases": biases_of(config, "attention_bias", "mlp_bias") | biases, "unserved": unserved}


def _bamba(config: Any) -> Difference:
    found = _hybrid(config)
    return {
        **found,
        "modules": found["modules"] | _FEED_FORWARD,
        "norm": "final_layernorm",
        "rotated_share": rotated_share(config),
    }


def _granitemoehybrid(config: Any) -> Difference:
    found = _hybrid(config)
    gate_up = "shared_mlp.input_linear"
    mixture = experts_of_granite(config) if config.num_local_experts else {}
    dense = {"gate": gate_up, "up": gate_up, "down": "shared_mlp.output_linear"}
    return {
        **granite(config),
        **found,
        **mixture,
        "modules": found["modules"] | mixture.get("modules", dense),
        "intermediate": config.shared_intermediate_size,
        "turned": [config.position_embedding_type == "rope"] * config.num_hidden_layers,
    }


def _falcon_h1(config: Any) -> Difference:
    found = _hybrid(config)
    shape = found["recurrence"]
    entering = config.ssm_in_multiplier
    attended = config.attention_in_multiplier
    parts = zip(("gate", "value", "key", "query", "step"), config.ssm_multipliers, strict=True)
    scales = {part: entering * scale for part, scale in parts} | {"out": config.ssm_out_multiplier}
    numbers = {name: path for name, path in shape.parameters.items() if name != "norm" or config.mamba_rms_norm}
    is_behind = not config.mamba_norm_before_gate
    activation, fed = config.mlp_multipliers
    biased = {"mamba_proj_bias": entering, "attention_bias": attended}  # what enters is scaled behind the products
    unserved = [key for key, scale in biased.items() if getattr(config, key) and scale != 1.0]
    return {
        **found,
        "recurrence": replace(shape, parameters=numbers, gates_first=is_behind, scales=scales),
        "modules": found["modules"] | _FEED_FORWARD,
        "biases": found["biases"] - {_OUT} | ({_OUT} if config.projectors_bias else set()),
        "blocks": {"hybrid": {"is_recurrent": True}},
        "norm": "final_layernorm",
        "scale": head_shape(config)[2] ** -0.5 * config.key_multiplier * attended**2,
        "attention_scale": attended * config.attention_out_multiplier,
        "activation_scale": activation,
        "feed_scales": [fed] * config.num_hidden_layers,
        "embedding_scale": config.embedding_multiplier,
        "logit_scale": config.lm_head_multiplier,
        "unserved": [*found["unserved"], *unserved],
    }


def _nemotron_h(config: Any) -> Difference:
    found = _state_space(
        "mixer",
        *(config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size, config.conv_kernel),
        *(config.layer_norm_epsilon, (config.time_step_min, float("inf"))),
    )
    attention = {"query": "mixer.q_proj", "key": "mixer.k_proj", "value": "mixer.v_proj", "out": "mixer.o_proj"}
    feed = {"gate": None, "up": "mixer.up_proj", "down": "mixer.down_proj"}
    blocks: dict[str, Has] = {
        "full_attention": {"feeds": False},
        "linear_attention": _ONLY_RECURRENT,
        "mlp": {"attends": False},
    }
    return {
        "modules": found["modules"] | attention | feed | {"input_norm": "norm", "mlp_norm": "norm"},
        "recurrence": found["recurrence"],
        "biases": _biases(config.use_bias, config.use_conv_bias) | biases_of(config, "mlp_bias"),
        "blocks": blocks,
        "turned": [False] * config.num_hidden_layers,
        "embedding": "embeddings",
        "norm": "norm_f",
        "eps": config.layer_norm_epsilon,
        "renamed": {"backbone.": "model."},  # as it was formerly
        "unserved": _unserved(config, "mamba_hidden_act"),
    }


def _mamba2(config: Any) -> Difference:
    found = _state_space(
        "mixer",
        *(config.num_heads, config.head_dim, config.n_groups, config.state_size, config.conv_kernel),
        *(config.layer_norm_epsilon, config.time_step_limit),
    )
    return {
        **found,
        "modules": found["modules"] | {"input_norm": "norm"},
        "biases": _biases(config.use_bias, config.use_conv_bias),
        "blocks": {"linear_attention": _ONLY_RECURRENT},
        "heads": (1, 1, 2),  # of no layer
        "intermediate": 0,
        "base": "backbone",
        "embedding": "embeddings",
        "norm": "norm_f",
        "eps": config.layer_norm_epsilon,
        "unserved": _unserved(config),
    }


def _qwen3_next(config: Any) -> Difference:
    """Return Qwen3.5 with two modules of all projections, in which each head of keys has its own side by side."""
    found = _qwen3_5(config)
    groups = config.linear_num_key_heads
    key = config.linear_key_head_dim
    each = config.linear_num_value_heads // groups
    value = each * config.linear_value_head_dim
    stride = 2 * (key + value)
    all_four = "linear_attn.in_proj_qkvz"
    rates = "linear_attn.in_proj_ba"
    places = {
        "in_proj_qkv": (
            (0, key, stride, groups),
            (key, key, stride, groups),
            (2 * key, value, stride, groups),
        ),
        "in_proj_z": ((2 * key + value, value, stride, groups),),
        "in_proj_b": ((0, each, 2 * each, groups),),
        "in_proj_a": ((each, each, 2 * each, groups),),
    }
    modules = {"in_proj_qkv": all_four, "in_proj_z": all_four, "in_proj_b": rates, "in_proj_a": rates}
    return {
        **found,
        "modules": found["modules"] | modules,
        "recurrence": replace(found["recurrence"], places=places),
    }


def _olmo_hybrid(config: Any) -> Difference:
    recurrent = {
        "in_proj_qkv": "linear_attn.q_proj",
        "in_proj_k": "linear_attn.k_proj",
        "in_proj_v": "linear_attn.v_proj",
        "in_proj_z": "linear_attn.g_proj",
        "in_proj_b": "linear_attn.b_proj",
        "in_proj_a": "linear_attn.a_proj",
        "out_proj": "linear_attn.o_proj",
        "input_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    attending = {"attention_norm": "post_attention_layernorm", "feed_norm": "post_feedforward_layernorm"}
    beta_scale = 2.0 if config.linear_allow_neg_eigval else 1.0
    is_turned = config.rope_parameters.get("rope_theta") is not None
    return {
        "modules": recurrent | attending | HEAD_NORMS,
        "norm_owners": {
            "input_norm": "is_recurrent",
            "mlp_norm": "is_recurrent",
            "attention_norm": "attends",
            "feed_norm": "attends",
        },
        "biases": biases_of(config, "attention_bias"),
        "has_wide_norms": True,
        "recurrence": _delta_rule(
            config, "linear_attn.o_norm", norm_eps=1e-5, beta_scale=beta_scale, unrounded=frozenset({"A_log"})
        ),
        "unserved": _unserved(config),
        **({} if is_turned else {"turned": [False] * config.num_hidden_layers, "rotations": ((None, NO_ROTATION),)}),
    }


def _lfm(config: Any, **modules: str) -> Difference:
    """Return what the successors of LFM2 (2511.23404) have in common. modules: of attention, by role."""
    wide = config.hidden_size
    entry = "conv.in_proj"
    recurrent = {"in_proj_qkv": entry, "in_proj_b": entry, "in_proj_z": entry, "out_proj": "conv.out_proj"}
    around = {"input_norm": "operator_norm", "mlp_norm": "ffn_norm"}
    feed = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}
    starts = {"in_proj_b": 0, "in_proj_z": wide, "in_proj_qkv": 2 * wide}
    return {
        "modules": {**recurrent, **around, **feed, **modules},
        "biases": frozenset({*recurrent, "conv1d"} if config.conv_bias else ()),
        "norm": "embedding_norm",
        "eps": config.norm_eps,
        "activation": "silu",
        "recurrence": Recurrence(
            kind="short_convolution",
            conv_kernel=config.conv_L_cache,
            channels=wide,
            parameters={"conv1d": "conv.conv"},
            places={role: ((start, wide, wide, 1),) for role, start in starts.items()},
        ),
    }


_OF_LFM2 = {
    "out": "self_attn.out_proj",
    "query_norm": "self_attn.q_layernorm",
    "key_norm": "self_attn.k_layernorm",
}


def _lfm2(config: Any) -> Difference:
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        factor = config.block_ffn_dim_multiplier
        multiple = config.block_multiple_of
        width = int((1 if factor is None else factor) * int(2 * width / 3))
        width = width if factor is None else multiple * -(-width // multiple)
    return {**_lfm(config, **_OF_LFM2), "intermediate": width}


def _lfm2_moe(config: Any) -> Difference:
    experts = Experts(
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        router="feed_forward.gate",
        experts={
            role: f"feed_forward.experts.{{}}.{name}" for role, name in zip(EXPERT, ("w1", "w3", "w2"), strict=True)
        },
        stacked="feed_forward.experts",
        e_score_correction_bias="feed_forward.expert_bias" if config.use_expert_bias else None,
        scoring="sigmoid",
        norm_topk_prob=config.norm_topk_prob,
        least_sum=1e-6,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    mixed = [layer >= config.num_dense_layers for layer in range(config.num_hidden_layers)]
    return {**_lfm(config, **_OF_LFM2), "experts": experts, "mixed": mixed}


def _lfm3(config: Any) -> Difference:
    gate = {"attention_gate": "self_attn.g_proj"} if config.use_attention_gate else {}
    behind = {"attention_norm": "post_operator_norm", "feed_norm": "post_ffn_norm"} if config.use_sandwich_norm else {}
    found = _lfm(config, **HEAD_NORMS, **gate, **behind)
    biases = found["biases"] | biases_of(config, "attention_bias") - {"attention_gate"}
    renamed = {".self_attn.gate_proj.": ".self_attn.g_proj."}
    return {**found, "biases": biases, "gates_heads": config.use_attention_gate, "renamed": renamed}


RECURRENT_FAMILIES: Mapping[str, Callable[[Any], Difference]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "lfm3": _lfm3,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_5_moe_text": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
}
