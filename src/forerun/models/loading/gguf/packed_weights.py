"""Gives the tensors of a GGUF file as Transformers' parameters, with rows in Transformers' order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.families.gguf_keys import NEXT_TOKENS
from forerun.models.families.table import ARCHITECTURES
from forerun.models.families.tensor_names import (
    HEAD,
    QKV_TENSOR,
    STACKS,
    WITH_KIND,
    halves,
    layer_tensors,
    outer_tensors,
    recurrent_tensors,
)
from forerun.models.fused.experts import joined, stacked
from forerun.models.loading.gguf.configuration import architecture_of
from forerun.models.loading.gguf.file import PLAIN_TYPES, REMEDY, GgufFile, GgufTensor, brief
from forerun.models.spec.attention import AnyAttention, Attention, LatentAttention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import Experts
from forerun.models.spec.recurrence import Recurrence

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.")
_COMPUTED = re.compile(r"rope_(freqs|factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that are no weights: they belong to the rotary embedding, and older converters wrote its tables too."""


def _of_first(parameter: str) -> str:
    """Return the name of the parameter of layer 0 that is one of any layer."""
    return re.sub(r"\d+", "0", parameter, count=1)


def _heads(own: AnyAttention | None) -> dict[str, int]:
    """Return the heads by the modules whose rows converters permute."""
    return {} if own is None else {"q_proj": own.num_heads, "k_proj": own.num_kv_heads}


@dataclass(frozen=True, slots=True)
class _RecurrentTensors:
    """The tensors of recurrent layers, by the names of the parameters of layer 0 that they are.

    Attributes:
        names: the file's name of a tensor -> the parameter, and its place among the tensors that are one parameter.
        shapes: Transformers'; of parameters that the file has with others.
        rows, columns: Transformers' order of the file's rows or columns, int64; of those that are in another order.
        rates: those that are -exp of the parameter.
    """

    names: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    rates: frozenset[str] = frozenset()

    @classmethod
    def of(cls, shape: Recurrence | None, layer: str, *, is_tiled: bool) -> _RecurrentTensors:
        """Return those of a decoder with such layers, if there are any.

        Args:
            layer: the path of layer 0, with a dot behind it. is_tiled: value heads of the file are.
        """
        if shape is None:
            return cls()
        names = dict[str, tuple[str, int]]()
        parameters = dict[str, str]()
        for part, theirs in recurrent_tensors(shape).items():
            path = shape.modules.get(part) or shape.parameters[part]
            place = int(part == "in_proj_z" and path == shape.modules["in_proj_qkv"])
            parameters[part] = f"{layer}{path}.weight" if part in (*WITH_KIND, "norm") else layer + path
            for kind in ("weight", "bias") if part in WITH_KIND else ():
                names[f"blk.0.{theirs}.{kind}"] = f"{layer}{path}.{kind}", place
            if part not in WITH_KIND:
                names[f"blk.0.{theirs}"] = parameters[part], 0
        reordered = is_tiled and not shape.heads_are_tiled and shape.heads != shape.key_heads
        rows = {parameters[part]: order for part, order in _grouped(shape).items()} if reordered else {}
        if parameters.get("in_proj_z") == parameters["in_proj_qkv"]:  # the converter puts all gates behind
            runs = [
                run for part in ("in_proj_qkv", "in_proj_z") if (run := shape.rows(part, in_pairs=False)) is not None
            ]
            rows[parameters["in_proj_qkv"]] = torch.cat(runs).argsort()
        out = parameters["out_proj"]
        columns = {out: rows.pop(out)} if reordered else {}
        sizes = {"conv1d": (shape.channels, 1, shape.conv_kernel), "norm": (-1,), **dict.fromkeys(_PER_HEAD, (-1,))}
        shapes = {parameters[part]: size for part, size in sizes.items() if part in parameters}
        rates = frozenset(parameters[part] for part in ("A_log",) if part in parameters)
        return cls(names, shapes, rows, columns, rates)


