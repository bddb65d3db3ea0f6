"""The layer that a target's checkpoint carries to predict further tokens (MTP), read as a head.

Transformers drops such layers when it loads a model, so they are read by name. Two ways of naming them are known:
DeepSeek-V3's and GLM's, the layer after the last one (`enorm`, `hnorm`, `eh_proj`, `shared_head.norm`), and that of
Qwen3-Next and Qwen3.5 (`mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.norm`). The block is
supported if it is that of a Llama, perhaps with norms of queries and keys, and with the gated attention and the partial
rotation of its target; mixtures of experts, latent attention and biases are refused by name. Of several such layers the
first drafts, again and again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.heads.config import StoredHead, check_forms, check_values
from forerun.drafters.heads.fingerprint import Fingerprint, sampled_ids, sampled_signs, target_fingerprint
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.models.base import LanguageModel
from forerun.models.fused.families import refusal, spec_of
from forerun.models.fused.spec import DecoderSpec
from forerun.models.loading.find_source import find_source
from forerun.models.loading.weights import TensorSlice
from forerun.utils.foreign_errors import REMEDY

_log = logging.getLogger(__name__)
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_QUERY_NORM = "self_attn.q_norm.weight"
_CLAIMS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_FURTHER = re.compile(r"mtp\.layers\.[1-9]\d*\.")
_MOST_NAMED = 3
"""Names of tensors that a message gives."""


@dataclass(frozen=True, slots=True)
class _Naming:
    """A way of naming an MTP layer's tensors.

    Attributes:
        block: how the names of the decoder layer begin.
        renamed: the further tensors: their name -> ours.
        norm_output: what goes to the next row is behind the last norm.
    """

    block: str
    renamed: Mapping[str, str]
    norm_output: bool


def _namings(num_layers: int) -> tuple[_Naming, ...]:
    after = f"model.layers.{num_layers}."
    return (
        _Naming(
            after,
            {
                f"{after}enorm.weight": "enorm.weight",
                f"{after}hnorm.weight": "hnorm.weight",
                f"{after}eh_proj.weight": "fc.weight",
                f"{after}shared_head.norm.weight": "norm.weight",
                f"{after}shared_head.head.weight": _OUTPUT,
                f"{after}embed_tokens.weight": _EMBEDDING,
            },
            norm_output=False,
        ),
        _Naming(
            "mtp.layers.0.",
            {
                "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
                "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
                "mtp.fc.weight": "fc.weight",
                "mtp.norm.weight": "norm.weight",
                "mtp.embed_tokens.weight": _EMBEDDING,
            },
            norm_output=True,
        ),
    )


@dataclass(frozen=True, slots=True)
class CarriedMtp:
    """The first MTP layer of a checkpoint, which is not read yet.

    Attributes:
        config: its shape, with the target's output layer.
        slices: its tensors by the names of `EagleConfig.tensors`, and its copies of the target's tables.
        norm_offset: what is added to the weights of its norms.
    """

    config: EagleConfig
    slices: Mapping[str, TensorSlice]
    norm_offset: float


def claims_mtp(config: Any) -> bool:
    """Return whether a configuration speaks of MTP layers, or is of a family that has them in silence."""
    return config.model_type == "qwen3_next" or any(getattr(config, key, None) for key in _CLAIMS)


def find_mtp(name: str | Path) -> CarriedMtp:
    """Find the first MTP layer of the checkpoint of a target of this name. Only headers are read.

    Raises:
        ModelLoadError: the checkpoint has none, or claims one that it does not hold, or it is damaged.
        UnsupportedModelError: its form is not supported; names it.
    """
    source = find_source(name)
    config: Any = source.config().get_text_config()
    slices = source.checkpoint(source.config(), torch.float32).slices
    namings = _namings(config.num_hidden_layers)
    naming = next(
        (way for way in namings for each in slices if each in way.renamed or each.startswith(way.block)), None
    )
    if naming is None:
        raise _missing(source.name, config, slices)
    found = _tensors(slices, naming, source.name)
    spec = spec_of(config) if refusal(config) is None else None
    sizes, attention = _sizes(config, found, source.name), _attention(config, spec, found, source.name)
    head = EagleConfig(**sizes, **attention, norm_output=naming.norm_output)
    numbers = "|".join(str(config.num_hidden_layers + number) for number in range(1, 9))
    pattern = re.compile(rf"model\.layers\.({numbers})\.|{_FURTHER.pattern}")
    if later := sorted({match[0] for each in slices if (match := pattern.match(each))}):
        message = "%s has further MTP layers (%s), which are not used: the first drafts again and again."
        _log.info(message, source.name, later)
    return CarriedMtp(head, found, 0.0 if spec is None else spec.norm_offset)


def read_mtp(target: LanguageModel, name: str) -> StoredHead[EagleConfig]:
    """Read the first MTP layer of a target's checkpoint.

    Args:
        name: that the target was loaded by.

    Raises:
        ModelLoadError, UnsupportedModelError: as `find_mtp`.
    """
    carried = find_mtp(name)
    found, head = _shared(dict(carried.slices), carried.config, target, name)
    check_forms(head, found, name, ModelLoadError, REMEDY)
    tensors = {each: found[each][...] for each in head.tensors()}
    if carried.norm_offset:
        tensors |= {each: _wide(norm) + carried.norm_offset for each, norm in tensors.items() if norm.dim() == 1}
    check_values(tensors, name, ModelLoadError, REMEDY)
    return StoredHead(head, tensors, fingerprint=target_fingerprint(target), form="MTP")


def _missing(name: str, config: Any, slices: Mapping[str, TensorSlice]) -> ModelLoadError:
    """Return the error for a checkpoint without a known MTP layer; an unknown form is reported as such."""
    unknown = sorted(each for each in slices if re.search(r"(^|\.)(mtp|nextn|mtp_\w+)\.", each))
    if unknown:
        return UnsupportedModelError(
            f"{name}: its MTP layers ({_named(unknown)}) are of a form that is not known here. Take another drafter."
        )
    for key in _CLAIMS:
        if claimed := getattr(config, key, None):
            return ModelLoadError(
                f"{name}: config.json speaks of {claimed} MTP layers ({key}), and the weights hold none. {REMEDY}"
            )
    return ModelLoadError(
        f"{name} carries no MTP layers. Train one and give its folder (forerun train mtp; mtp:model=FOLDER), or take "
        "another drafter."
    )


def _tensors(slices: Mapping[str, TensorSlice], naming: _Naming, name: str) -> dict[str, TensorSlice]:
    """Return the layer's tensors by the names of `EagleConfig.tensors`, with the copies of the target's tables."""
    known = {f"{part}_proj.weight" for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")}
    known |= {_QUERY_NORM, "self_attn.k_norm.weight"}
    known |= {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    known |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    found, unknown = {}, []
    for each, tensor in slices.items():
        if each in naming.renamed:
            found[naming.renamed[each]] = tensor
        elif each.startswith(naming.block):
            part = each.removeprefix(naming.block)
            if part in known:
                found[f"layers.0.{part}"] = tensor
            elif not part.endswith("rotary_emb.inv_freq"):
                unknown.append(each)
        elif each.startswith("mtp.") and not _FURTHER.match(each):
            unknown.append(each)
    if unknown:
        raise UnsupportedModelError(
            f"{name}: its MTP layer has {_named(sorted(unknown))}, and the block of a Llama is served alone, without "
            "experts, latent attention or biases. Take another drafter."
        )
    return found


def _sizes(config: Any, found: Mapping[str, TensorSlice], name: str) -> dict[str, Any]:
    """Return the layer's sizes, which are the target's except for the width of its feed-forward part."""
    act = getattr(config, "hidden_act", "silu")
    if act != "silu":
        raise UnsupportedModelError(f"{name}: its MTP layer has hidden_act {str(act)[:40]!r}, and silu is served.")
    up = found.get("layers.0.mlp.up_proj.weight")
    if up is None:
        raise ModelLoadError(f"{name}: the MTP layer has no mlp.up_proj.weight. {REMEDY}")
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    return {
        "version": 1,
        "is_mtp": True,
        "vocab_size": int(config.vocab_size),
        "draft_vocab_size": int(config.vocab_size),
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
        "intermediate_size": int(up.get_shape()[0]),
        "layers": (int(config.num_hidden_layers),),
        "rms_norm_eps": float(config.rms_norm_eps),
        "max_positions": int(config.max_position_embeddings),
    }


def _attention(config: Any, spec: DecoderSpec | None, found: Mapping[str, TensorSlice], name: str) -> dict[str, Any]:
    """Return how the layer's attention differs from others, as its target's does. spec: of the target, if it is
    known."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1
    is_known = partial == 1 or (spec is not None and not spec.is_interleaved)
    if kind != "default" or not is_known or any(isinstance(each, Mapping) for each in rope.values()):
        raise UnsupportedModelError(
            f"{name}: its MTP layer rotates by {str(kind)[:40]!r} of a part of {partial}, and plain rotation is served."
        )
    return {
        "rope_theta": float(rope.get("rope_theta", 10_000.0)),
        "attention_gate": spec is not None and "attention_gate" in spec.modules,
        "head_norms": f"layers.0.{_QUERY_NORM}" in found,
        "rotated": None if spec is None or partial == 1 else spec.rotated,
    }


def _wide(numbers: Tensor) -> Tensor:
    return numbers if numbers.dtype == torch.float64 else numbers.float()


def _shared(
    found: dict[str, TensorSlice], head: EagleConfig, target: LanguageModel, name: str
) -> tuple[dict[str, TensorSlice], EagleConfig]:
    """Drop copies of the target's tables. An output layer of its own stays."""

    target_signs = Fingerprint.parse(target_fingerprint(target))
    assert target_signs is not None
    ids, sizes = sampled_ids(head.vocab_size), (head.vocab_size, head.hidden_size)
    embedding = found.pop(_EMBEDDING, None)
    if embedding is not None and Fingerprint(*sizes, embedding=sampled_signs(embedding[...][ids].float())).difference(
        target_signs
    ):
        raise UnsupportedModelError(f"{name}: its MTP layer has embeddings of its own, which are not served.")
    output = found.get(_OUTPUT)
    if output is not None and not Fingerprint(*sizes, output=sampled_signs(output[...][ids].float())).difference(
        target_signs
    ):
        del found[_OUTPUT]
    try:
        return found, replace(head, own_output_rows=_OUTPUT in found)
    except ConfigError as failure:
        raise ModelLoadError(f"{name}: {failure} {REMEDY}") from None


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
