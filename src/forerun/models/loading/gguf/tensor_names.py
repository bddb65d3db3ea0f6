"""Gives the tensors of a GGUF file Transformers' names, with rows in Transformers' order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.fused.experts import stacked
from forerun.models.loading.gguf.architecture import NEXT_TOKENS
from forerun.models.loading.gguf.architectures import ARCHITECTURES
from forerun.models.loading.gguf.configuration import HEAD, architecture_of
from forerun.models.loading.gguf.expert_tensors import ExpertTensors, Stack
from forerun.models.loading.gguf.file import PLAIN_TYPES, REMEDY, GgufFile, GgufTensor, brief
from forerun.models.loading.gguf.recurrent_architectures import RECURRENT_ARCHITECTURES
from forerun.models.loading.gguf.recurrent_tensors import RecurrentTensors, shaped
from forerun.models.spec.attention import AnyAttention, Attention, LatentAttention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import LLAMA_FEED, SHARED
from forerun.models.spec.recurrence import Recurrence

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.")
_COMPUTED = re.compile(r"rope_(freqs|factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that are no weights: they belong to the rotary embedding, and older converters wrote its tables too."""
_ROLES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
"""Names of tensors by role, as all architectures with recurrent layers have them."""
_FUSED = ("blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias")


def _is_shared(role: str, module: str) -> bool:
    """Return whether a role is of an expert that every row is given to, and whose module is no ordinary one."""
    return role in SHARED and module != LLAMA_FEED[role.removeprefix("shared_")]


def _of_first(parameter: str) -> str:
    """Return the name of the parameter of layer 0 that is one of any layer."""
    return re.sub(r"\d+", "0", parameter, count=1)


def _modules(spec: DecoderSpec) -> dict[str, str]:
    """Return the modules of a layer by role, of all layers together, but for those of recurrences."""
    found = dict[str, str]()
    for layer in spec.layers:
        found |= layer.norms
        for part in layer.parts:
            found |= {} if isinstance(part, Recurrence) else part.modules
    return found


def _parameters(
    names: Any, spec: DecoderSpec, layer: str, own: Iterable[str], *, is_hybrid: bool
) -> dict[str, tuple[str, int]]:
    """Return the parameters of what is not recurrent by the names of their tensors, each with the tensor's place among
    those that are one parameter.

    Args:
        names: of `name_map`. layer: the path of layer 0, with a dot behind it. own: modules outside of layers.
        is_hybrid: of an architecture with recurrent layers.
    """
    found = dict[str, tuple[str, int]]()
    kinds = (".weight", ".bias")
    modules = _modules(spec)
    paths = [*own, *(layer + each for role, each in modules.items() if not _is_shared(role, each))]
    attention = spec.attention
    if isinstance(attention, LatentAttention):
        paths.append(layer + attention.kv_b_proj)
    for path in paths:
        found |= {name: (path + kind, 0) for kind in kinds if (name := names.get_name(path + kind, kinds)) is not None}
    for role, name in _ROLES.items() if is_hybrid else ():
        if role in modules:
            place = [each for each in _ROLES if modules.get(each) == modules[role]].index(role)
            found |= {f"blk.0.{name}{kind}": (f"{layer}{modules[role]}{kind}", place) for kind in kinds}
    if spec.layers[0].scalar is not None:
        found["blk.0.layer_output_scale.weight"] = layer + spec.layers[0].scalar, 0
    if isinstance(attention, Attention) and attention.sinks is not None:
        found["blk.0.attn_sinks.weight"] = layer + attention.sinks, 0
    return found


def _heads(own: AnyAttention | None) -> dict[str, int]:
    """Return the heads by the modules whose rows converters permute."""
    return {} if own is None else {"q_proj": own.num_heads, "k_proj": own.num_kv_heads}


def _halves(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Return what newer files have in place of the weight that makes keys and values of latents: the names of a tensor
    for keys and one for values, each with the shape of its part of that weight."""
    own = spec.attention
    if not isinstance(own, LatentAttention):
        return {}
    sizes = {"attn_k_b": own.head_dim - own.rotated, "attn_v_b": own.v_head_dim}
    return {f"blk.0.{name}.weight": (own.num_heads * size, own.kv_lora_rank) for name, size in sizes.items()}


def name_map(architecture: str, num_layers: int) -> Any:
    """Return the gguf package's map from Transformers' names of modules to those of an architecture."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    return get_tensor_name_map(
        next(kind for kind in MODEL_ARCH_NAMES if MODEL_ARCH_NAMES[kind] == architecture), num_layers
    )


