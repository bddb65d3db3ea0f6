"""How today's code names what the golden files show. A field keeps the name that it has in the files."""

from __future__ import annotations

import ctypes
from typing import Any

from forerun.kernels.cpu.library import (
    WEIGHT_KINDS,
    ExpertsStruct,
    LatentStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    RecurrenceStruct,
)

RENAMED: dict[str, str] = {
    "layer.rotation": "layer.rope",
    "layer.curve": "layer.activation_params",
    "layer.output_scale": "layer.layer_scalar",
    "layer.keys_at": "layer.kv_offset",
    "layer.token_gate": "layer.per_layer_input_gate",
    "layer.token_out": "layer.per_layer_projection",
    "layer.token_norm": "layer.post_per_layer_input_norm",
    "recurrence.mixed": "recurrence.in_proj_qkv",
    "recurrence.gate": "recurrence.in_proj_z",
    "recurrence.beta": "recurrence.in_proj_b",
    "recurrence.decay": "recurrence.in_proj_a",
    "recurrence.out": "recurrence.out_proj",
    "recurrence.taps": "recurrence.conv1d",
    "recurrence.taps_bias": "recurrence.conv1d_bias",
    "recurrence.num_taps": "recurrence.conv_kernel",
    "recurrence.rate": "recurrence.A",
    "recurrence.step_bias": "recurrence.dt_bias",
    "recurrence.skip": "recurrence.D",
    "recurrence.norm_width": "recurrence.normed_width",
    "recurrence.least_step": "recurrence.time_step_min",
    "recurrence.most_step": "recurrence.time_step_max",
    "recurrence.state_at": "recurrence.state_offset",
    "recurrence.record_at": "recurrence.record_offset",
    "recurrence.query_at": "recurrence.query_start",
    "recurrence.key_at": "recurrence.key_start",
    "recurrence.value_at": "recurrence.value_start",
    "experts.shared_switch": "experts.shared_expert_gate",
    "experts.bias": "experts.e_score_correction_bias",
    "experts.curve": "experts.activation_params",
    "experts.count": "experts.num_experts",
    "experts.top": "experts.num_experts_per_tok",
    "experts.width": "experts.moe_intermediate_size",
    "experts.groups": "experts.n_group",
    "experts.top_groups": "experts.topk_group",
    "experts.adds_to_one": "experts.norm_topk_prob",
    "experts.scale": "experts.routed_scaling_factor",
    "experts.best": "experts.scores_of_group",
    "experts.norm": "experts.expert_norm",
    "experts.mixed_norm": "experts.routed_norm",
    "experts.share_scales": "experts.per_expert_scale",
    "latent.entry": "latent.q_a_proj",
    "latent.entry_norm": "latent.q_a_layernorm",
    "latent.norm": "latent.kv_a_layernorm",
    "latent.absorb": "latent.k_b_proj",
    "latent.expand": "latent.v_b_proj",
}
"""Name in the golden files -> name today, such as "recurrence.mixed": "recurrence.in_proj" for a field of a structure,
"kind.MXFP4" for a weight's format. `meaning.py` has those of a spec."""

MODEL, LAYER, RECURRENCE, EXPERTS, LATENT, LINEAR = (
    *(ModelStruct, LayerStruct, RecurrenceStruct, ExpertsStruct, LatentStruct, LinearStruct),
)
BELOW: dict[str, tuple[str, type[ctypes.Structure]]] = {
    "layer.recurrence": ("recurrence", RECURRENCE),
    "layer.experts": ("experts", EXPERTS),
    "layer.latent": ("latent", LATENT),
}
"""Pointers to one structure."""


def golden_name(of: str, name: str) -> str:
    """Return the name in the golden files. of: "layer", "experts", "kind" and the like."""
    now = f"{of}.{name}"
    return next((old for old, new in RENAMED.items() if new == now), now).partition(".")[2]


def value(of: str, struct: ctypes.Structure, name: str) -> Any:
    """Return a field of a structure by its name in the golden files."""
    return getattr(struct, RENAMED.get(f"{of}.{name}", f"{of}.{name}").partition(".")[2])


def kind_name(kind: int) -> str:
    """Return the name of a weight's format."""
    return golden_name("kind", next(name for name, number in WEIGHT_KINDS.items() if number == kind))


def structure(decoder: Any) -> ctypes.Structure:
    """Return `ForerunModel` of a native decoder."""
    found: ctypes.Structure = decoder.struct
    return found


def layers(decoder: Any) -> list[ctypes.Structure]:
    """Return each layer's `ForerunLayer`."""
    struct = structure(decoder)
    pointer = ctypes.cast(value("model", struct, "layers"), ctypes.POINTER(LAYER))
    return [pointer[index] for index in range(value("model", struct, "num_layers"))]


def embedding(decoder: Any) -> ctypes.Structure:
    """Return `ForerunLinear` of the embedding."""
    found: ctypes.Structure = decoder.embedding.struct
    return found


def library(decoder: Any) -> Any:
    """Return the native library."""
    return decoder.library
