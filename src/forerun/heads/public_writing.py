"""Heads in the public forms: what config.json says and the tensors by name, or why a head cannot be said in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.errors import UnsupportedModelError
from forerun.heads.eagle_config import EagleConfig
from forerun.heads.public_config import LAYER_IDS, SPECULATORS
from forerun.heads.public_parts import OUTPUT, as_stored, speculators_entry, token_tables

_PLAIN_STATES = 3


def check_sayable(config: EagleConfig, d2t: Tensor | None, form: str, num_layers: int, what: str) -> None:
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
    found = [name for name, holds in reasons.items() if holds]
    if found:
        raise UnsupportedModelError(
            f"{what} cannot be written in the form {form!r} of EAGLE-{config.version}, which cannot say: "
            f"{'; '.join(found)}. Train one without: forerun train eagle."
        )


def public_settings(
    config: EagleConfig, form: str, dtype: str, *, target: str, architectures: list[str], num_draft_tokens: int
) -> dict[str, Any]:
    """What config.json says of a head that is sayable.

    Args:
        dtype: of the tensors, such as "float32".
        target: name or folder of the target. architectures: of the target, as its config.json says.
        num_draft_tokens: that the form recommends.
    """
    layer = _layer(config, dtype)
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


def public_tensors(
    config: EagleConfig,
    tensors: Mapping[str, Tensor],
    d2t: Tensor | None,
    form: str,
    output_rows: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The tensors of model.safetensors.

    Args:
        output_rows: [draft_vocab_size, hidden_size] rows of the target's output layer, for a head without its own.
    """
    kept = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if config.version == 3:
        kept.setdefault(OUTPUT, output_rows.to(dtype))
    if form == "speculators":
        kept = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in kept.items()}
    return as_stored(kept | token_tables(d2t, config.vocab_size))


def _layer(config: EagleConfig, dtype: str) -> dict[str, Any]:
    """The Llama configuration."""
    said = {
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
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
    }
    if config.sliding_window is not None:
        said |= {"layer_types": ["sliding_attention"], "sliding_window": config.sliding_window}
    return said
