"""Reports how much of a model's files has been read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from math import prod
from types import EllipsisType

from torch import Tensor

from forerun.models.loading.weights import Checkpoint, TensorSlice

Listener = Callable[[str, int, int], None]
"""Takes the model's name, the bytes that were read, and those of all tensors."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


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
    return prod(tensor.get_shape()) * _BYTES.get(tensor.get_dtype(), 1) if nbytes is None else nbytes
