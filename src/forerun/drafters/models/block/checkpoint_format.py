"""Public block heads: `dflash` and `dspark` of the `speculators` form, as vLLM reads them, read and written; and those
of the authors of DFlash, read.

Their tensors have the names of `BlockConfig.tensors`. What a configuration leaves out of its layers is what
Transformers takes for a Qwen3 layer, since the form writes only what differs. `block_size` counts slots there. The
authors' configuration is that of the layers, with further keys in `dflash_config`; a layer named there is one whose
output is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.config import AUTO
from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.eagle.checkpoint_format import SPECULATORS, rotation_fields, stored_biases, with_rotation
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
from forerun.utils.foreign_errors import REMEDY
from forerun.utils.json_file import Fields

BLOCK_KINDS = ("dflash", "dspark")
LAYER_IDS = "aux_hidden_state_layer_ids"
_OTHER_HEAD = "Give one that has it otherwise, or train one: forerun train block."
_SERVED = (
    ("hidden_act", "silu"),
    ("logit_scale", 1),
    ("partial_rotary_factor", 1),
    ("is_causal", False),
    ("is_neox_style", True),
    ("projector_type", "dflash"),
    ("shift_label", False),
    ("markov_head_type", "vanilla"),
    ("attention_mode", "gqa"),
    ("input_embedding_scale", 1),
    ("output_multiplier", 1),
    ("final_logit_softcapping", 0),
)
"""Keys and the one value that is supported, which is also the default."""
_FULL = "full_attention"
_DFLASH = "DFlashDraftModel"


def is_block(settings: Fields) -> bool:
    """Return whether a config.json describes a block head."""
    return settings.values.get(SPECULATORS) in BLOCK_KINDS or _is_of_authors(settings)


def _is_of_authors(settings: Fields) -> bool:
    return SPECULATORS not in settings.values and "dflash_config" in settings


def block_config_of(settings: Fields, names: Collection[str], *, num_layers: int | None) -> BlockConfig:
    """Return the configuration of a public block head.

    Args:
        names: of its tensors.
        num_layers: of the target; None if that is not known.

    Raises:
        ModelLoadError: a key is missing or wrong.
        UnsupportedModelError: it uses a feature that is not supported.
    """
    if is_of_authors := _is_of_authors(settings):
        layer = settings
        settings = _authors_keys(settings)
    else:
        layer = settings.fields("transformer_layer_config")
    hidden = layer.integer("hidden_size", 4096, low=1)
    vocab = layer.integer("vocab_size", 151936, low=1)
    _refuse_unserved(settings, layer, hidden)
    slots = settings.integer("block_size", low=1)
    from_anchor = settings.flag("sample_from_anchor", False)
    is_dspark = settings.values.get(SPECULATORS) == "dspark"
    layers = settings.list_of(LAYER_IDS, int)
    count = layer.integer("num_hidden_layers", 32, low=1)
    try:
        config = BlockConfig(
            vocab_size=vocab,
            draft_vocab_size=settings.integer("draft_vocab_size", vocab, low=1),
            hidden_size=hidden,
            num_layers=count,
            num_heads=layer.integer("num_attention_heads", 32, low=1),
            num_kv_heads=layer.integer("num_key_value_heads", 32, low=1),
            head_dim=layer.integer("head_dim", 128, low=1),
            intermediate_size=layer.integer("intermediate_size", 22016, low=1),
            layers=fused_layers(settings, [each + is_of_authors for each in layers], num_layers, _OTHER_HEAD),
            block_size=slots if from_anchor else slots - 1,
            sample_from_anchor=from_anchor,
            mask_token_id=settings.integer("mask_token_id", low=0),
            markov_rank=settings.integer("markov_rank", low=0) if is_dspark else 0,
            confidence=is_dspark and settings.flag("enable_confidence_head", True),
            confidence_with_markov=settings.flag("confidence_head_with_markov", True),
            own_output_rows=OUTPUT in names,
            biases=stored_biases(layer, names, [f"layers.{index}" for index in range(count)]),
            **rotation_fields(layer),
            rms_norm_eps=layer.number("rms_norm_eps", 1e-6, low=0),
            max_positions=layer.integer("max_position_embeddings", 32768, low=1),
        )
    except ConfigError as failure:
        raise ModelLoadError(f"{settings.place}: {failure} {REMEDY}") from None
    return with_rotation(config, layer)


def _authors_keys(settings: Fields) -> Fields:
    """Return the keys of the head of a configuration of DFlash's authors by the names of `speculators`.

    Raises:
        UnsupportedModelError: it is of a later kind, whose layers convolve.
    """
    architectures = settings.list_of("architectures", str, [_DFLASH])
    if architectures != [_DFLASH]:
        raise _unserved(settings, f"architectures is {architectures}, and of these heads {_DFLASH} is served")
    own = settings.fields("dflash_config")
    found: dict[str, Any] = {**settings.values, **own.values}
    target = settings.integer("num_target_layers", 0)
    count = settings.integer("num_hidden_layers", low=1)
    span = (target - 4) / max(1, count - 1)  # from layer 1 to the third last
    default = [round(1 + index * span) for index in range(count)] if count > 1 else [target // 2]
    layers = own.list_of("target_layer_ids", int, default)
    return replace(own, values=found | {LAYER_IDS: layers, "target_hidden_size": None})


def _refuse_unserved(settings: Fields, layer: Fields, hidden: int) -> None:
    for fields in (settings, layer):
        refuse_unserved(fields, _SERVED, _OTHER_HEAD)
    kind = layer.string("model_type", "qwen3")
    if kind != "qwen3":
        raise _unserved(layer, f"model_type is {kind[:40]!r}, and block heads are served whose layers are Qwen3's")
    for each in layer.list_of("layer_types", str, None) or [_FULL]:
        if each != _FULL:
            raise _unserved(layer, f"layer_types has {each[:40]!r}, and only {_FULL!r} is served")
    width = settings.integer("target_hidden_size", None)
    if width is not None and width != hidden:
        raise _unserved(settings, f"the head is {hidden} wide and its target {width}")


def _unserved(fields: Fields, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fields.place}: {reason}. {_OTHER_HEAD}")


def check_block_export(
    config: BlockConfig, d2t: Tensor | None, form: str, num_layers: int, num_draft_tokens: int, what: str
) -> None:
    """Refuse a head that has what the form has no words for: it would be read as another one.

    Args:
        form: the requested one. num_layers: of the target. num_draft_tokens: to be recommended.
        what: the head, for messages.

    Raises:
        ConfigError: it is another form, or these are more tokens than the head was trained for.
        UnsupportedModelError: names all that the format cannot represent.
    """
    if form not in (AUTO, "speculators"):
        raise ConfigError(f"form is {form!r}, but a block head has no other form than 'speculators'. Leave it out.")
    if num_draft_tokens > config.block_size:
        raise ConfigError(
            f"num_draft_tokens is {num_draft_tokens}, but {what} was trained on blocks of {config.block_size} tokens. "
            "Ask for no more than these."
        )
    reasons = {
        "a vector that was learnt for the mask (train with the key mask_token)": config.mask_token_id is None,
        "tokens in the context (train without the key context_tokens)": config.context_tokens,
        "a Markov bias of the target's embeddings (train without the key markov_shared)": config.markov_shared,
        "norms of states (train with the key plain_states)": config.norm_before_fc,
        "sliding_window (train with the key sliding_window at 0)": config.sliding_window is not None,
        f"the state after the target's final norm (layer {num_layers}; train with the key layers)": (
            config.layers[-1] >= num_layers
        ),
        "a confidence without a Markov bias": config.confidence and not config.markov_rank,
        "biases": bool(config.biases),
        "an order of the output tokens that is not the target's": (
            config.draft_vocab_size == config.vocab_size and d2t is not None
        ),
    }
    refuse_features(reasons, f"{what} cannot be written in the form 'speculators' of block heads")


def block_settings(
    config: BlockConfig, dtype: str, *, target: str, architectures: list[str], num_draft_tokens: int
) -> dict[str, Any]:
    """Return config.json of a head that the format can represent.

    Args:
        dtype: of the tensors, such as "float32".
        target: name or folder of the target. architectures: of the target, as its config.json says.
        num_draft_tokens: that the form recommends.
    """
    kind = "dspark" if config.markov_rank else "dflash"
    dspark = {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    return {
        "architectures": ["DSparkSpeculator" if config.markov_rank else "DFlashSpeculator"],
        SPECULATORS: kind,
        "dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "block_size": config.num_slots,
        "sample_from_anchor": config.sample_from_anchor,
        LAYER_IDS: list(config.layers),
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": True,  # false would be taken for all layers, full ones too
        **(dspark if config.markov_rank else {}),
        "transformer_layer_config": _layer(config, dtype),
        "speculators_config": speculators_entry(
            kind, target=target, architectures=architectures, num_draft_tokens=num_draft_tokens
        ),
    }


def _layer(config: BlockConfig, dtype: str) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": head_rope_parameters(config),
        "max_position_embeddings": config.max_positions,
        "layer_types": [_FULL] * config.num_layers,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


def block_tensors(
    config: BlockConfig, tensors: Mapping[str, Tensor], d2t: Tensor | None, output_rows: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors.

    Args:
        output_rows: [draft_vocab_size, hidden_size] rows of the target's output layer, for a head without its own.
    """
    kept = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    kept.setdefault(OUTPUT, output_rows.to(dtype))
    return as_stored(kept | token_tables(d2t, config.vocab_size))
