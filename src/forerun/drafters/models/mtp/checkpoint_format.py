"""The layer that a target's checkpoint carries to predict further tokens (MTP), read as a head.

Transformers drops such layers when it loads a model, so they are read by name. Three ways of naming them are known:
that of DeepSeek-V3 and GLM, the layer after the last one (`enorm`, `hnorm`, `eh_proj`, `shared_head.norm`); that of
Qwen3-Next and Qwen3.5 (`mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.norm`); and that of MiMo
(`model.mtp_layers`). The block is one of the target's own layers with attention, of any family of the fused decoder:
with its experts, latents, gates and rotation. Of several such layers the first drafts, again and again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.heads.config import StoredHead, check_finite, check_forms
from forerun.drafters.models.heads.fingerprint import Fingerprint, sampled_ids, sampled_signs, target_fingerprint
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.models.base import LanguageModel
from forerun.models.families.table import description_of
from forerun.models.loading.configuration import context_length
from forerun.models.loading.fused_modules import by_parameter, layer_modules
from forerun.models.loading.source import find_source
from forerun.models.loading.weights import TensorSlice
from forerun.models.spec.decoder import DecoderSpec, Embeddings
from forerun.models.spec.feed_forward import LLAMA_FEED, AnyFeedForward, FeedForward
from forerun.utils.foreign_errors import REMEDY

_log = logging.getLogger(__name__)
_EMBEDDING = "embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_CLAIMS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_FURTHER = re.compile(r"(mtp\.layers|model\.mtp_layers)\.[1-9]\d*\.")
_MOST_NAMED = 3
"""Names of tensors that a message gives."""


@dataclass(frozen=True, slots=True)
class _Naming:
    """A way of naming an MTP layer's tensors.

    Attributes:
        block: how the names of the decoder layer begin.
        renamed: the further tensors: their name -> ours.
        norm_output: what goes to the next row is behind the last norm.
        state_first: the projection reads the state before the embedding.
    """

    block: str
    renamed: Mapping[str, str]
    norm_output: bool
    state_first: bool = False


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
        _Naming(
            mimo := "model.mtp_layers.0.",
            {
                f"{mimo}token_layernorm.weight": "enorm.weight",
                f"{mimo}hidden_layernorm.weight": "hnorm.weight",
                f"{mimo}input_proj.weight": "fc.weight",
                f"{mimo}final_layernorm.weight": "norm.weight",
            },
            norm_output=True,
            state_first=True,
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class CarriedConfig(EagleConfig):
    """The configuration of an MTP layer that is one of its target's.

    Attributes:
        decoder: the layer alone, as a decoder.
        target: the target's configuration, of which rotations are computed.
    """

    decoder: DecoderSpec | None = None
    target: Any = None

    @property
    def spec(self) -> DecoderSpec:
        """Return the layer as a decoder."""
        assert self.decoder is not None
        return self.decoder

    @property
    def rope_config(self) -> Any:
        """Return the configuration that Transformers computes its rotation of."""
        return self.target

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor by name with its shape, experts apart."""
        wide = self.hidden_size
        names = [f"{name}.weight" for name in (*self.entry_norms, "norm")]
        found = {"fc.weight": (wide, 2 * wide), **dict.fromkeys(names, (wide,))}
        with torch.device("meta"):
            layer = layer_modules(self.spec, self.spec.layers[0])
        found |= {f"layers.0.{name}": tuple(each.shape) for name, each in layer.named_parameters()}
        return found | ({_OUTPUT: (self.vocab_size, wide)} if self.own_output_rows else {})


