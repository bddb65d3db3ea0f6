"""What a GGUF file of an architecture says in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from forerun.errors import UnsupportedModelError
from forerun.utils.json_file import REQUIRED, Fields

SECTIONS = "rope.dimension_sections"
TEMPERATURE = "attention.temperature_scale"
_KEY = "attention.key_length"
_VALUE = "attention.value_length"
WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
NEXT_TOKENS = "nextn_predict_layers"
HEADS = "attention.head_count"
KEY_HEADS = "attention.head_count_kv"
WIDTH = "feed_forward_length"
RMS_NORM = "attention.layer_norm_rms_epsilon"
LAYER_NORM = "attention.layer_norm_epsilon"
_NOTHING: Mapping[str, Any] = MappingProxyType({})
Options = Callable[[Fields, int, Mapping[str, Any]], dict[str, Any]]
"""A function of a file's keys, the width of a head, and the tensors by name."""


class Architecture(NamedTuple):
    """What a GGUF file of an architecture is in Transformers.

    Attributes:
        model_type: Transformers' name.
        is_permuted: llama.cpp's converter permutes rows of queries and keys: there, one rotation turns rows that lie
            side by side, and in Transformers rows that lie half a head apart.
        biases: option of the configuration -> the tensor whose presence, in any layer, sets it.
        windowed: the model type whose layers have the file's sliding window; None: windows are refused.
        period: every so many layers one has no window, where the file says nothing else; None: all layers have it.
        window: that of a file that says none; 0: none.
        local_base: base of the rotation of layers with a window where the file says none, 0: that of the others; None:
            all layers are rotated alike.
        eps: option of the norms' epsilon; None: a constant.
        is_partly_rotated: files say how much of a head is rotated.
        is_latent: keys and values are made of latents, as `latent` reads it; the width of a head is what is rotated.
        differing: counts that may be others in some layers, which `options` reads; that of the first stands for all.
        by_layer: counts that may be 0 in layers which lack what is counted; all others have the same.
        attends: there are heads of attention, and feed-forward layers.
        constants: options that files do not say.
        options: returns further options.
        heads_are_tiled: the converter puts the value heads of recurrent layers into the order of
            `Recurrence.heads_are_tiled`.
        reads: keys among NEUTRAL that may have any value.
        yarn: returns parameters of a rotation that is scaled so, which files do not say, or in another way.
    """

    model_type: str
    is_permuted: bool = False
    biases: Mapping[str, str] = _NOTHING
    windowed: str | None = None
    period: int | None = None
    window: int = 0
    local_base: float | None = None
    eps: str | None = "rms_norm_eps"
    is_partly_rotated: bool = False
    is_latent: bool = False
    differing: tuple[str, ...] = ()
    by_layer: tuple[str, ...] = ()
    attends: bool = True
    constants: Mapping[str, Any] = _NOTHING
    options: Options = lambda fields, width, tensors: {}
    heads_are_tiled: bool = False
    reads: tuple[str, ...] = ()
    yarn: Callable[[Fields], Mapping[str, Any]] = lambda fields: {}

    @property
    def eps_key(self) -> str:
        """Return the key of the norms' epsilon."""
        return RMS_NORM if self.eps == "rms_norm_eps" else LAYER_NORM


def refuse(fields: Fields, what: str) -> NoReturn:
    """Raise UnsupportedModelError for a valid value that no Transformers model of the architecture computes."""
    raise UnsupportedModelError(
        f"{fields.place}: {what}, which Transformers' model does not compute. Serve it with llama.cpp, or give the "
        "model's Transformers folder or hub id."
    )


def layer_count(fields: Fields) -> int:
    """Return the number of the model's layers. Further ones, which predict further tokens, stand behind them."""
    count = fields.integer("block_count", low=1) - fields.integer(NEXT_TOKENS, 0, low=0)
    if count < 1:
        raise fields.wrong(NEXT_TOKENS, "less than block_count")
    return count


def counts_of(fields: Fields, key: str) -> list[int]:
    """Return a count of each layer. A file may have one for all."""
    count = layer_count(fields)
    value = fields.values.get(key)
    found = fields.list_of(key, int) if isinstance(value, list) else [fields.integer(key, low=1)] * count
    if len(found) < count or min(found) < 1:
        raise fields.wrong(key, f"a list of {count} counts")
    return found[:count]


def granite_factors(fields: Fields, width: int) -> dict[str, Any]:
    """Return the factors of Granite and its successors. width: of a head."""
    return {
        "attention_multiplier": fields.number("attention.scale", 0.0) or width**-0.5,
        "embedding_multiplier": fields.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": fields.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": fields.number("logit_scale"),
    }


GRANITE_FACTORS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")


def latent(fields: Fields, width: int) -> dict[str, Any]:
    """Return the sizes of attention with latents.

    Newer files say of keys and values what is kept of them, which has one head, and with further keys what each head
    has; older ones that alone.

    Args:
        width: numbers of a key that are rotated.

    Raises:
        ModelLoadError: a key is missing, or its value cannot be.
        UnsupportedModelError: keys of what is kept say something else.
    """
    if width % 2:
        refuse(fields, f"rope.dimension_count is {width}, an odd number")
    heads = fields.integer(HEADS, low=1)
    rank = fields.integer("attention.kv_lora_rank", low=1)
    said = {key: fields.integer(key, None) for key in (KEY_HEADS, _KEY, _VALUE)}
    ending = ""
    kept = {KEY_HEADS: heads}
    if f"{_KEY}_mla" in fields:
        kept = {KEY_HEADS: 1, _KEY: rank + width, _VALUE: rank}
        ending = "_mla"
    for key, value in kept.items():
        if said[key] != value:
            refuse(fields, f"{key} is {said[key]}, and {value} with latents of {rank} numbers")
    value_width = REQUIRED if ending else fields.integer("embedding_length", low=1) // heads
    return {
        "q_lora_rank": fields.integer("attention.q_lora_rank", None, low=1),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": width,
        "qk_nope_head_dim": fields.integer(_KEY + ending, low=width + 1) - width,
        "v_head_dim": fields.integer(_VALUE + ending, value_width, low=1),
    }
