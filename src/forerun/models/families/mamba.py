"""Families with state spaces of Mamba 2 (arXiv 2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from forerun.models.families.build import (
    attention,
    biases_of,
    decoder,
    feed_forward,
    head_shape,
    layer,
    recurrence,
    require,
    rotated_share,
    with_recurrences,
)
from forerun.models.families.gguf_keys import (
    EXPERTS,
    FINETUNED,
    GRANITE_FACTORS,
    KEY_HEADS,
    LOCAL,
    RMS_NORM,
    ROTATED,
    SHARED_WIDTH,
    UP_BIAS,
    WIDTH,
    Architecture,
    read_by_layer,
    read_experts,
    read_granite_factors,
    read_state,
    refuse,
)
from forerun.models.families.llama import granite, granite_attention
from forerun.models.families.moe import granite_experts
from forerun.models.spec.decoder import DecoderSpec, Embeddings, Norms, Output
from forerun.models.spec.feed_forward import AnyFeedForward
from forerun.models.spec.recurrence import Recurrence
from forerun.utils.json_file import Fields

_STATE_SPACES = ("linear_attention", "mamba")
"""Transformers' names of recurrent layers."""
_ENTRIES = ("in_proj_z", "in_proj_qkv", "in_proj_a")
_PARAMETERS = ("conv1d", "A_log", "dt_bias", "D", "norm")


def _state_space(
    module: str,
    *,
    heads: int,
    width: int,
    groups: int,
    size: int,
    conv_kernel: int,
    eps: float,
    limits: tuple[float, float],
    biases: frozenset[str],
    has_norm: bool = True,
    gates_first: bool = True,
    scales: Mapping[str, float] = MappingProxyType({}),
) -> Recurrence:
    """Return a state space in the layer's module of this name.

    Args:
        heads, width: of values. groups, size: of keys and queries.
        eps: of the norm. limits: of steps.
        biases: as of `_state_biases`. gates_first, scales: of `Recurrence`.
    """
    wide = heads * width
    channels = wide + 2 * groups * size
    return recurrence(
        dict.fromkeys(_ENTRIES, f"{module}.in_proj") | {"out_proj": f"{module}.out_proj"},
        biases=biases,
        kind="state_space",
        conv_kernel=conv_kernel,
        channels=channels,
        heads=heads,
        key_heads=groups,
        key_width=size,
        value_width=width,
        order=("value", "key", "query"),
        parameters={name: f"{module}.{name}" for name in _PARAMETERS if has_norm or name != "norm"},
        places={
            "in_proj_z": ((0, wide, 0, 1),),
            "in_proj_qkv": ((wide, channels, 0, 1),),
            "in_proj_a": ((wide + channels, heads, 0, 1),),
        },
        normed_width=wide // groups,
        norms_each=False,
        gates_first=gates_first,
        norm_eps=eps,
        time_step_limit=(limits[0], limits[1]),  # a list in files
        scales=scales,
    )


def _state_biases(in_products: bool, in_convolution: bool) -> frozenset[str]:
    """Return the roles of a state space with biases."""
    products = frozenset({*_ENTRIES, "out_proj"} if in_products else ())
    return products | frozenset({"conv1d"} if in_convolution else ())


def _mamba(config: Any, biases: frozenset[str] | None = None, **differing: Any) -> Recurrence:
    """Return the state space of Bamba and its successors. differing: arguments of `_state_space`."""
    if {"linear_attention", "hybrid"} & {*config.layer_types}:
        require(config, "hidden_act", "silu")  # of the convolution, too
    own = _state_biases(config.mamba_proj_bias, config.mamba_conv_bias)
    return _state_space(
        "mamba",
        heads=config.mamba_n_heads,
        width=config.mamba_d_head,
        groups=config.mamba_n_groups,
        size=config.mamba_d_state,
        conv_kernel=config.mamba_d_conv,
        eps=config.rms_norm_eps,
        limits=config.time_step_limit,
        biases=own if biases is None else biases,
        **differing,
    )


