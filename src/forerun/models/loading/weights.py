"""The tensors of a checkpoint, not read yet, compared with the model that they are for, and counted as they are read.

Tensors that a model needs must be there with its shapes. Those that it does not need fall into three classes: an error
where leaving them out would change what the model computes; one warning for parts that belong to other tasks; silence
for what a model computes itself.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor

from forerun.errors import ModelLoadError

_log = logging.getLogger(__name__)
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_COMPUTED = re.compile(r"(^|\.)(inv_freq|masked_bias|position_ids|cos_cached|sin_cached)$|\.(attn|attention)\.bias$")
_LAYER = re.compile(r"^(?P<list>(?:.+\.)?(?:layers|h|blocks|block|layer))\.(?P<index>\d+)\.")
_DECODER_LISTS = {
    *("model.layers", "layers", "model.decoder.layers", "decoder.layers"),
    *("transformer.h", "h", "gpt_neox.layers", "transformer.blocks", "model.model.layers"),
}


class TensorSlice(Protocol):
    """A tensor that is not read yet, in the form that Transformers takes from safetensors."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str:
        """Return the dtype as safetensors files write it, such as "BF16"."""

    def __getitem__(self, index: EllipsisType | int) -> Tensor:
        """Read and return the whole tensor, or the part of it at a place of its first dimension."""