@dataclass(frozen=True, slots=True)
class CarriedMtp:
    """The first MTP layer of a checkpoint, which is not read yet.

    Attributes:
        config: its shape, with the target's output layer.
        slices: its tensors by the names of `CarriedConfig.tensors`, and its copies of the target's tables.
        state_first: the projection reads the state before the embedding.
    """

    config: CarriedConfig
    slices: Mapping[str, TensorSlice]
    state_first: bool


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
    description = description_of(config)
    spec = description.served
    slices = source.checkpoint(source.config(), torch.float32, spec).slices
    namings = _namings(config.num_hidden_layers)
    naming = next(
        (way for way in namings for each in slices if each in way.renamed or each.startswith(way.block)), None
    )
    if naming is None:
        raise _missing(source.name, config, slices)
    if spec is None:
        raise UnsupportedModelError(
            f"{source.name}: its MTP layer is one of a model that the fused decoder does not compute: "
            f"{description.refusal}. Take another drafter."
        )
    found = _tensors(slices, naming, spec)
    head = _config(config, spec, found, naming)
    if unknown := sorted(found.keys() - head.tensors().keys() - {_EMBEDDING, _OUTPUT}):
        raise UnsupportedModelError(
            f"{source.name}: its MTP layer has {_named(unknown)}, which no layer of the target has: one like these is "
            "served. Take another drafter."
        )
    numbers = "|".join(str(config.num_hidden_layers + number) for number in range(1, 9))
    pattern = re.compile(rf"model\.layers\.({numbers})\.|{_FURTHER.pattern}")
    if later := sorted({match[0] for each in slices if (match := pattern.match(each))}):
        message = "%s has further MTP layers (%s), which are not used: the first drafts again and again."
        _log.info(message, source.name, later)
    return CarriedMtp(head, found, naming.state_first)


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
    for each in head.entry_norms:  # the decoder adds it to its own
        norm = tensors[f"{each}.weight"]
        tensors[f"{each}.weight"] = norm.to(torch.promote_types(norm.dtype, torch.float32)) + head.spec.norms.offset
    if carried.state_first:
        tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, 1)[::-1], 1)
    check_finite(tensors, name, ModelLoadError, REMEDY)
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


def _tensors(slices: Mapping[str, TensorSlice], naming: _Naming, spec: DecoderSpec) -> dict[str, TensorSlice]:
    """Return the layer's tensors by the names of `CarriedConfig.tensors`, with the copies of the target's tables; what
    is unknown by its own name. spec: of the target."""
    found = {}
    block = dict[str, TensorSlice]()
    layer = f"{spec.base}.{spec.layer_list}.0."
    for each, tensor in slices.items():
        part = each.removeprefix(naming.block)
        if each in naming.renamed:
            found[naming.renamed[each]] = tensor
        elif part != each and not part.endswith("rotary_emb.inv_freq"):
            block[layer + part] = tensor
        elif each.startswith("mtp.") and not _FURTHER.match(each):
            found[each] = tensor
    return found | {f"layers.0.{each.removeprefix(layer)}": one for each, one in by_parameter(spec, block).items()}


def _config(config: Any, spec: DecoderSpec, found: Mapping[str, TensorSlice], naming: _Naming) -> CarriedConfig:
    """Return the configuration of the layer, which is like the target's last one with attention, but for the kind and
    the width of its feed-forward part."""
    own = next((layer for layer in reversed(spec.layers) if layer.attention is not None), spec.layers[-1])
    attention = own.attention or spec.attention
    assert attention is not None
    feed_forward = _feed_forward(spec, found)
    decoder = replace(
        spec,
        layers=(replace(own, feed_forward=feed_forward),),
        embeddings=Embeddings(),
        output=replace(spec.output, norm="norm", module="lm_head"),
        base="model",
        layer_list="layers",
    )
    return CarriedConfig(
        version=1,
        is_mtp=True,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        hidden_size=spec.hidden,
        target_hidden_size=spec.hidden,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate_size=getattr(feed_forward, "intermediate_size", None)
        or getattr(config, "intermediate_size", None)
        or 1,
        layers=(len(spec.layers),),
        rms_norm_eps=spec.norms.eps,
        max_positions=context_length(config),
        norm_output=naming.norm_output,
        decoder=decoder,
        target=config,
    )


def _feed_forward(spec: DecoderSpec, found: Mapping[str, TensorSlice]) -> AnyFeedForward:
    """Return the feed-forward layer: the target's experts where the layer has a router, else a dense one as wide as it
    is stored."""
    if spec.experts is not None and f"layers.0.{spec.experts.router}.weight" in found:
        return spec.experts
    feeds = [layer.feed_forward for layer in spec.layers]
    dense = next((feed for feed in feeds if isinstance(feed, FeedForward)), None)
    if dense is None:
        activation = next((feed.activation for feed in feeds if feed is not None), "silu")
        dense = FeedForward(intermediate_size=1, activation=activation, modules=LLAMA_FEED)
    up = found.get(f"layers.0.{dense.modules['up']}.weight")
    return dense if up is None else replace(dense, intermediate_size=up.get_shape()[0] // len(dense.sharing("up")))


def _shared(
    found: dict[str, TensorSlice], head: CarriedConfig, target: LanguageModel, name: str
) -> tuple[dict[str, TensorSlice], CarriedConfig]:
    """Drop copies of the target's tables. An output layer of its own stays."""

    target_signs = Fingerprint.parse(target_fingerprint(target))
    assert target_signs is not None
    ids = sampled_ids(head.vocab_size)
    sizes = (head.vocab_size, head.hidden_size)
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