class PackedWeights(Mapping[str, GgufTensor]):
    """The packed tensors by the names of Transformers' parameters. A tied output layer has its name too.

    Rows that the converter has permuted are brought back into Transformers' order: their packed rows are copied for
    that, all others lie in the file. So are value heads of recurrent layers, and the columns of the product behind
    them, which are numbers then, unless the configuration says that heads are tiled (`recurrent_families.TILED`). Norms
    to whose weights Transformers adds a number have it in the file, and it is taken out; of rates of decay Transformers
    has the logarithm. Experts are parameters apart, each a view of the file's tensor of all. What makes keys and values
    of latents is one parameter of numbers where the file has one tensor for keys and one for values.

    Raises:
        UnsupportedModelError: a tensor has no place in such a model.
    """

    def __init__(self, file: GgufFile, spec: DecoderSpec) -> None:
        name = architecture_of(file)
        self._decoder = spec
        architecture = ARCHITECTURES[name]
        self.head = spec.head_weight
        attention = spec.attention
        layer = f"{spec.layer_path(0)}."
        self._heads = _heads(attention) if architecture.is_permuted else {}
        own = [f"{spec.base}.{spec.embeddings.module}", f"{spec.base}.{spec.output.norm}", spec.output.module]
        if (inputs := spec.embeddings.per_layer) is not None:
            own += [f"{spec.base}.{each}" for each in (inputs.table, inputs.product, inputs.norm)]
        self._norms = {layer + each.module(role) for each in spec.layers for role in each.all_norms} | {own[1]}
        self._recurrence = RecurrentTensors.of(spec.recurrence, layer, is_tiled=architecture.heads_are_tiled)
        self._experts = ExpertTensors.of(spec, layer)
        shapes = {**self._recurrence.shapes, **self._experts.shapes}
        halves = _halves(spec)
        self._kv_b_proj = f"{layer}{attention.kv_b_proj}.weight" if isinstance(attention, LatentAttention) else ""
        names = name_map(name, 1)  # what a file says of its number of layers decides nothing here
        attending = {
            **_parameters(names, spec, layer, own, is_hybrid=name in RECURRENT_ARCHITECTURES),
            **self._experts.names,
        }
        attending |= {each: (self._kv_b_proj, place) for place, each in enumerate(halves)}
        recurrent = {**attending, **self._recurrence.names}
        self._tensors: dict[str, dict[int, GgufTensor]] = {}
        unread = spec.unread
        for tensor in (each for each in file.tensors.values() if not _COMPUTED.fullmatch(each.name)):
            found = _LAYER.match(tensor.name)
            index = -1 if found is None else int(found[1])
            if index >= len(spec.layers) and NEXT_TOKENS in architecture.reads:
                continue  # it predicts further tokens
            is_recurrent = 0 <= index < len(spec.layers) and spec.layers[index].recurrence is not None
            theirs = _LAYER.sub("blk.0.", tensor.name)
            parameter, place = (recurrent if is_recurrent else attending).get(theirs, ("", 0))
            placed = {parameter: tensor} if parameter else self._taken_apart(theirs, tensor)
            placed = placed or dict(self._experts.apart(spec, theirs, tensor, str(file.path)))
            if not placed:
                raise UnsupportedModelError(
                    f"{file.path}: the tensor {brief(tensor.name)} has no place in a model of the architecture "
                    f"{name} as forerun supports it. Serve it with llama.cpp."
                )
            for parameter, part in placed.items():
                if (whole := parameter.replace("0", str(index), 1)) in unread:
                    continue
                parts = self._tensors.setdefault(whole, {})
                if place in parts:
                    raise ModelLoadError(f"{file.path}: {brief(tensor.name)} is a second {parameter}. {REMEDY}")
                parts[place] = shaped(shapes, parameter, part)
                if theirs in halves and prod(part.shape) == prod(halves[theirs]):
                    parts[place] = replace(part, shape=halves[theirs])
        if HEAD not in file.tensors:
            self._tensors[self.head] = self._tensors[spec.embedding_weight]

    def _taken_apart(self, name: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
        """Return the parameters of queries, keys and values, of a tensor that holds all three; empty if it does not."""
        attention = self._decoder.attention
        (_, _, kind) = name.rpartition(".")
        if not isinstance(attention, Attention):
            return {}
        layer = f"{self._decoder.layer_path(0)}."
        roles = [role for role in ("query", "key", "value") if role in attention.modules]
        sizes = {
            f"{layer}{attention.modules[role]}.{kind}": sum(map(attention.out_features, attention.sharing(role)))
            for role in roles
        }
        if name not in _FUSED or len(sizes) != 3 or tensor.shape[:1] != (sum(sizes.values()),):
            return {}
        parts = {}
        first = 0
        rows = tensor.blocks.reshape(tensor.shape[0], -1)
        for parameter, size in sizes.items():
            blocks = rows[first : first + size]
            blocks = blocks if tensor.blocks.ndim > 1 else blocks.reshape(-1)
            parts[parameter] = replace(tensor, shape=(size, *tensor.shape[1:]), blocks=blocks)
            first += size
        return parts

    def __getitem__(self, name: str) -> GgufTensor:
        tensor = self.stored(name)
        order = self.order(name)
        own = _of_first(name)
        columns = self._recurrence.columns.get(own)
        is_rate = own in self._recurrence.rates
        offset = self._decoder.norms.offset if own.removesuffix(".weight") in self._norms else 0.0
        if columns is not None or is_rate or offset:
            numbers = tensor.dequantize(torch.float32) - offset
            numbers = numbers if columns is None else numbers[:, columns]
            numbers = numbers if order is None else numbers[order]
            numbers = numbers.double().neg().log().float() if is_rate else numbers
            return replace(tensor, type_name="F32", blocks=_numbers(numbers), content=None)
        if order is None:
            return tensor
        blocks = tensor.blocks.reshape(len(order), -1)[order.numpy()].reshape(tensor.blocks.shape)
        blocks.flags.writeable = False
        return replace(tensor, blocks=blocks)

    def order(self, name: str) -> torch.Tensor | None:
        """Return the rows of the file's tensor in Transformers' order, [out] int64; None: as they lie."""
        attention = self._decoder.attention
        count = self.shape(name)[0]
        module = name.rpartition(".")[0]
        own = _of_first(name)
        if own in self._recurrence.rows:
            return self._recurrence.rows[own]
        if isinstance(attention, Attention) and attention.qkv_groups > 1:
            is_joined = {"key", "value"} <= {*attention.sharing("query")}
            if is_joined and module.endswith(attention.modules["query"]):  # the converter puts all queries first
                return torch.arange(count).view(3, attention.qkv_groups, -1).transpose(0, 1).reshape(-1)
        heads = self._heads.get(module.rpartition(".")[2])
        return None if heads is None else torch.arange(count).view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        parts = self._in_order(name)
        return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def nbytes(self, name: str) -> int:
        """Return the bytes that a parameter takes in the file."""
        return sum(part.blocks.nbytes for part in self._in_order(name))

    def type_name(self, name: str) -> str:
        """Return the type of the tensor that `stored` returns."""
        types = {part.type_name for part in self._in_order(name)}
        return next(iter(types)) if len(types) == 1 and not self._is_halved(name) else "F32"

    def stored(self, name: str) -> GgufTensor:
        """Return the tensor as it lies in the file, with rows in the file's order; if it is several, these joined."""
        first, *others = parts = self._in_order(name)
        if not others:
            return first
        if self._is_halved(name):
            return replace(first, shape=self.shape(name), type_name="F32", blocks=self._whole(*parts), content=None)
        kind = self.type_name(name)
        rows = [part.blocks if part.type_name == kind else _numbers(part.dequantize(torch.float32)) for part in parts]
        return replace(first, shape=self.shape(name), type_name=kind, blocks=np.concatenate(rows), content=None)

    def in_blocks(self, name: str) -> bool:
        """Return whether there is such a tensor whose blocks, as of `stored`, are the model's but for the order of
        rows."""
        is_theirs = name in self._tensors and _of_first(name) not in self._recurrence.columns
        return is_theirs and not self._is_halved(name)

    def _is_halved(self, name: str) -> bool:
        return _of_first(name) == self._kv_b_proj and len(self._tensors[name]) > 1

    def _whole(self, keys: GgufTensor, values: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return the blocks of what makes keys and values of latents. That of keys lies in the file by head, [heads,
        rank, numbers of a key]."""
        attention = self._decoder.attention
        (_, rank) = values.shape
        assert attention is not None
        heads = attention.num_heads
        of_keys = keys.dequantize(torch.float32).view(heads, rank, -1).mT
        of_values = values.dequantize(torch.float32).view(heads, -1, rank)
        return _numbers(torch.cat([of_keys, of_values], 1).flatten(0, 1))

    def _in_order(self, name: str) -> list[GgufTensor]:
        return [part for _, part in sorted(self._tensors[name].items())]


def _numbers(numbers: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the blocks of numbers in float32."""
    return numbers.contiguous().numpy().view(np.uint8)


@dataclass(frozen=True, slots=True)
class _Slice:
    """A GGUF tensor in the form of a safetensors slice: it is dequantized when it is read, and not kept."""

    weights: PackedWeights
    name: str
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return list(self.weights.shape(self.name))

    def get_dtype(self) -> str:
        """Return the dtype that its numbers are read as: "F32" for packed ones."""
        kind = self.weights.type_name(self.name)
        return kind if kind in PLAIN_TYPES else "F32"

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes in the file."""
        return self.weights.nbytes(self.name)

    def __getitem__(self, index: EllipsisType | int) -> torch.Tensor:
        return self.weights[self.name].dequantize(self.dtype)[index]


def open_slices(
    weights: PackedWeights, spec: DecoderSpec, dtype: torch.dtype, *, is_tied: bool
) -> dict[str, _Slice | Stack]:
    """Return the tensors by Transformers' names, for it to read; a tied output layer is left to it. Those of experts
    are one again; none where parts are missing."""
    tied = weights.head if is_tied else None
    stacks = stacked(spec)
    experts = spec.experts
    parts = {part for experts in stacks.values() for names in experts for part in names}
    found: dict[str, _Slice | Stack] = {
        name: _Slice(weights, name, dtype) for name in weights if name != tied and name not in parts
    }
    for name, each in stacks.items():
        if experts is not None and all(part in weights for names in each for part in names):
            found[name] = Stack(weights, experts, each, dtype)
    return found