@dataclass(frozen=True, slots=True)
class Dequantized:
    """A quantized weight in the form of a safetensors slice.

    Attributes:
        numbers: returns it, or the part of it at a place of its first dimension.
    """

    shape: list[int]
    numbers: Callable[[EllipsisType | int], Tensor]

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: EllipsisType | int) -> Tensor:
        return self.numbers(index)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a model by name. They are read when they are used.

    Attributes:
        slices: at least one.
        described_by: what holds the configuration that they must fit, for messages: "config.json".
        remedy: what to do where they do not fit it.
        unread: names of tensors that are read separately: Transformers gets placeholders for them, which have a
            shape and take no memory.
    """

    slices: Mapping[str, TensorSlice]
    described_by: str
    remedy: str
    unread: Collection[str] = frozenset()

    def state_dict(self, dtype: torch.dtype) -> dict[str, TensorSlice]:
        """Return the tensors for Transformers to read. dtype: of the placeholders."""
        return {name: _Placeholder(each, dtype) if name in self.unread else each for name, each in self.slices.items()}

    def stored_dtype(self) -> str:
        """Return the dtype, such as "bfloat16", of most of the entries."""
        entries: Counter[str] = Counter()
        for name in self.slices:
            entries[FLOATS.get(self.slices[name].get_dtype(), "float32")] += prod(self.slices[name].get_shape())
        return entries.most_common(1)[0][0]


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """A tensor with the shape of another, whose entries share one number in memory."""

    slice: TensorSlice
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return self.slice.get_shape()

    def get_dtype(self) -> str:
        return self.slice.get_dtype()

    def __getitem__(self, index: EllipsisType | int) -> Tensor:
        return torch.zeros((), dtype=self.dtype).expand(self.get_shape())[index]


def check_num_layers(checkpoint: Checkpoint, num_layers: int, num_nextn: int, name: str) -> None:
    """Raise an error if the configuration and the weights differ in their number of layers, before a model is made.

    Args:
        num_layers: that the configuration speaks of. num_nextn: that predict further tokens, after those.

    Raises:
        ModelLoadError: names the first layer that is missing or too many.
    """
    counts: dict[str, int] = {}
    for tensor in checkpoint.slices:
        found = _LAYER.match(tensor)
        if found:
            counts[found["list"]] = max(counts.get(found["list"], 0), int(found["index"]) + 1)
    if counts and max(counts.values()) < num_layers:
        raise ModelLoadError(
            f"{name}: {checkpoint.described_by} speaks of {num_layers} layers, and the weights have "
            f"{max(counts.values())}. {checkpoint.remedy}"
        )
    for layers, count in counts.items():
        if layers in _DECODER_LISTS and count > num_layers + num_nextn:
            raise ModelLoadError(
                f"{name}: the weights have {layers}.{count - 1}, but {checkpoint.described_by} speaks of "
                f"{num_layers} layers only. {checkpoint.remedy}"
            )


def check_shapes(checkpoint: Checkpoint, expected: Mapping[str, Sequence[int]], base: str, name: str) -> None:
    """Compare tensors that bear the name of one of the model's, with or without the prefix of its base.

    Raises:
        ModelLoadError: names the first whose shape is another.
    """
    for tensor in checkpoint.slices:
        shape = expected.get(tensor, expected.get(f"{base}.{tensor}"))
        found = checkpoint.slices[tensor].get_shape()
        if shape is not None and list(shape) != found:
            raise ModelLoadError(
                f"{name}: tensor {tensor} has shape {found} in the weights, and {list(shape)} by "
                f"{checkpoint.described_by}. {checkpoint.remedy}"
            )


def check_numbers(checkpoint: Checkpoint, unused: Collection[str], name: str) -> None:
    """Raise an error for integers and eight-bit floats in place of weights: they mean something only with their scales.

    Raises:
        ModelLoadError: names the first.
    """
    for tensor in checkpoint.slices:
        dtype = checkpoint.slices[tensor].get_dtype()
        if dtype not in FLOATS and tensor not in unused and not _COMPUTED.search(tensor):
            raise ModelLoadError(
                f"{name}: tensor {tensor} is stored as {dtype}, as quantized weights are, and "
                f"{checkpoint.described_by} does not say how. {checkpoint.remedy}"
            )


def check_unused(checkpoint: Checkpoint, unused: Iterable[str], served: Collection[str], name: str) -> None:
    """Sort the tensors that the model did not take.

    Args:
        unused: their names. served: the modules of the model by path.

    Raises:
        ModelLoadError: one of them belongs to a module that is served, and is not zero.
    """
    left_out: Counter[str] = Counter()
    for tensor in sorted(unused):
        if _COMPUTED.search(tensor) or _is_tied_head(checkpoint, tensor):
            continue
        if not _is_inside(tensor, served):
            left_out[_outside(tensor, served)] += 1
        elif checkpoint.slices[tensor][...].any():
            raise ModelLoadError(
                f"{name}: the weights hold {tensor}, which a model by {checkpoint.described_by} would leave out. "
                f"{checkpoint.remedy}"
            )
    if left_out:
        parts = ", ".join(f"{prefix}.* ({count})" for prefix, count in left_out.items())
        _log.warning("%s: weights that text needs not are left out: %s.", name, parts)


def _is_inside(tensor: str, served: Collection[str]) -> bool:
    """Return whether the tensor's module, or the layer or block that it lies in, is one of the model's."""
    path = tensor.rpartition(".")[0]
    if not path or path in served:
        return bool(path)
    layer = _LAYER.match(tensor)
    return layer is not None and f"{layer['list']}.{layer['index']}" in served


def _outside(tensor: str, served: Collection[str]) -> str:
    """Return the shortest part of the tensor's path that is none of the model's modules."""
    parts = tensor.split(".")
    paths = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next(path for path in paths if path not in served)


def _is_tied_head(checkpoint: Checkpoint, tensor: str) -> bool:
    """Return whether the tensor is an output layer that equals the embedding."""
    if tensor.rpartition(".")[0].rpartition(".")[2] not in ("lm_head", "embed_out"):
        return False
    shape = checkpoint.slices[tensor].get_shape()
    embeddings = [name for name in checkpoint.slices if name != tensor and checkpoint.slices[name].get_shape() == shape]
    head = checkpoint.slices[tensor][...]
    return any(head.equal(checkpoint.slices[name][...]) for name in embeddings)


Listener = Callable[[str, int, int], None]
"""Takes the model's name, the bytes that were read, and those of all tensors."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_NBYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@contextmanager
def progress_to(listener: Listener) -> Iterator[None]:
    """Call `listener` after every tensor that models read in the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Reading:
    """Counts the bytes of a model's tensors as they are read, each once.

    Args:
        name: of the model. slices: its tensors by name.
    """

    def __init__(self, name: str, slices: Mapping[str, TensorSlice]) -> None:
        self._name = name
        self._left = dict[str, int]()
        self._parts: dict[str, list[str]] = {}
        for key, each in slices.items():
            parts = getattr(each, "names", None) or [key]
            self._parts[key] = parts
            self._left |= dict.fromkeys(parts, _nbytes(each) // len(parts))
        self._total = sum(self._left.values())
        self._read = 0

    def count(self, tensor: str) -> None:
        """Count a tensor, or one of several that are one parameter, that was read, and call the listener."""
        self._read += sum(self._left.pop(part, 0) for part in self._parts.pop(tensor, [tensor]))
        listener = _listener.get()
        if listener is not None:
            listener(self._name, self._read, self._total)


def count_reads(checkpoint: Checkpoint, name: str) -> tuple[Checkpoint, Reading]:
    """Return the checkpoint with tensors that are counted when they are read, and what counts them. name: of the
    model."""
    reading = Reading(name, checkpoint.slices)
    slices = {key: _Counted(each, key, reading) for key, each in checkpoint.slices.items()}
    return replace(checkpoint, slices=slices), reading


class _Counted:
    """A tensor in the form of a safetensors slice that is counted when it is read."""

    def __init__(self, slice_: TensorSlice, name: str, reading: Reading) -> None:
        self._slice = slice_
        self._name = name
        self._reading = reading
        self.get_shape = slice_.get_shape
        self.get_dtype = slice_.get_dtype
        if hasattr(slice_, "part"):  # of a tensor of all experts
            self.part = self._part

    def __getitem__(self, index: EllipsisType | int) -> Tensor:
        tensor = self._slice[index]
        self._reading.count(self._name)
        return tensor

    def _part(self, expert: int, role: str) -> Tensor:
        tensor: Tensor = getattr(self._slice, "part")(expert, role)  # noqa: B009
        self._reading.count(self._name)
        return tensor


def _nbytes(tensor: TensorSlice) -> int:
    """Return the bytes of a tensor in the file: those of its blocks, or of its numbers."""
    nbytes: int | None = getattr(tensor, "nbytes", None)
    return prod(tensor.get_shape()) * _NBYTES.get(tensor.get_dtype(), 1) if nbytes is None else nbytes