def _shaped(shapes: Mapping[str, tuple[int, ...]], parameter: str, tensor: GgufTensor) -> GgufTensor:
    """Return the tensor of a parameter with Transformers' shape, where its size is that of such a shape."""
    shape = shapes.get(parameter, tensor.shape)
    size = prod(tensor.shape)
    shape = tuple(size if width == -1 else width for width in shape)
    if shape == tensor.shape or prod(shape) != size:
        return tensor
    rows = tensor.blocks.reshape(-1) if len(shape) == 1 else tensor.blocks.reshape(*shape[:-1], -1)
    return replace(tensor, shape=shape, blocks=rows)


_PER_HEAD = ("A_log", "dt_bias", "D")
"""Numbers of each head."""


def _grouped(shape: Recurrence) -> dict[str, Tensor]:
    """Return where tiled heads stand by role or parameter, those of a key head one after another."""
    heads = torch.arange(shape.heads).view(-1, shape.key_heads).T.reshape(-1)
    values = (heads[:, None] * shape.value_width + torch.arange(shape.value_width)).reshape(-1)
    channels = torch.arange(shape.channels)
    first = shape.starts["value"]
    channels[first : first + len(values)] = first + values
    return {
        **dict.fromkeys(("in_proj_qkv", "conv1d"), channels),
        **dict.fromkeys(("in_proj_z", "out_proj"), values),
        **dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), heads),
    }


def _shapes_of_experts(spec: DecoderSpec, layer: str) -> dict[str, tuple[int, ...]]:
    """Return Transformers' shapes of parameters that files have with others. layer: the path of layer 0, with a dot."""
    experts = spec.experts
    found = dict[str, tuple[int, ...]]()
    if experts is not None and experts.shared_expert_gate is not None:
        found[f"{layer}{experts.shared_expert_gate}.weight"] = (1, spec.hidden)
    if experts is not None and experts.e_score_correction_bias is not None:
        found[layer + experts.e_score_correction_bias] = experts.bias_shape or (experts.num_experts,)
    return found


def _experts_apart(spec: DecoderSpec, name: str, tensor: GgufTensor, place: str) -> Iterator[tuple[str, GgufTensor]]:
    """Give the parameters of each expert of a tensor of all of them; none of another tensor. Nothing is copied.

    Args:
        name: the tensor's in layer 0. place: the file, for messages.

    Raises:
        ModelLoadError: its shape is not that of the metadata.
    """
    path, _, kind = name.removeprefix("blk.0.").rpartition(".")
    experts = spec.experts
    roles = STACKS.get(path, ())
    if experts is None or not roles or kind not in ("weight", "bias"):
        return
    size = experts.out_features(roles[0]) or spec.hidden
    inner = (experts.in_features(roles[0]) or spec.hidden,) if kind == "weight" else ()
    expected = (experts.num_experts, size * len(roles), *inner)
    if tensor.shape != expected:
        raise ModelLoadError(
            f"{place}: the tensor {brief(tensor.name)} has the shape {list(tensor.shape)}, and {list(expected)} by "
            f"the metadata, whose expert_count is {experts.num_experts}. {REMEDY}"
        )
    rows = tensor.blocks.reshape(experts.num_experts, size * len(roles), -1)
    for part, role in enumerate(roles):
        for expert in range(experts.num_experts):
            blocks = rows[expert, part * size :][:size]
            own = replace(
                tensor,
                name=f"{tensor.name}[{expert}]",
                shape=(size, *inner),
                blocks=blocks if inner else blocks.reshape(-1),
            )
            yield f"{spec.layer_path(0)}.{experts.module(role, expert)}.{kind}", own