_OF_BAMBA = {"gate": "feed_forward.gate_proj", "up": "feed_forward.up_proj", "down": "feed_forward.down_proj"}
_NORMS_OF_BAMBA = {"input_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}


def _bamba(config: Any) -> DecoderSpec:
    own = attention(config, biases=biases_of(config, "attention_bias"), rotated_share=rotated_share(config))
    feed = feed_forward(config, _OF_BAMBA, biases=biases_of(config, "mlp_bias"))
    return decoder(
        config,
        with_recurrences(config, layer(config, own, feed, _NORMS_OF_BAMBA), _STATE_SPACES, _mamba(config)),
        output=Output(norm="final_layernorm"),
        further_types=_STATE_SPACES,
    )


def _granitemoehybrid(config: Any) -> DecoderSpec:
    both = "shared_mlp.input_linear"
    renamed = dict[str, str]()
    feed: AnyFeedForward = feed_forward(
        config,
        {"gate": both, "up": both, "down": "shared_mlp.output_linear"},
        biases=biases_of(config, "mlp_bias"),
        intermediate_size=config.shared_intermediate_size,
    )
    if config.num_local_experts:
        feed, renamed = granite_experts(config)
    return granite(
        config,
        with_recurrences(config, layer(config, granite_attention(config), feed), _STATE_SPACES, _mamba(config)),
        turned=[config.position_embedding_type == "rope"] * config.num_hidden_layers,
        further_types=_STATE_SPACES,
        renamed=renamed,
    )


def _falcon_h1(config: Any) -> DecoderSpec:
    entering = config.ssm_in_multiplier
    attended = config.attention_in_multiplier
    biased = {"mamba_proj_bias": entering, "attention_bias": attended}  # what enters is scaled behind the products
    for option, scale in biased.items():
        if scale != 1.0:
            require(config, option, None, False)
    parts = zip(("gate", "value", "key", "query", "step"), config.ssm_multipliers, strict=True)
    scales = {part: entering * scale for part, scale in parts} | {"out": config.ssm_out_multiplier}
    biases = _state_biases(config.mamba_proj_bias, config.mamba_conv_bias) - {"out_proj"}
    recurrent = _mamba(
        config,
        biases | ({"out_proj"} if config.projectors_bias else set()),
        has_norm=config.mamba_rms_norm,
        gates_first=not config.mamba_norm_before_gate,
        scales=scales,
    )
    (_, _, width) = head_shape(config)
    own = attention(
        config,
        biases=biases_of(config, "attention_bias"),
        scale=width**-0.5 * config.key_multiplier * attended**2,
        out_scale=attended * config.attention_out_multiplier,
    )
    of_gate, fed = config.mlp_multipliers
    feed = feed_forward(
        config, _OF_BAMBA, biases=biases_of(config, "mlp_bias"), activation_scale=of_gate, out_scale=fed
    )
    hybrid = layer(config, own, feed, _NORMS_OF_BAMBA, recurrence=recurrent)
    return decoder(
        config,
        with_recurrences(config, hybrid, _STATE_SPACES, recurrent),
        embeddings=Embeddings(scale=config.embedding_multiplier),
        output=Output(norm="final_layernorm", scale=config.lm_head_multiplier),
        further_types=(*_STATE_SPACES, "hybrid"),
    )


def _nemotron_h(config: Any) -> DecoderSpec:
    require(config, "mamba_hidden_act", "silu")
    recurrent = _state_space(
        "mixer",
        heads=config.mamba_num_heads,
        width=config.mamba_head_dim,
        groups=config.n_groups,
        size=config.ssm_state_size,
        conv_kernel=config.conv_kernel,
        eps=config.layer_norm_epsilon,
        limits=(config.time_step_min, float("inf")),
        biases=_state_biases(config.use_bias, config.use_conv_bias),
    )
    projections = {"query": "mixer.q_proj", "key": "mixer.k_proj", "value": "mixer.v_proj", "out": "mixer.o_proj"}
    feed = feed_forward(
        config,
        {"gate": None, "up": "mixer.up_proj", "down": "mixer.down_proj"},
        biases=biases_of(config, "mlp_bias"),
    )
    norms = {"input_norm": "norm", "mlp_norm": "norm"}
    attending = layer(config, attention(config, projections), None, norms)
    by_type = {
        "mlp": layer(config, None, feed, norms),
        **dict.fromkeys(_STATE_SPACES, layer(config, None, None, norms, recurrence=recurrent)),
    }
    return decoder(
        config,
        [by_type.get(kind, attending) for kind in config.layer_types],
        turned=[False] * config.num_hidden_layers,
        norms=Norms(config.layer_norm_epsilon),
        embeddings=Embeddings("embeddings"),
        output=Output(norm="norm_f"),
        renamed={"backbone.": "model."},  # as it was formerly
        further_types=by_type.keys(),
    )


def _mamba2(config: Any) -> DecoderSpec:
    require(config, "hidden_act", "silu")
    recurrent = _state_space(
        "mixer",
        heads=config.num_heads,
        width=config.head_dim,
        groups=config.n_groups,
        size=config.state_size,
        conv_kernel=config.conv_kernel,
        eps=config.layer_norm_epsilon,
        limits=config.time_step_limit,
        biases=_state_biases(config.use_bias, config.use_conv_bias),
    )
    return decoder(
        config,
        layer(config, None, None, {"input_norm": "norm"}, recurrence=recurrent),
        norms=Norms(config.layer_norm_epsilon),
        base="backbone",
        embeddings=Embeddings("embeddings"),
        output=Output(norm="norm_f"),
        further_types=_STATE_SPACES,
    )


MAMBA_FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
}


