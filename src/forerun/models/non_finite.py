"""Finds the weights that hold NaN or infinity, after a model has computed numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from forerun.models.base import LanguageModel, StandIn
from forerun.models.fused.decoder import FusedDecoder, Norm
from forerun.models.general import GeneralDecoder
from forerun.models.model import Model
from forerun.models.spec.recurrence import IN_PROJ


@runtime_checkable
class NamedTensors(Protocol):
    """A decoder that lists the numbers it has packed."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by the names of Transformers' parameters, or by several of them that are packed as one."""


def first_non_finite_tensor(model: LanguageModel) -> str | None:
    """Return the name, as in the checkpoint, of the first weight tensor with an entry that is NaN or infinite.

    None: every entry is finite, or the model is of a kind whose weights cannot be looked at. The fused decoder
    keeps some tensors side by side; they are named together. All weights are read: a second for a model of a few
    gigabytes.
    """
    if isinstance(model, StandIn):
        return first_non_finite_tensor(model.model)
    if not isinstance(model, Model):
        return None
    return next((name for name, tensor in _named_tensors(model.decoder) if not _is_finite(tensor)), None)


def has_finite_rows(logits: Tensor) -> bool:
    """Return whether every row, [R, V], has a largest entry that is finite: -inf beside it is how tokens are masked."""
    return bool(torch.isfinite(logits.amax(-1)).all())


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # both ends are NaN where one entry is: a tenth of the time of a flag for each entry
    return bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def _named_tensors(decoder: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(decoder, FusedDecoder):
        yield from _of_fused(decoder)
    elif isinstance(decoder, NamedTensors):
        yield from decoder.named_tensors()
    elif isinstance(decoder, GeneralDecoder):
        yield from _of_module(decoder.model)


def _of_fused(decoder: FusedDecoder) -> Iterator[tuple[str, Tensor]]:
    spec = decoder.spec
    # if quantized, it is finite
    parts: list[tuple[str, object]] = [(spec.embedding_weight, decoder.embedding)]
    parts.append((f"{spec.base}.{spec.embeddings.positions}.weight", decoder.positions))
    parts += decoder.per_layer_parts.items()
    for index, layer in enumerate(decoder.layers):
        own = layer.spec
        path = spec.layer_path(index)
        parts.append((f"{path}.{own.scalar}", layer.scale))
        parts.append((f"{path}.{getattr(own.feed_forward, 'xielu', None)}", layer.xielu))
        if layer.recurrence is not None:
            numbers = layer.recurrence.numbers
            parts += [(f"{path}.{name}", each) for name, each in numbers.items()]
        if layer.latent is not None:
            heads = nn.ModuleList(each for both in layer.latent.heads for each in both if isinstance(each, nn.Module))
            parts.append((f"{path}.{layer.latent.kv_b_proj}", heads))
        shared = {"gate": "gate and up"} | ({"query": "query, key and value"} if layer.latent is None else {})
        shared |= {IN_PROJ[0]: "query, key and value"} if IN_PROJ[1] in own.roles else {}
        for role, each in (layer.norms | layer.linears).items():
            module = own.module(role)
            name = f"{module} ({shared[role]})" if role in shared else module
            parts.append((f"{path}.{name}", each))
    for name, part in [
        *parts,
        (f"{spec.base}.{spec.output.norm}", decoder.norm),
        (spec.output.module, decoder.lm_head),
    ]:
        if isinstance(part, Norm):
            yield f"{name}.weight", part.weight
            if part.bias is not None:
                yield f"{name}.bias", part.bias
        elif isinstance(part, Tensor):
            yield name, part
        elif isinstance(part, nn.Module):
            yield from _of_module(part, name + ".")


def _of_module(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and the tensors that packed layers keep as plain attributes, in the modules' order."""
    for path, part in module.named_modules(prefix=prefix.removesuffix(".")):
        tensors = {**vars(part), **part._parameters, **part._buffers}
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                yield (f"{path}.{name}" if path else name), tensor
