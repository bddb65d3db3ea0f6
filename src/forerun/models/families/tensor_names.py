"""llama.cpp's names of tensors, of all families.

A tensor of a layer is "blk.LAYER.NAME.KIND" with one of these names, and "weight" or "bias". What an architecture calls
otherwise stands in its row (`Architecture.tensors`).
"""

from __future__ import annotations

from collections.abc import Mapping

from forerun.models.spec.attention import Attention, LatentAttention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import EXPERT, Experts
from forerun.models.spec.layer import LAYER_NORMS
from forerun.models.spec.recurrence import RECURRENT_ROLES, Recurrence

Names = dict[str, tuple[str, int]]
"""Name of a tensor, of layer 0 if it is a layer's -> the parameter that it is, and its place among the tensors that are
this parameter together."""
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
TENSORS: Mapping[str, str] = {
    "input_norm": "attn_norm",
    "attention_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "feed_norm": "post_ffw_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "out": "attn_output",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "q_a_proj": "attn_q_a",
    "q_a_layernorm": "attn_q_a_norm",
    "kv_a_proj": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
    "expert_norm": "pre_ffw_norm_2",
    "shared_norm": "post_ffw_norm_1",
    "routed_norm": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
"""Role of a linear layer or a norm -> its name."""
QKV_TENSOR = "attn_qkv"
"""Queries, keys and values together."""
STACKS: Mapping[str, tuple[str, ...]] = {
    "ffn_gate_exps": EXPERT[:1],
    "ffn_up_exps": EXPERT[1:2],
    "ffn_gate_up_exps": EXPERT[:2],
    "ffn_down_exps": EXPERT[2:],
}
"""Names of the tensors of all experts, [count, out, in] or [count, out], and the roles that each has."""
_STATES = {
    "norm": "ssm_norm.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "D": "ssm_d",
    "conv1d": "ssm_conv1d",
}
_RECURRENCES: Mapping[str, Mapping[str, str]] = {
    "short_convolution": {
        "in_proj_qkv": "shortconv.in_proj",
        "out_proj": "shortconv.out_proj",
        "conv1d": "shortconv.conv",
    },
    "delta_rule": {
        "in_proj_qkv": "attn_qkv",
        "in_proj_z": "attn_gate",
        "in_proj_b": "ssm_beta",
        "in_proj_a": "ssm_alpha",
        "out_proj": "ssm_out",
        **_STATES,
    },
    "state_space": {"in_proj_qkv": "ssm_in", "out_proj": "ssm_out", **_STATES},
}
"""Role or parameter of a kind of recurrence -> its name. The first of the roles that share a module names it."""
WITH_KIND = {*RECURRENT_ROLES, "conv1d"}
"""Those of recurrences that may have a weight and a bias."""
_KINDS = ("weight", "bias")


def outer_tensors(spec: DecoderSpec, own: Mapping[str, str]) -> Names:
    """Return the tensors outside of layers. own: as of `layer_tensors`."""
    modules = {
        "token_embd": f"{spec.base}.{spec.embeddings.module}",
        "output": spec.output.module,
    }
    if spec.norms.has_weights:
        modules[own.get("norm", "output_norm")] = f"{spec.base}.{spec.output.norm}"
    if (inputs := spec.embeddings.per_layer) is not None:
        modules |= {
            "per_layer_token_embd": f"{spec.base}.{inputs.table}",
            "per_layer_model_proj": f"{spec.base}.{inputs.product}",
            "per_layer_proj_norm": f"{spec.base}.{inputs.norm}",
        }
    return {f"{name}.{kind}": (f"{path}.{kind}", 0) for name, path in modules.items() for kind in _KINDS}


def layer_tensors(spec: DecoderSpec, own: Mapping[str, str]) -> Names:
    """Return the tensors of layers, but for those of recurrences and of single experts.

    own: names of an architecture that are not those of TENSORS, by role.
    """
    attention = spec.attention
    names = {**TENSORS, **own}
    if isinstance(attention, LatentAttention) and attention.q_lora_rank:
        names["query"] = "attn_q_b"
    layer = f"{spec.layer_path(0)}."
    found = Names()
    norms = {role: (module, 0) for role, module in _norms(spec).items()}
    for role, (module, place) in {**_linear_layers(spec), **norms}.items():
        found |= {f"blk.0.{names[role]}.{kind}": (f"{layer}{module}.{kind}", place) for kind in _KINDS}
    if isinstance(attention, LatentAttention):
        kv_b_proj = f"{layer}{attention.kv_b_proj}.weight"
        found |= {"blk.0.attn_kv_b.weight": (kv_b_proj, 0)}
        found |= {name: (kv_b_proj, place) for place, name in enumerate(halves(spec))}
    if isinstance(attention, Attention):
        if len(attention.sharing("query")) > 2:
            module = f"{layer}{attention.modules['query']}"
            found |= {f"blk.0.{QKV_TENSOR}.{kind}": (f"{module}.{kind}", 0) for kind in _KINDS}
        if attention.sinks is not None:
            found["blk.0.attn_sinks.weight"] = layer + attention.sinks, 0
    if spec.layers[0].scalar is not None:
        found["blk.0.layer_output_scale.weight"] = layer + spec.layers[0].scalar, 0
    return found | _expert_tensors(spec.experts, layer)


def _linear_layers(spec: DecoderSpec) -> dict[str, tuple[str, int]]:
    """Return the module of each linear layer of all layers together, and its place among those that share it."""
    found = dict[str, tuple[str, int]]()
    for layer in spec.layers:
        for part in (each for each in layer.parts if not isinstance(each, Recurrence)):
            for role in (each for each in part.roles if each in TENSORS):
                sharing = [each for each in part.sharing(role) if each in TENSORS]
                if len(sharing) < 3:  # three have QKV_TENSOR
                    found[role] = part.modules[role], sharing.index(role)
    return found


def _norms(spec: DecoderSpec) -> dict[str, str]:
    """Return the module of each norm of all layers together. Of those that are one, the first names it."""
    there = dict[str, str]()
    for layer in spec.layers if spec.norms.has_weights else ():
        there |= layer.norms
        for part in (each for each in layer.parts if not isinstance(each, Recurrence)):
            there |= {role: part.modules[role] for role in part.norms}
    found = dict[str, str]()
    for role in (*LAYER_NORMS, *there):
        if role in there and there[role] not in found.values():
            found[role] = there[role]
    return found


def _expert_tensors(experts: Experts | None, layer: str) -> Names:
    """Return the tensors of a mixture but for those of single experts. layer: the path of layer 0, with a dot."""
    if experts is None:
        return {}
    found = {f"blk.0.ffn_gate_inp.{kind}": (f"{layer}{experts.router}.{kind}", 0) for kind in _KINDS}
    if experts.shared_expert_gate is not None:
        found["blk.0.ffn_gate_inp_shexp.weight"] = f"{layer}{experts.shared_expert_gate}.weight", 0
    parameters = {
        "ffn_gate_inp.scale": experts.router_norm,
        "ffn_down_exps.scale": experts.per_expert_scale,
        "exp_probs_b.bias": experts.e_score_correction_bias,
    }
    return found | {f"blk.0.{name}": (layer + path, 0) for name, path in parameters.items() if path is not None}


def halves(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Return what newer files have in place of the weight that makes keys and values of latents: the names of a tensor
    for keys and one for values, each with the shape of its part of that weight."""
    own = spec.attention
    if not isinstance(own, LatentAttention):
        return {}
    sizes = {"attn_k_b": own.head_dim - own.rotated, "attn_v_b": own.v_head_dim}
    return {f"blk.0.{name}.weight": (own.num_heads * size, own.kv_lora_rank) for name, size in sizes.items()}


def recurrent_tensors(shape: Recurrence) -> dict[str, str]:
    """Return the names of a recurrence by role or parameter. One of beta and decay together is not taken apart."""
    found = {**_RECURRENCES[shape.kind]}
    if "in_proj_b" in found and shape.modules["in_proj_b"] == shape.modules["in_proj_a"]:
        found |= {"in_proj_b": "ssm_ba"}
        del found["in_proj_a"]
    return {role: name for role, name in found.items() if role in shape.modules or role in shape.parameters}
