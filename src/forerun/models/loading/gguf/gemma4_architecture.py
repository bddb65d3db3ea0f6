"""What GGUF files say of Gemma 4 in their own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.loading.gguf.architecture import KEY_HEADS, PATTERN, WIDTH, counts_of, layer_count, refuse
from forerun.models.loading.gguf.mixture import EXPERTS, mixture
from forerun.utils.json_file import Fields

_OPTIONS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_CAP = "final_logit_softcapping"
_TABLE = "per_layer_token_embd.weight"


def gemma4(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Gemma 4. width: of a head in layers of full attention."""
    count = layer_count(fields)
    sliding = fields.list_of(PATTERN, bool)
    local = fields.integer("attention.key_length_swa", width, low=1)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (other := fields.integer(key, local)) != local:
            refuse(fields, f"{key} is {other} and the heads of layers with a window are {local} wide")
    shared = fields.integer("attention.shared_kv_layers", 0, low=0, high=count - 1)
    own = [index for index in range(count - shared) if not sliding[index]]
    are_keys = {f"blk.{index}.attn_v.weight" not in tensors for index in own} or {False}
    heads = [
        {each for each, kind in zip(counts_of(fields, KEY_HEADS), sliding, strict=False) if kind is is_local}
        for is_local in (True, False)
    ]
    heads = [each or heads[1 - place] for place, each in enumerate(heads)]
    if len(are_keys) > 1 or max(map(len, heads)) > 1 or (heads[0] != heads[1] and are_keys == {False}):
        refuse(fields, f"{KEY_HEADS} or the tensors attn_v differ between layers of one kind")
    widths = counts_of(fields, WIDTH)
    is_double = widths[-1] != widths[0]
    if widths != [widths[0]] * (count - shared) + [widths[0] * (1 + is_double)] * shared:
        refuse(fields, f"{WIDTH} differs from layer to layer")
    experts = mixture(fields, _OPTIONS) if fields.integer(EXPERTS, 0, low=0) else {}
    inputs = fields.integer("embedding_length_per_layer_input", 0, low=0)
    return {
        "head_dim": local,
        "global_head_dim": width,
        "num_key_value_heads": min(heads[0]),
        "num_global_key_value_heads": min(heads[1]),
        "attention_k_eq_v": are_keys == {True},
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_double,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": tensors[_TABLE].shape[0] if _TABLE in tensors else 1,
        "final_logit_softcapping": fields.number(_CAP, 0.0, low=0) or None,
        "enable_moe_block": bool(experts),
        **experts,
    }
