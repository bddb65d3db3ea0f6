"""Public formats of EAGLE heads, read and written.

EAGLE-1 and EAGLE-3 heads have a Llama configuration with further keys; the `speculators` form has it as
`transformer_layer_config`, the further keys beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.heads.config import (
    OUTPUT,
    as_stored,
    fused_layers,
    head_rope_parameters,
    refuse_features,
    refuse_unserved,
    speculators_entry,
    token_tables,
)
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.models.families.table import frequencies
from forerun.models.loading.configuration import check_rope
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import Fields

if TYPE_CHECKING:
    from forerun.drafters.models.block.config import BlockConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = "speculators_model_type"
_PLAIN_STATES = 3
_OTHER_HEAD = "Give one that has it otherwise, or train one: forerun train eagle."
_LAYERS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are those of Llama, but for biases and norms of queries and keys."""
_SERVED = (
    ("hidden_act", "silu"),
    ("logit_scale", 1),
    ("partial_rotary_factor", 1),
    ("is_causal", True),
    ("parallel_drafting", False),
)
"""Keys and the one value that is supported, which is also the default."""


def eagle_config_of(settings: Fields, names: Collection[str], *, version: int, num_layers: int | None) -> EagleConfig:
    """Return the configuration of a public EAGLE head.

    Args:
        names: of its tensors, as `EagleConfig.tensors` has them.
        version: 1 or 3, by these.
        num_layers: of the target; None if that is not known.

    Raises:
        ModelLoadError: a key is missing or wrong.
        UnsupportedModelError: it uses a feature that is not supported, or cannot be read without `num_layers`.
    """
    layer = _layer(settings)
    for fields in (settings, layer):
        _refuse_unserved(fields)
    hidden = layer.integer("hidden_size", low=1)
    vocab = layer.integer("vocab_size", low=1)
    heads = layer.integer("num_attention_heads", low=1)
    flags = _flags(settings) if version == 3 else {}
    count = layer.integer("num_hidden_layers", 1, low=1)
    first = "layers.0" if version == 1 else "midlayer"
    further = [f"layers.{index}" for index in range(1, count)]
    if version == 1 and settings.flag("bias", False):
        names = {*names, "fc.bias"}
    try:
        config = EagleConfig(
            version=version,
            vocab_size=vocab,
            draft_vocab_size=settings.integer("draft_vocab_size", vocab, low=1) if version == 3 else vocab,
            hidden_size=hidden,
            target_hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=layer.integer("num_key_value_heads", heads, low=1),
            head_dim=layer.integer("head_dim", hidden // heads, low=1),
            intermediate_size=layer.integer("intermediate_size", low=1),
            layers=_layers(settings, num_layers) if version == 3 else (_needed(settings, num_layers),),
            own_output_rows=OUTPUT in names,
            sliding_window=_window(layer),
            head_norms=f"{first}.self_attn.q_norm.weight" in names or layer.string("model_type", "") == "qwen3",
            num_layers=count,
            biases=stored_biases(layer, names, [first, *further]),
            **rotation_fields(layer),
            rms_norm_eps=layer.number("rms_norm_eps", 1e-6, low=0),
            max_positions=layer.integer("max_position_embeddings", 2048, low=1),
            **flags,
        )
    except ConfigError as failure:
        raise ModelLoadError(f"{settings.place}: {failure} {REMEDY}") from None
    return with_rotation(config, layer)


def _layer(settings: Fields) -> Fields:
    """Return the configuration of the head's layer."""
    if SPECULATORS not in settings.values:
        layer = settings
    else:
        kind = settings.string(SPECULATORS)
        if kind != "eagle3":
            raise UnsupportedModelError(
                f"{settings.place}: {SPECULATORS} is {kind[:40]!r}, and of these heads only 'eagle3' is served. "
                f"{_OTHER_HEAD}"
            )
        layer = settings.fields("transformer_layer_config")
    kind = layer.string("model_type", "llama")
    if kind not in _LAYERS:
        raise UnsupportedModelError(
            f"{layer.place}: model_type is {kind[:40]!r}, and EAGLE heads are served whose layers are those of "
            f"{', '.join(_LAYERS)}. {_OTHER_HEAD}"
        )
    return layer


def _refuse_unserved(fields: Fields) -> None:
    refuse_unserved(fields, _SERVED, _OTHER_HEAD)
    eagle: Fields | None = fields.fields("eagle_config", None)
    if eagle is not None:
        _refuse_unserved(eagle)
        if not eagle.flag("use_aux_hidden_state", True):
            raise UnsupportedModelError(
                f"{eagle.place}: use_aux_hidden_state is false, and EAGLE-3 heads that fuse no states are not served. "
                f"{_OTHER_HEAD}"
            )
    width = fields.integer("target_hidden_size", None)
    if width is not None and width != fields.values.get("hidden_size", width):
        raise UnsupportedModelError(
            f"{fields.place}: the head is {fields.values['hidden_size']} wide and its target {width}, so that it needs "
            f"embeddings of its own, which are not served. {_OTHER_HEAD}"
        )


def _flags(settings: Fields) -> dict[str, Any]:
    default = () if SPECULATORS in settings.values else (False,)  # programs differ in the default of `speculators`
    eagle: Fields | None = settings.fields("eagle_config", None)
    return {
        "norm_before_fc": settings.flag("fc_norm", False),
        "norm_all_before_fc": any(each.flag("norm_before_fc", False) for each in (settings, eagle) if each is not None),
        "norm_before_residual": settings.flag("norm_before_residual", *default),
        "norm_output": settings.flag("norm_output", False),
    }


def _layers(settings: Fields, num_layers: int | None) -> tuple[int, ...]:
    """Return the layers whose inputs are fused. Where none are named they are EAGLE's: 2, L // 2, L - 3.

    Programs fuse a layer once that these name twice, as they do of a target of six layers.
    """
    eagle: Fields | None = settings.fields("eagle_config", None)
    found = settings.list_of(LAYER_IDS, int, None) or (eagle or settings).list_of(LAYER_IDS, int, None)
    if not found:
        count = _needed(settings, num_layers)
        found = sorted({2, count // 2, count - 3})
    return fused_layers(settings, found, num_layers, _OTHER_HEAD)


def _needed(settings: Fields, num_layers: int | None) -> int:
    if num_layers is None:
        raise ModelLoadError(
            f"{settings.place}: which states of its target the head reads depends on the target's number of layers. "
            "Give the target too (--model)."
        )
    return num_layers


def _window(layer: Fields) -> int | None:
    """Return the number of rows that a row attends to; None for all. As in Transformers, `layer_types` decides."""
    kinds: list[str] | None = layer.list_of("layer_types", str, None)
    if not kinds:
        return None
    if len(kinds) > 1 or kinds[0] not in ("full_attention", "sliding_attention"):
        raise layer.wrong("layer_types", "['full_attention'] or ['sliding_attention']")
    return layer.integer("sliding_window", low=1) if kinds[0] == "sliding_attention" else None


def rotation_fields(layer: Fields) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` of a published head. Raises ModelLoadError: there is no such rotation."""
    theta = layer.number("rope_theta", 10_000.0, low=1)
    found: list[Fields | None] = [layer.fields(key, None) for key in ("rope_parameters", "rope_scaling")]
    rope = next((each for each in found if each is not None), None)
    if rope is None:
        return {"rope_theta": theta}
    check_rope(rope)
    kind = rope.string("rope_type", None) or rope.string("type", None) or "default"
    theta = rope.number("rope_theta", theta, low=1)
    if kind in _PLAIN:
        return {"rope_theta": theta}
    lengths = (layer.integer(key, 0) for key in ("original_max_position_embeddings", "max_position_embeddings"))
    kept = {key: value for key, value in rope.values.items() if key not in ("type", "rope_theta")}
    kept = (
        {"original_max_position_embeddings": next(filter(None, lengths), 0)}
        | kept
        | {"rope_type": _FORMER.get(kind, kind)}
    )
    return {"rope_theta": theta, "rope_scaling": kept}


_PLAIN, _FORMER = ("default", "mrope"), {"su": "longrope"}
"""Rotations that are plain for text, and former names."""
_Config = TypeVar("_Config", bound="EagleConfig | BlockConfig")


def with_rotation(config: _Config, layer: Fields) -> _Config:
    """Return a configuration whose rotation can be computed. Raises ModelLoadError: a parameter is missing or wrong."""
    kind = config.rope_scaling.get("rope_type", "default")
    what = f"{layer.place}: the rotation {kind}"
    with as_load_errors(f"{what} cannot be computed of its parameters", REMEDY):
        try:
            frequencies(config.rope_config, config.spec)
        except KeyError as missing:
            raise ModelLoadError(f"{what} has no {missing.args[0]!r} among its parameters. {REMEDY}") from None
    return config


def stored_biases(layer: Fields, names: Collection[str], prefixes: Collection[str]) -> tuple[str, ...]:
    """Return the matrices with a bias: those of which there is one, those that the configuration says have one, and
    those that are multiplied together with such a one.

    prefixes: of the names of the head's layers.
    """
    found = {name.removesuffix(".bias") for name in names if name.endswith(".bias")} - {"confidence_head.proj"}
    for key, parts in _BIASED.items():
        for prefix in prefixes:
            together = {f"{prefix}.{part}_proj" for part in parts}
            found |= together if layer.flag(key, False) or found & together else set()
    return tuple(sorted(found))


_BIASED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("attention_bias", "qkv_bias"), ("self_attn.q", "self_attn.k", "self_attn.v")),
    "mlp_bias": ("mlp.gate", "mlp.up"),
}


# Writing.


def check_eagle_export(config: EagleConfig, d2t: Tensor | None, form: str, num_layers: int, what: str) -> None:
    """Refuse a head that has what a form has no words for: it would be read as another one.

    Args:
        form: one of `HEAD_FORMS`. num_layers: of the target. what: the head, for messages.

    Raises:
        UnsupportedModelError: names all of it.
    """
    whole = config.draft_vocab_size == config.vocab_size
    common = {
        "an MTP layer, which lies in its target's folder": config.is_mtp,
        "embedding_residual": config.embedding_residual,
        f"a width of {config.hidden_size:,} for a target of {config.target_hidden_size:,}": (
            config.hidden_size != config.target_hidden_size
        ),
        "an order of the output tokens that is not the target's": whole and d2t is not None,
        **{part: has for part, has in config.further_parts.items() if not part.startswith("rotation")},
    }
    common[f"form {form}, which has no EAGLE"] = form not in ("eagle", "speculators")
    if config.version == 1:
        reasons = common | {
            f"layers {list(config.layers)} in place of {[num_layers]}": config.layers != (num_layers,),
            "sliding_window": config.sliding_window is not None,
            "a draft vocabulary (draft_vocab_size)": not whole,
            "own_output_rows": config.own_output_rows,
            "norms of states or output": config.norm_before_fc or config.norm_before_residual or config.norm_output,
            "form speculators, which has no EAGLE-1": form == "speculators",
        }
    else:
        reasons = common | {
            f"the state after the target's final norm (layer {num_layers})": config.layers[-1] >= num_layers,
            f"{len(config.layers)} states in place of {_PLAIN_STATES}": (
                form == "speculators" and len(config.layers) != _PLAIN_STATES
            ),
        }
    refuse_features(
        reasons,
        f"{what} cannot be written in the form {form!r} of EAGLE-{config.version}",
        "Train one without: forerun train eagle.",
    )


def eagle_settings(
    config: EagleConfig, form: str, dtype: str, *, target: str, architectures: list[str], num_draft_tokens: int
) -> dict[str, Any]:
    """Return config.json of a head that the format can represent.

    Args:
        dtype: of the tensors, such as "float32".
        target: name or folder of the target. architectures: of the target, as its config.json says.
        num_draft_tokens: that the form recommends.
    """
    layer = _llama_settings(config, dtype)
    if config.version == 1:
        return {"architectures": ["LlamaForCausalLM"], **layer}
    flags = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.norm_before_fc,
        "norm_output": config.norm_output,
        LAYER_IDS: list(config.layers),
    }
    if form == "eagle":
        count = {} if len(config.layers) == _PLAIN_STATES else {"num_aux_hidden_states": len(config.layers)}
        return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **flags, **count}
    return {
        "architectures": ["Eagle3Speculator"],
        SPECULATORS: "eagle3",
        "dtype": dtype,
        **flags,
        "transformer_layer_config": layer,
        "speculators_config": speculators_entry(
            "eagle3", target=target, architectures=architectures, num_draft_tokens=num_draft_tokens
        ),
    }


def eagle_tensors(
    config: EagleConfig,
    tensors: Mapping[str, Tensor],
    d2t: Tensor | None,
    form: str,
    output_rows: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors.

    Args:
        output_rows: [draft_vocab_size, hidden_size] rows of the target's output layer, for a head without its own.
    """
    kept = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if config.version == 3:
        kept.setdefault(OUTPUT, output_rows.to(dtype))
    if form == "speculators":
        kept = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in kept.items()}
    return as_stored(kept | token_tables(d2t, config.vocab_size))


def _llama_settings(config: EagleConfig, dtype: str) -> dict[str, Any]:
    """Return the Llama configuration of the head's layer."""
    llama = {
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": head_rope_parameters(config),
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
    }
    if config.sliding_window is not None:
        llama |= {"layer_types": ["sliding_attention"], "sliding_window": config.sliding_window}
    return llama
