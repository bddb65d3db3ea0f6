"""Families with short convolutions or the gated delta rule in their recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.models.families.build import (
    NO_ROTATION,
    attention,
    biases_of,
    decoder,
    feed_forward,
    layer,
    mixture,
    recurrence,
    require,
    rotated_share,
    with_recurrences,
)
from forerun.models.families.gguf_keys import (
    EXPERTS,
    INTERVAL,
    KEY_HEADS,
    LEADING,
    MOST_CONV_KERNEL,
    NEXT_TOKENS,
    POST_ATTENTION,
    RECURRENT,
    RMS_NORM,
    SECTIONS,
    SHORT_CONV,
    SIGMOID,
    Architecture,
    layer_count,
    num_dense,
    read_by_layer,
    read_experts,
    read_qwen_experts,
    read_state,
)
from forerun.models.families.moe import qwen_layers
from forerun.models.spec.attention import GATED_QUERY, HEAD_NORMS, AnyAttention
from forerun.models.spec.decoder import DecoderSpec, Norms, Output
from forerun.models.spec.feed_forward import EXPERT, AnyFeedForward
from forerun.models.spec.layer import LLAMA_NORMS
from forerun.models.spec.recurrence import Recurrence
from forerun.utils.json_file import Fields

TILED = "linear_heads_are_tiled"
"""Key of forerun's: value heads lie as in llama.cpp's files (`Recurrence.heads_are_tiled`)."""
_CONVOLUTIONS = ("conv",)
_DELTA_RULES = ("linear_attention",)
"""Transformers' names of recurrent layers."""


# Gated delta rules (arXiv 2412.06464)


def _delta_rule(
    config: Any, modules: Mapping[str, str], norm: str = "linear_attn.norm", **differing: Any
) -> Recurrence:
    """Return the gated delta rule as Qwen3-Next and its successors have it. differing: fields of `Recurrence`."""
    require(config, "hidden_act", "silu")  # of the convolution, too
    heads = config.linear_num_value_heads
    key_heads = config.linear_num_key_heads
    key_width = config.linear_key_head_dim
    value_width = config.linear_value_head_dim
    fields = {
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
    }
    return recurrence({role: f"linear_attn.{name}" for role, name in modules.items()}, **{**fields, **differing})