class PackedWeights(Mapping[str, GgufTensor]):
    """The packed tensors by the names of Transformers' parameters. A tied output layer has its name too.

    Rows that the converter has permuted are brought back into Transformers' order: their packed rows are copied for
    that, all others lie in the file. So are value heads of recurrent layers, and the columns of the product behind
    them, which are numbers then, unless the configuration says that heads are tiled (`TILED` in families/recurrent.py).
    Norms to whose weights Transformers adds a number have it in the file, and it is taken out; of rates of decay
    Transformers has the logarithm. Experts are parameters apart, each a view of the file's tensor of all. What makes
    keys and values of latents is one parameter of numbers where the file has one tensor for keys and one for values.

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
        names = {**outer_tensors(spec, architecture.tensors), **layer_tensors(spec, architecture.tensors)}
        norms = {layer + each.module(role) for each in spec.layers for role in each.all_norms}
        self._norms = norms | {f"{spec.base}.{spec.output.norm}"}
        self._recurrence = _RecurrentTensors.of(spec.recurrence, layer, is_tiled=architecture.heads_are_tiled)
        shapes = {**self._recurrence.shapes, **_shapes_of_experts(spec, layer)}
        of_halves = halves(spec)
        self._kv_b_proj = f"{layer}{attention.kv_b_proj}.weight" if isinstance(attention, LatentAttention) else ""
        recurrent = {**names, **self._recurrence.names}
        self._tensors: dict[str, dict[int, GgufTensor]] = {}
        unread = spec.unread
        for tensor in (each for each in file.tensors.values() if not _COMPUTED.fullmatch(each.name)):
            found = _LAYER.match(tensor.name)
            index = -1 if found is None else int(found[1])
            if index >= len(spec.layers) and NEXT_TOKENS in architecture.reads:
                continue  # it predicts further tokens
            is_recurrent = 0 <= index < len(spec.layers) and spec.layers[index].recurrence is not None
            theirs = _LAYER.sub("blk.0.", tensor.name)
            there = recurrent if is_recurrent else names
            if theirs.endswith("_norm") and f"{theirs}.weight" in there:  # Falcon-H1 leaves the ending out
                theirs = f"{theirs}.weight"
            parameter, place = there.get(theirs, ("", 0))
            placed = {parameter: tensor} if parameter else self._taken_apart(theirs, tensor)
            placed = placed or dict(_experts_apart(spec, theirs, tensor, str(file.path)))
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
                parts[place] = _shaped(shapes, parameter, part)
                if theirs in of_halves and prod(part.shape) == prod(of_halves[theirs]):
                    parts[place] = replace(part, shape=of_halves[theirs])
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
        if name != f"blk.0.{QKV_TENSOR}.{kind}" or len(sizes) != 3 or tensor.shape[:1] != (sum(sizes.values()),):
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
class Stack:
    """Tensors of experts as Transformers' parameter of all of them, in the form of a safetensors slice.

    Attributes:
        weights: by parameter. parts: the names of each expert's.
    """

    weights: Any
    experts: Experts
    parts: list[list[str]]
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        shapes = [self.weights.shape(name) for name in self.parts[0]]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return [len(self.parts), *(reversed(whole) if self.experts.is_transposed else whole)]

    def get_dtype(self) -> str:
        """Return the dtype that its numbers are read as: "F32" for packed ones."""
        kinds = {self.weights.type_name(name) for name in self.parts[0]}
        return kinds.pop() if len(kinds) == 1 and kinds <= {*PLAIN_TYPES} else "F32"

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes in the file."""
        return sum(self.weights.nbytes(name) for names in self.parts for name in names)

    @property
    def names(self) -> list[str]:
        """Return the names of all parts."""
        return [name for names in self.parts for name in names]

    def part(self, expert: int, role: str) -> torch.Tensor:
        """Return what an expert's role has, [out, in] or [out], without reading what other roles have."""
        place = int(role == "expert_up")
        found: torch.Tensor = self.weights[self.parts[expert][place]].dequantize(self.dtype)
        return found

    def __getitem__(self, index: EllipsisType | int) -> torch.Tensor:
        if isinstance(index, int):
            return joined(self.experts, [self.weights[name].dequantize(self.dtype) for name in self.parts[index]])
        return torch.stack([self[expert] for expert in range(len(self.parts))])


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
