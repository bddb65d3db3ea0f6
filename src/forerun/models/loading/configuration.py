"""What forerun reads from a Transformers configuration, whatever files it was made from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from forerun.errors import UnsupportedModelError
from forerun.models.families.build import ACTIVATIONS
from forerun.models.families.table import FAMILIES, Description, description_of
from forerun.utils.json_file import Fields


class PlainConfig(SimpleNamespace):
    """A complete configuration of one of the described families with Transformers' names. Transformers' own classes
    take more than a second to import."""

    def standardize_rope_params(self) -> None:
        """Do nothing: Transformers' rotations call this for configurations of older forms."""

    @property
    def per_layer_config(self) -> dict[str, PlainConfig]:
        """Return the configuration of each kind of layer, as Transformers' rotations ask for it."""
        found = dict.fromkeys(getattr(self, "layer_types", None) or (), self)
        if "full_attention" in found and hasattr(self, "global_head_dim"):  # of Gemma 4
            own = {"head_dim": self.global_head_dim}
            own |= {"num_key_value_heads": self.num_global_key_value_heads} if self.attention_k_eq_v else {}
            found["full_attention"] = PlainConfig(**{**vars(self), **own})
        return found


UNLIMITED = 2**20
"""Positions of a model whose configuration sets no limit."""
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
OUTPUT_TOKENS = "output_token_ids"
"""Key of config.json, of forerun's: the tokens that the output layer was trained to propose. All others have no
probability, and their rows are not computed. The folder holds the whole layer, and is an ordinary one to others."""
MASK_TOKEN = "pard_token"
"""Key of config.json, of PARD's: the token that stands for each of those that are not known yet."""
_SMALLEST = 1e-6
_SIZES = (
    *("vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size", "head_dim"),
    *("num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "rotary_dim"),
)
_NUMBERS_OF_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_MAX_LAYERS = 1 << 16
"""Configurations make lists of as many entries; no model has a hundredth of that."""
_RANGES: tuple[tuple[str, float, float], ...] = (
    (r"(^|_)(eps|epsilon)$|^router_jitter_noise$", 0.0, 1.0),
    (r"^(rope_theta|rope_local_base_freq|rotary_emb_base)$", 1, math.inf),
    (r"^(partial_rotary_factor|rotary_pct)$", _SMALLEST, 1.0),
    (r"softcap|^(query_pre_attn_scalar|logits_scaling|factor|attention_factor)$", _SMALLEST, math.inf),
    (r"_multiplier$", -1e9, 1e9),
    (r"^(beta_fast|beta_slow|low_freq_factor|high_freq_factor)$", _SMALLEST, 1e9),
)
"""Pattern of a key, and the least and the largest number that a model can be computed with."""
_COUNTS = re.compile(r"^(sliding_window|n_group|topk_group|num_experts_per_tok|original_max_position_embeddings)$")
_ACTIVATION = re.compile(r"^(hidden_act|hidden_activation|mlp_hidden_act|activation_function)$")
_ROPE, _ROPE_TYPES = ("rope_parameters", "rope_scaling"), {"default", "mrope", "su"}
"""The last two are names that Transformers reads as others."""
_LARGEST = 3.5e38
"""A larger number is infinite in float32."""
_STATELESS = {"full_attention", "sliding_attention", "mlp", "moe"}
"""Types of layers that keep nothing of a sequence but keys and values."""

_BIDIRECTIONAL = "it attends to a prompt in both directions"


def refuse_unservable(config: Any, name: str) -> Description:
    """Return what a configuration describes. Raise UnsupportedModelError, with the reason, for kinds of models that
    forerun cannot serve."""
    found = description_of(config)
    refused = found.refusal
    if refused is None:
        return found
    foreign = set(getattr(config, "layer_types", None) or ()) - _STATELESS
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        reason = _BIDIRECTIONAL
    elif "chunked_attention" in foreign:
        reason = "its layers of type chunked_attention attend within chunks of positions, which no decoder computes"
    elif foreign and config.model_type in FAMILIES:
        kinds = ", ".join(sorted(foreign))
        reason = f"its layers of type {kinds} are computed by the fused decoder alone, which does not take {refused}"
    elif foreign:
        reason = f"its layers of type {', '.join(sorted(foreign))} keep a state that cannot be rolled back"
    elif refused.startswith("topk_method="):
        reason = f"no decoder computes {refused}"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder; forerun serves decoder-only models"
    else:
        return found
    raise UnsupportedModelError(f"{name} ({config.model_type}) cannot be served: {reason}.")


_PLAIN_TYPES = {
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""Text models of containers that Transformers has no causal language model of, and the type that each is. They rotate
parts of a head by a position's time, height and width, which are the same number in text: a plain rotation."""
_REFUSED = {"paligemma": _BIDIRECTIONAL}
"""Containers whose text models are computed otherwise than those of the same type alone."""


def text_config(whole: Any, place: str) -> Any:
    """Return the Transformers configuration of the text model in a container; of any other model, its own.

    place: where it is written, for messages.

    Raises:
        UnsupportedModelError: it is not a decoder that attends to earlier positions alone.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # Logits are scaled as the text model alone scales them. In Transformers the containers of Granite Vision
    # (LLaVA-NeXT), Granite Speech, Aya Vision and Command A Vision have the output layer and leave the scale out, but
    # the publishers' text models were trained with it: IBM's foundation-model-stack gives its llava_next Granite's
    # logits_scaling, and vLLM's cohere2_vision takes the logits of its Cohere2ForCausalLM. Greedy text is the same.
    text = whole.get_text_config(decoder=True)
    kind = "an encoder-decoder" if text is not whole and whole.is_encoder_decoder else None
    if reason := _REFUSED.get(whole.model_type, kind):
        raise UnsupportedModelError(
            f"{place}: {whole.model_type} cannot be served: {reason}; forerun serves decoder-only models, whose "
            "attention is causal. Serve it with Transformers."
        )
    if text.model_type not in _PLAIN_TYPES:
        return text
    values = {key: value for key, value in text.to_dict().items() if key != "model_type"}
    rope = {key: value for key, value in values["rope_parameters"].items() if not key.startswith("mrope")}
    values["rope_parameters"] = {"partial_rotary_factor": 1.0, **rope}
    values["head_dim"] = values.get("head_dim") or text.hidden_size // text.num_attention_heads
    if text.model_type == "qwen3_vl_moe_text":  # which has no such key
        values["norm_topk_prob"] = True
    return CONFIG_MAPPING[_PLAIN_TYPES[text.model_type]].from_dict(values)


def with_text_config(fields: Fields) -> list[Fields]:
    """Return a configuration, and that of the text model inside if it is a container's."""
    inner = (fields.fields("thinker_config", None) or fields).fields("text_config", None)
    return [fields] if inner is None else [fields, inner]


def check_values(fields: Fields) -> None:
    """Raise ModelLoadError, with key and value, for what no model can be computed with: Transformers uses most of it
    unchecked.

    fields: a configuration, as Transformers writes it.
    """
    for key in (*_SIZES, *CONTEXT_KEYS):
        if not isinstance(fields.values.get(key), list):  # a value for each layer
            fields.integer(key, None, low=1)
    for key in _NUMBERS_OF_LAYERS:
        fields.integer(key, None, low=1, high=_MAX_LAYERS)
    fields.integer("num_nextn_predict_layers", None, low=0, high=_MAX_LAYERS)
    for key in ("dtype", "torch_dtype"):
        name = fields.string(key, "float32")
        if name != "auto" and not isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype):
            raise fields.wrong(key, "a number format of torch, such as bfloat16")
    read_eos_token_ids(fields)
    _check_numbers(fields)
    for key in _ROPE:
        if (rope := fields.fields(key, None)) is not None:
            kinds = [key for key, value in rope.values.items() if isinstance(value, dict)]  # one for each kind of layer
            for part in [rope.fields(kind) for kind in kinds] or [rope]:
                check_rope(part)


def _check_numbers(fields: Fields) -> None:
    for key, value in fields.values.items():
        if isinstance(value, float):
            fields.number(key, low=-_LARGEST, high=_LARGEST)
        for pattern, low, high in _RANGES:
            if re.search(pattern, key):
                fields.number(key, None, low, high)
        if _COUNTS.search(key) and fields.values.get("use_sliding_window") is not False:
            fields.integer(key, None, low=1, high=2**31 - 1)  # of 32 bits in the native kernels
        if _ACTIVATION.search(key) and value is not None and not _is_activation(fields.string(key)):
            raise fields.wrong(key, "an activation that Transformers has, such as silu")


def _is_activation(name: str) -> bool:
    if name in ACTIVATIONS:  # without the import, which takes a second
        return True
    from transformers.activations import ACT2FN

    return name in ACT2FN


def check_rope(rope: Fields) -> None:
    """Raise ModelLoadError for a rotation that Transformers does not have, or parameters that none can have."""
    _check_numbers(rope)
    for key in ("rope_type", "type"):
        if key in rope and rope.string(key) not in _ROPE_TYPES:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes a second

            if rope.string(key) not in ROPE_INIT_FUNCTIONS:
                raise rope.wrong(key, f"default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    for key in ("short_factor", "long_factor"):
        if min(rope.list_of(key, float, [1.0])) < _SMALLEST:
            raise rope.wrong(key, "a list of positive numbers")


def read_eos_token_ids(fields: Fields) -> list[int] | None:
    """Return `eos_token_id` as a list; None if it is not set."""
    if isinstance(fields.values.get("eos_token_id"), list):
        return fields.list_of("eos_token_id", int)
    single = fields.integer("eos_token_id", None)
    return None if single is None else [single]


def context_length(config: Any) -> int:
    """Return the number of positions that the model can compute."""
    lengths = (getattr(config, key, None) for key in CONTEXT_KEYS)
    return next((int(length) for length in lengths if length is not None), UNLIMITED)


def token_ids_of(ids: Iterable[int], config: Any) -> frozenset[int]:
    """Return the ids that are tokens of the vocabulary."""
    return frozenset(token_id for token_id in ids if 0 <= token_id < config.vocab_size)