def _read_mamba(fields: Fields) -> dict[str, Any]:
    """Return the sizes of a state space by the names of Bamba and its successors. No file says limits of the steps,
    and in llama.cpp there are none."""
    state = read_state(fields)
    hidden = fields.integer("embedding_length", low=1)
    return {
        "mamba_n_heads": state["time_step_rank"],
        "mamba_d_head": state["head_width"],
        "mamba_n_groups": state["group_count"],
        "mamba_d_state": state["state_size"],
        "mamba_d_conv": state["conv_kernel"],
        "mamba_expand": state["inner_size"] // hidden,
        "time_step_limit": _UNLIMITED,
    }


def _read_granitehybrid(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ["full_attention" if heads else "linear_attention" for heads in read_by_layer(fields, KEY_HEADS)]
    is_rotated = fields.flag(FINETUNED, True)
    attending = [kind == "full_attention" for kind in kinds]
    options = {"layer_types": kinds, "attn_layer_indices": [i for i, attends in enumerate(attending) if attends]}
    if is_rotated and not any(key in fields for key in GRANITE_FACTORS):
        return {"model_type": "bamba", **_read_mamba(fields), **options}
    if is_rotated and (rotated := fields.integer(ROTATED, width)) != width:
        refuse(fields, f"{ROTATED} is {rotated} and the heads are {width} wide")
    experts: dict[str, int] = {"num_local_experts": 0}
    wide = fields.integer(SHARED_WIDTH, 0, low=0)
    if fields.integer(EXPERTS, 0, low=0):
        experts = read_experts(fields, LOCAL, width=fields.integer(WIDTH, low=1), reads=(SHARED_WIDTH,))
    elif not wide:
        wide = fields.integer(WIDTH, low=1)
    return {
        **_read_mamba(fields),
        "layer_types": kinds,
        "shared_intermediate_size": wide,
        "position_embedding_type": "rope" if is_rotated else "nope",
        **experts,
        **read_granite_factors(fields, width),
    }


def _read_falcon_h1(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    # the factors of embeddings and outputs, which differ, are in the weights
    if "output.weight" not in tensors:
        refuse(fields, "there is no tensor output.weight")
    state = _read_mamba(fields)
    return {
        **state,
        "mamba_d_ssm": state["mamba_n_heads"] * state["mamba_d_head"],
        "layer_types": ["hybrid"] * fields.integer("block_count", low=1),
    }


def _read_nemotron_h(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    state = read_state(fields)
    kinds = []
    for heads, wide in zip(read_by_layer(fields, KEY_HEADS), read_by_layer(fields, WIDTH), strict=True):
        if heads and wide:
            refuse(fields, f"a layer has {KEY_HEADS} and {WIDTH}")
        feeds = "mlp" if wide else "linear_attention"
        kinds.append("full_attention" if heads else feeds)
    return {
        "layer_types": kinds,
        "mamba_num_heads": state["time_step_rank"],
        "mamba_head_dim": state["head_width"],
        "n_groups": state["group_count"],
        "ssm_state_size": state["state_size"],
        "conv_kernel": state["conv_kernel"],
        "layer_norm_epsilon": fields.number(RMS_NORM, low=0),
    }


def _read_mamba2(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    state = read_state(fields)
    hidden = fields.integer("embedding_length", low=1)
    return {
        "layer_types": ["linear_attention"] * fields.integer("block_count", low=1),
        "num_heads": state["time_step_rank"],
        "head_dim": state["head_width"],
        "expand": state["inner_size"] // hidden,
        "n_groups": state["group_count"],
        "state_size": state["state_size"],
        "conv_kernel": state["conv_kernel"],
        "layer_norm_epsilon": fields.number(RMS_NORM, low=0),
        "time_step_limit": _UNLIMITED,
    }


_UNLIMITED = (0.0, math.inf)
_LEAST_STEP = 1e-30
"""Transformers takes its logarithm."""
_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
_SSM_BIAS = {"mamba_conv_bias": "blk.0.ssm_conv1d.bias", "mamba_proj_bias": "blk.0.ssm_in.bias"}
MAMBA_ARCHITECTURES: Mapping[str, Architecture] = {
    "falcon-h1": Architecture(
        "falcon_h1",
        biases={
            **UP_BIAS,
            **_SSM_BIAS,
            "projectors_bias": "blk.0.ssm_out.bias",
            "mamba_rms_norm": "blk.0.ssm_norm.weight",
        },
        constants={
            **dict.fromkeys(_FACTORS, 1.0),
            "mlp_multipliers": [1.0] * 2,
            "ssm_multipliers": [1.0] * 5,
            "hidden_act": "silu",
            "mamba_norm_before_gate": False,
        },
        options=_read_falcon_h1,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        True,
        {**UP_BIAS, **_SSM_BIAS},
        is_partly_rotated=True,
        by_layer=(KEY_HEADS,),
        constants={"hidden_act": "silu"},
        options=_read_granitehybrid,
        reads=(EXPERTS, *GRANITE_FACTORS),
    ),
    "mamba2": Architecture(
        "mamba2",
        biases={"use_conv_bias": "blk.0.ssm_conv1d.bias", "use_bias": "blk.0.ssm_in.bias"},
        eps=None,
        attends=False,
        constants={"hidden_act": "silu"},
        options=_read_mamba2,
    ),
    # Queries and keys are permuted, though they are not rotated; llama.cpp does not limit the steps, for which
    # Transformers has a least one.
    "nemotron_h": Architecture(
        "nemotron_h",
        True,
        biases={
            "mlp_bias": "blk.0.ffn_up.bias",
            "use_conv_bias": "blk.0.ssm_conv1d.bias",
            "use_bias": "blk.0.ssm_in.bias",
        },
        eps=None,
        by_layer=(KEY_HEADS, WIDTH),
        constants={"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "time_step_min": _LEAST_STEP},
        options=_read_nemotron_h,
    ),
}