def _qwen3_5(config: Any, recurrent: Recurrence | None = None) -> DecoderSpec:
    """Return Qwen3.5, or what has another recurrence."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    recurrent = recurrent or _delta_rule(config, {name: name for name in names})
    own = attention(
        config,
        GATED_QUERY | HEAD_NORMS,
        biases=biases_of(config, "attention_bias"),
        qkv_groups=config.num_attention_heads,
        rotated_share=rotated_share(config),
    )
    return decoder(
        config,
        with_recurrences(config, qwen_layers(config, own), _DELTA_RULES, recurrent),
        norms=Norms(config.rms_norm_eps, offset=1.0),
        further_types=_DELTA_RULES,
    )


def _qwen3_next(config: Any) -> DecoderSpec:
    """Return Qwen3.5 with two modules of all projections, in which each head of keys has its own side by side."""
    groups = config.linear_num_key_heads
    key = config.linear_key_head_dim
    each = config.linear_num_value_heads // groups
    value = each * config.linear_value_head_dim
    stride = 2 * (key + value)
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
    modules = {
        "in_proj_qkv": "in_proj_qkvz",
        "in_proj_z": "in_proj_qkvz",
        "in_proj_b": "in_proj_ba",
        "in_proj_a": "in_proj_ba",
        "out_proj": "out_proj",
    }
    return _qwen3_5(config, _delta_rule(config, modules, places=places))


def _olmo_hybrid(config: Any) -> DecoderSpec:
    modules = {
        "in_proj_qkv": "q_proj",
        "in_proj_k": "k_proj",
        "in_proj_v": "v_proj",
        "in_proj_z": "g_proj",
        "in_proj_b": "b_proj",
        "in_proj_a": "a_proj",
        "out_proj": "o_proj",
    }
    recurrent = _delta_rule(
        config,
        modules,
        "linear_attn.o_norm",
        norm_eps=1e-5,
        beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
        unrounded=frozenset({"A_log"}),
    )
    own = attention(config, HEAD_NORMS, biases=biases_of(config, "attention_bias"), has_wide_norms=True)
    feed = feed_forward(config)
    behind = {"attention_norm": "post_attention_layernorm", "feed_norm": "post_feedforward_layernorm"}
    attending = layer(config, own, feed, behind)
    recurring = layer(config, None, feed, LLAMA_NORMS, recurrence=recurrent)
    rotates = config.rope_parameters.get("rope_theta") is not None
    return decoder(
        config,
        [recurring if kind in _DELTA_RULES else attending for kind in config.layer_types],
        turned=None if rotates else [False] * config.num_hidden_layers,
        ropes=None if rotates else {None: NO_ROTATION},
        further_types=_DELTA_RULES,
    )


# Short convolutions of LFM2 (arXiv 2511.23404)


def _lfm(
    config: Any, own: AnyAttention, feeds: Sequence[AnyFeedForward], behind: Mapping[str, str] = {}, **differing: Any
) -> DecoderSpec:
    """Return LFM2, or a successor.

    Args:
        feeds: the feed-forward layer of each layer. behind: norms of what is added.
        differing: as of `decoder`.
    """
    wide = config.hidden_size
    entry = "conv.in_proj"
    modules = {"in_proj_qkv": entry, "in_proj_b": entry, "in_proj_z": entry, "out_proj": "conv.out_proj"}
    starts = {"in_proj_b": 0, "in_proj_z": wide, "in_proj_qkv": 2 * wide}
    recurrent = recurrence(
        modules,
        biases=frozenset({*modules, "conv1d"} if config.conv_bias else ()),
        kind="short_convolution",
        conv_kernel=config.conv_L_cache,
        channels=wide,
        parameters={"conv1d": "conv.conv"},
        places={role: ((start, wide, wide, 1),) for role, start in starts.items()},
    )
    norms = {"input_norm": "operator_norm", "mlp_norm": "ffn_norm", **behind}
    layers = [layer(config, own, feed, norms) for feed in feeds]
    return decoder(
        config,
        with_recurrences(config, layers, _CONVOLUTIONS, recurrent),
        norms=Norms(config.norm_eps),
        output=Output(norm="embedding_norm"),
        further_types=_CONVOLUTIONS,
        **differing,
    )


def _lfm_feed(config: Any, width: int) -> AnyFeedForward:
    modules = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}
    return feed_forward(config, modules, activation="silu", intermediate_size=width)


_OF_LFM2 = {
    "out": "self_attn.out_proj",
    "query_norm": "self_attn.q_layernorm",
    "key_norm": "self_attn.k_layernorm",
}


def _lfm2(config: Any) -> DecoderSpec:
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        factor = config.block_ffn_dim_multiplier
        multiple = config.block_multiple_of
        width = int((1 if factor is None else factor) * int(2 * width / 3))
        width = width if factor is None else multiple * -(-width // multiple)
    return _lfm(config, attention(config, _OF_LFM2), [_lfm_feed(config, width)] * config.num_hidden_layers)


def _lfm2_moe(config: Any) -> DecoderSpec:
    experts = mixture(
        config,
        activation="silu",
        num_experts=config.num_experts,
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
    dense = _lfm_feed(config, config.intermediate_size)
    are_dense = [index < config.num_dense_layers for index in range(config.num_hidden_layers)]
    feeds = [dense if is_dense else experts for is_dense in are_dense]
    return _lfm(config, attention(config, _OF_LFM2), feeds)


def _lfm3(config: Any) -> DecoderSpec:
    gate = {"attention_gate": "self_attn.g_proj"} if config.use_attention_gate else {}
    behind = {"attention_norm": "post_operator_norm", "feed_norm": "post_ffn_norm"} if config.use_sandwich_norm else {}
    own = attention(
        config,
        HEAD_NORMS | gate,
        biases=biases_of(config, "attention_bias") - {"attention_gate"},
        gates_heads=config.use_attention_gate,
    )
    feeds = [_lfm_feed(config, config.intermediate_size)] * config.num_hidden_layers
    return _lfm(config, own, feeds, behind, renamed={".self_attn.gate_proj.": ".self_attn.g_proj."})


RECURRENT_FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "lfm3": _lfm3,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_5_moe_text": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
}


def _read_qwen35(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    count = layer_count(fields)
    interval = fields.integer(INTERVAL, 4, low=1)
    flags = fields.values.get(RECURRENT)
    state = read_state(fields)
    if flags is None:
        flags = [bool((layer + 1) % interval) for layer in range(count)]
    elif not isinstance(flags, list):  # the same of all layers
        flags = [flags] * count
    if len(flags) < count or not all(flag in (0, 1) for flag in flags):
        raise fields.wrong(RECURRENT, f"a list of {count} flags")
    return {
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in flags[:count]],
        "linear_conv_kernel_dim": state["conv_kernel"],
        "linear_key_head_dim": state["state_size"],
        "linear_value_head_dim": state["head_width"],
        "linear_num_key_heads": state["group_count"],
        "linear_num_value_heads": state["time_step_rank"],
    }


def _read_qwen35moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {**_read_qwen35(fields, width, tensors), **read_qwen_experts(fields)}


def _read_lfm2(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in read_by_layer(fields, KEY_HEADS)],
        "conv_L_cache": fields.integer(SHORT_CONV, low=1, high=MOST_CONV_KERNEL),
        "norm_eps": fields.number(RMS_NORM, low=0),
    }


def _read_lfm2moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_read_lfm2(fields, width, tensors),
        **read_experts(fields, gating=SIGMOID, reads=(LEADING,)),
        "num_dense_layers": num_dense(fields),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


RECURRENT_ARCHITECTURES: Mapping[str, Architecture] = {
    "lfm2": Architecture(
        "lfm2",
        biases={"conv_bias": "blk.0.shortconv.in_proj.bias"},
        eps=None,
        by_layer=(KEY_HEADS,),
        constants={"block_auto_adjust_ff_dim": False},
        options=_read_lfm2,
        tensors={"norm": "token_embd_norm"},
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        biases={"conv_bias": "blk.0.shortconv.in_proj.bias", "use_expert_bias": "blk.0.exp_probs_b.bias"},
        eps=None,
        by_layer=(KEY_HEADS,),
        options=_read_lfm2moe,
        reads=(EXPERTS,),
        tensors={"norm": "token_embd_norm"},
    ),
    # Positions in a text are the same in all sections, as of "qwen2vl".
    "qwen35": Architecture(
        "qwen3_5_text",
        is_partly_rotated=True,
        constants={"attention_bias": False, "hidden_act": "silu"},
        options=_read_qwen35,
        heads_are_tiled=True,
        reads=(SECTIONS, NEXT_TOKENS),
        tensors=POST_ATTENTION,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        is_partly_rotated=True,
        constants={"attention_bias": False, "hidden_act": "silu"},
        options=_read_qwen35moe,
        heads_are_tiled=True,
        reads=(EXPERTS, SECTIONS, NEXT_TOKENS),
        tensors=POST_ATTENTION,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        is_partly_rotated=True,
        constants={"attention_bias": False, "hidden_act": "silu"},
        options=_read_qwen35moe,
        reads=(EXPERTS, NEXT_TOKENS),
        tensors=POST_ATTENTION,
    ),
}
