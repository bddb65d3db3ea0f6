"""GGUF files: their headers, read and checked, and their tensors, mapped into memory and read when they are used.

Reads the header of a GGUF file: its metadata, and the list of tensors with their offsets.

Every count, length, type and offset is checked before it is used, so that no header makes this loop, allocate or read
beyond the file. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.kernels.block_weight import BLOCK_TYPES, BlockWeight
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight
from forerun.models.loading.folder import GGUF_MAGIC, GGUF_SUFFIX, part_paths
from forerun.utils.foreign_errors import as_memory_errors
from forerun.utils.json_file import Fields, open_regular

REMEDY = "Download or convert it anew."
MAX_BYTES = 1 << 28  # of a header; a vocabulary of 300,000 tokens takes 10 MB
_MAX_ELEMENTS = 1 << 23  # of all arrays together
_ELEMENTS_OF_ENTRY = 128  # a key or a tensor counts as so many: large models have a few thousand
_BOOL = 7
_STRING = 8
_ARRAY = 9
# value type in the file -> layout of the numbers, as NumPy calls it
_NUMBERS = dict(
    zip(
        (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12),
        ["B", "b", "<H", "<h", "<I", "<i", "<f", "B", "<Q", "<q", "<d"],
        strict=True,
    )
)
_OTHER_FORMATS = {
    b"FUGG": "it is a GGUF file for big-endian machines, which forerun does not read",
    b"lmgg": "it is a GGML file, which came before GGUF",
    b"fmgg": "it is a GGMF file, which came before GGUF",
    b"tjgg": "it is a GGJT file, which came before GGUF",
    b"vers": "it seems to be a pointer of Git LFS instead of the file",
    b"<!DO": "it seems to be a web page instead of the file",
}


class TensorInfo(NamedTuple):
    """A tensor's name, shape (in torch's order, rows first), type (such as "Q4_1"), first byte in the file, and number
    of bytes."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The contents of a header.

    Attributes:
        metadata: by key, values as int, float, bool, str, or lists of one of them.
        kinds: by key, the type of the value as the file numbers it; of a list, also that of its elements.
        tensors: in the file's order.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)


@cache
def read_types() -> tuple[str, ...]:
    """Return the types of tensors that are read: those that the gguf package dequantizes."""
    from gguf.quants import _type_traits

    return ("F32", "F16", *(kind.name for kind in _type_traits))


def read_header(content: memoryview, place: str) -> GgufHeader:
    """Read the header of a file.

    Args:
        content: the whole file.
        place: the file, for messages.

    Raises:
        ModelLoadError: it is no GGUF file, damaged or cut off.
        UnsupportedModelError: a tensor is of a type that is not read here.
    """
    reader = _Reader(content, place)
    header = GgufHeader()
    reader.check_version()
    num_tensors, num_keys = (reader.count(what, _ELEMENTS_OF_ENTRY) for what in ("tensors", "keys"))
    for _ in range(num_keys):
        _read_key(reader, header)
    infos = [_tensor_info(reader) for _ in range(num_tensors)]
    header.tensors.extend(_located(infos, header.metadata.get("general.alignment", 32), reader, len(content)))
    return header


def _read_key(reader: _Reader, header: GgufHeader) -> None:
    """Read a key with its value."""
    key = reader.texts(1, "a key's name")[0]
    if not key or key in header.metadata:
        reader.fail(f"it has the key {brief(key)} twice" if key else "a key has no name")
    what = f"the key {brief(key)}"
    kind = reader.integer("<I", "a value's type")
    header.kinds[key] = (kind, reader.integer("<I", what)) if kind == _ARRAY else (kind,)
    count = reader.count(f"elements with {what}") if kind == _ARRAY else 1
    values = reader.values(header.kinds[key][-1], count, what)
    header.metadata[key] = values if kind == _ARRAY else values[0]


def first_keys(path: Path, keys: Collection[str]) -> Mapping[str, Any]:
    """Return the metadata of a file up to the last of these keys: a vocabulary, which mostly stands behind them, takes
    half a second.

    Raises:
        ModelLoadError: as `GgufFile.open`.
    """
    content = _mapped(path)
    reader = _Reader(memoryview(content), str(path))
    reader.check_version()
    _, num_keys = (reader.count(what, _ELEMENTS_OF_ENTRY) for what in ("tensors", "keys"))
    header = GgufHeader()
    while num_keys and not header.metadata.keys() >= {*keys}:
        _read_key(reader, header)
        num_keys -= 1
    return header.metadata


def brief(text: str) -> str:
    """Quote and escape a name of the file for a message, shortened to 60 characters."""
    return repr(text if len(text) <= 60 else text[:60] + "...")


class _Reader:
    """A position in the header, which advances with every read. Raises ModelLoadError beyond the end."""

    def __init__(self, content: memoryview, place: str) -> None:
        self.content = content[:MAX_BYTES]
        self.place = place
        self.at = 0
        self.num_elements = 0

    def fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self.place}: {what}. {REMEDY}")

    def advance(self, num_bytes: int, what: str) -> int:
        """Advance by so many bytes, and return where they begin."""
        if num_bytes > len(self.content) - self.at:
            reason = (
                f"longer than {MAX_BYTES:,} bytes, which no such file's is" if len(self.content) == MAX_BYTES else ""
            )
            self.fail(f"its header is {reason or f'cut off in {what}'}")
        self.at += num_bytes
        return self.at - num_bytes

    def integer(self, layout: str, what: str) -> int:
        return int(struct.unpack_from(layout, self.content, self.advance(struct.calcsize(layout), what))[0])

    def count(self, what: str, weight: int = 1) -> int:
        """Read how many of something follow. Elements, keys and tensors together must not be too many."""
        number = self.integer("<Q", f"the number of {what}")
        self.num_elements += number * weight
        if self.num_elements > _MAX_ELEMENTS:
            self.fail(f"it says that it has {number:,} {what}, and no such file has so many")
        return number

    def check_version(self) -> None:
        magic = bytes(self.content[self.advance(4, "its first four bytes") : self.at])
        if magic != GGUF_MAGIC:
            self.fail(_OTHER_FORMATS.get(magic, f"it is no GGUF file: it begins with {magic!r}"))
        version = self.integer("<I", "its version")
        if version not in (2, 3):
            swapped = _OTHER_FORMATS[b"FUGG"] if version and version & 0xFFFF == 0 else None
            self.fail(swapped or f"its version of GGUF is {version}; forerun reads 2 and 3")

    def texts(self, count: int, what: str) -> list[str]:
        """Read so many texts: a vocabulary has 100,000, so without a call for each."""
        content = self.content
        at = self.at
        texts = list[str]()
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(content, at)[0]
                texts.append(str(content[start:at], "utf-8"))
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")
        except (struct.error, OverflowError):
            at = len(content) + 1
        self.advance(at - self.at, what)
        return texts

    def values(self, kind: int, count: int, what: str) -> list[Any]:
        """Read so many values of a type."""
        if kind == _STRING:
            return self.texts(count, what)
        if kind not in _NUMBERS:
            reason = "an array of arrays, which llama.cpp writes none of"
            self.fail(f"{what} holds {reason if kind == _ARRAY else f'a value of type {kind}, which GGUF has not'}")
        layout = np.dtype(_NUMBERS[kind])
        numbers: list[Any] = np.frombuffer(
            self.content, layout, count, self.advance(count * layout.itemsize, what)
        ).tolist()
        if kind == _BOOL and max(numbers, default=0) > 1:
            self.fail(f"{what} is neither true nor false")
        return [*map(bool, numbers)] if kind == _BOOL else numbers


def _tensor_info(reader: _Reader) -> TensorInfo:
    """Read a tensor's entry, whose `start` counts from the first byte of all tensors."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = reader.texts(1, "a tensor's name")[0]
    what = f"tensor {brief(name)}"
    num_dimensions = reader.integer("<I", f"the shape of {what}")
    if not 1 <= num_dimensions <= 4:
        reader.fail(f"{what} has {num_dimensions:,} dimensions, but must have 1 to 4")
    shape = tuple(reader.integer("<Q", f"the shape of {what}") for _ in range(num_dimensions))[::-1]
    number = reader.integer("<I", f"the type of {what}")
    if min(shape) == 0:
        reader.fail(f"{what} has the shape {list(shape)}, which holds nothing")
    if number not in GGML_QUANT_SIZES:
        reader.fail(f"{what} is of type {number}, which is none")
    kind = GGMLQuantizationType(number)
    if kind.name not in read_types():
        raise UnsupportedModelError(
            f"{reader.place}: {what} is stored as {kind.name}, which forerun does not read. Take a file of the model "
            f"whose tensors are {', '.join(read_types())}."
        )
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        reader.fail(f"{what} has rows of {shape[-1]:,} numbers, and {kind.name} packs {block_size} together")
    start = reader.integer("<Q", f"the offset of {what}")
    return TensorInfo(name, shape, kind.name, start, math.prod(shape) // block_size * block_bytes)


def _located(infos: list[TensorInfo], alignment: Any, reader: _Reader, size: int) -> list[TensorInfo]:
    """Return the tensors with their places in the file, after checking as llama.cpp does: they lie one behind the
    other, each aligned, all within the file, and names are unique. size: of the file, in bytes."""
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {alignment!r:.60}, but must be a power of two")
    start = -(-reader.at // alignment) * alignment
    offset = 0
    located = dict[str, TensorInfo]()
    for info in infos:
        what = f"tensor {brief(info.name)}"
        if not info.name or info.name in located:
            reader.fail(f"it has the {what} twice" if info.name else "a tensor has no name")
        if info.start != offset:
            reader.fail(f"{what} lies at {info.start:,} instead of {offset:,}, where the tensor before it ends")
        if (missing := start + offset + info.num_bytes - size) > 0:
            reader.fail(f"it is cut off: {what} ends {missing:,} bytes behind the file's end")
        located[info.name] = info._replace(start=start + offset)
        offset = -(-(offset + info.num_bytes) // alignment) * alignment
    if infos and size > start + offset:
        reader.fail(f"it holds {size - start - offset:,} bytes after its last tensor, which belong to none")
    return [*located.values()]


_PART = (1 << 15) - 256
"""Numbers dequantized together: whole blocks of every type, few enough to stay in the processor's cache, and fewer than
those from which torch converts with all threads, whose waiting for each other takes seconds on a busy machine."""
_LARGE = 1 << 16
"""Bytes from which a dequantized tensor has a memory mapping of its own."""
PLAIN_TYPES = ("F32", "F16", "BF16")
_KEPT = {"Q8_0", "Q4_0", "Q4_1"}
"""Types that `quantize` takes as they are where they have the wanted bits."""


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """A tensor that is not read yet.

    Attributes:
        name: as in the file, such as "blk.0.attn_q.weight".
        shape: in torch's order, rows first.
        type_name: of the blocks, such as "Q4_1" or "F32".
        blocks: [*shape[:-1], bytes of a row] uint8, read-only, in the file's memory map.
        content: the memory map; None: the blocks lie in memory.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    blocks: npt.NDArray[np.uint8]
    content: mmap.mmap | None = None

    def check_whole(self) -> None:
        """Check that the file is as long as it was: reading a map beyond the file's end kills the process.

        Raises:
            ModelLoadError: it has been cut off since it was opened.
        """
        if self.content is not None and self.content.size() < len(self.content):
            raise ModelLoadError(f"tensor {self.name}: the file has been cut off while it was in use. {REMEDY}")

    def release(self) -> None:
        """Give back the pages of the file that were read. They stay in the system's cache."""
        if self.content is not None and sys.platform != "win32":
            self.content.madvise(mmap.MADV_DONTNEED)

    @property
    def is_quantized(self) -> bool:
        """Return whether a block holds several numbers with shared scales."""
        return self.type_name not in PLAIN_TYPES

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers, converted to `dtype`, in `shape`. They are computed in float32, as in llama.cpp, part by
        part: beside the result there is never more than one part."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        self.check_whole()
        kind = GGMLQuantizationType[self.type_name]
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        packed = self.blocks.reshape(-1)
        result = _empty_tensor(math.prod(self.shape), dtype)
        for first in range(0, len(result), _PART):
            last = min(first + _PART, len(result))
            start, end = (index // block_size * block_bytes for index in (first, last))
            numbers = dequantize(packed[start:end].reshape(1, -1), kind).reshape(-1)
            result[first:last] = torch.from_numpy(np.require(numbers, np.float32, "W"))
        self.release()
        return result.view(self.shape)


def _empty_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor of `count` numbers. A large one has a memory mapping of its own, which returns to the
    system with the tensor: weights are read by several threads and freed by another, and the C library keeps freed
    memory for the thread that allocated it."""
    num_bytes = count * dtype.itemsize
    if sys.platform == "win32" or num_bytes < _LARGE:
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)


def form_to_keep(type_name: str, shape: Sequence[int]) -> QuantizedFormat | None:
    """Return the format of what `weight_to_keep` returns for a tensor of this type and shape."""
    if type_name not in _KEPT or len(shape) != 2:
        return None
    form = BLOCK_TYPES[type_name]
    return QuantizedFormat(form.bits, form.zero, form.group, form.has_minimum)


def weight_to_keep(tensor: GgufTensor) -> QuantizedWeight | None:
    """Return a matrix of a type that forerun quantizes to as well, without another rounding; None for other types.

    Raises:
        ModelLoadError: a scale is NaN or infinite.
    """
    if form_to_keep(tensor.type_name, tensor.shape) is None:
        return None
    weight = block_weight(tensor)
    assert weight is not None
    try:
        values = weight.quantized()
    except ModelLoadError as error:
        raise ModelLoadError(f"tensor {tensor.name}: {error}") from None
    minimum = None if values.minimum is None else values.minimum.half()  # as the file has them
    return replace(values, scale=values.scale.half(), minimum=minimum)


def block_weight(tensor: GgufTensor, order: torch.Tensor | None = None) -> BlockWeight | None:
    """Return a matrix whose blocks are computed with as they lie in the file; None for other tensors.

    order: int64, the rows of the file that are wanted; None: all in order.
    """
    if tensor.type_name not in BLOCK_TYPES or len(tensor.shape) != 2:
        return None
    tensor.check_whole()
    return BlockWeight(tensor.type_name, (tensor.shape[0], tensor.shape[1]), tensor.blocks, order)


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """A model's open GGUF file, or all of its parts.

    Attributes:
        path: where it is, or its first part.
        metadata: by key, values as int, float, bool, str, or lists of one of them; of the first part.
        tensors: by name, of all parts. Their blocks keep the files mapped.
        kinds: of the metadata's values, as `GgufHeader.kinds`.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    kinds: Mapping[str, tuple[int, ...]]

    def release(self) -> None:
        """Give back the pages of the files that were read. They stay in the system's cache."""
        for tensor in {id(tensor.content): tensor for tensor in self.tensors.values()}.values():
            tensor.release()

    @property
    def fields(self) -> Fields:
        """Return all keys of the metadata as checked fields."""
        return Fields(str(self.path), self.metadata, ModelLoadError, REMEDY)

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Open a file, or all parts of a model given any of them, and check the headers. The files must not be changed
        while they are open.

        Raises:
            ModelLoadError: one cannot be read, is no GGUF file, damaged, or cut off; a part is missing, or belongs to
                another model.
            UnsupportedModelError: it holds tensors of a type that is not read here.
        """
        paths = part_paths(Path(path))
        missing = [each.name for each in paths if not each.exists()]
        if missing and len(paths) > 1:
            raise ModelLoadError(
                f"{path}: it is one of {len(paths)} parts of a model, and {', '.join(missing[:8])} is not beside it. "
                "Download all parts into one folder."
            )
        opened = [_open(each) for each in paths]
        first = opened[0][0]
        tensors = dict[str, GgufTensor]()
        for number, (each, (header, found)) in enumerate(zip(paths, opened, strict=True)):
            _check_part(each, number, len(paths), header, first)
            if twice := next((name for name in found if name in tensors), None):
                raise ModelLoadError(
                    f"{each}: it has the tensor {brief(twice)}, as a part before it: it is of another model. {REMEDY}"
                )
            tensors |= found
        total = first.metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise ModelLoadError(
                f"{paths[0]}: its model has {total} tensors, and its {len(paths)} parts have {len(tensors)}: one is of "
                f"another model. {REMEDY}"
            )
        return cls(paths[0], MappingProxyType(first.metadata), MappingProxyType(tensors), first.kinds)


def _mapped(path: Path) -> mmap.mmap:
    """Map a file into memory, read-only."""
    try:
        with as_memory_errors(str(path)), open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as failure:  # ValueError: a path with a null character, an empty file, or a pipe
        raise ModelLoadError(
            f"{path}: it cannot be read: {getattr(failure, 'strerror', 0) or failure}. {REMEDY}"
        ) from None


def _open(path: Path) -> tuple[GgufHeader, dict[str, GgufTensor]]:
    """Return the header of a file and its tensors."""
    content = _mapped(path)
    header = read_header(memoryview(content), str(path))
    packed = np.frombuffer(content, np.uint8)
    return header, {
        name: GgufTensor(name, shape, kind, packed[start : start + num_bytes].reshape(*shape[:-1], -1), content)
        for name, shape, kind, start, num_bytes in header.tensors
    }


def _check_part(path: Path, number: int, count: int, header: GgufHeader, first: GgufHeader) -> None:
    """Raise ModelLoadError if a file is not the part of the model that its name says, counted from 0."""
    no, parts, total = (header.metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count"))
    if (no or 0, parts or 1) != (number, count):  # writers that do not split leave the keys out, or write 0
        raise ModelLoadError(
            f"{path}: by its metadata it is part {no!r:.20} of {parts!r:.20}, counted from 0, and by its name {number} "
            f"of {count}. Give all parts the names that they were published under, such as "
            f"NAME-00001-of-00003{GGUF_SUFFIX}."
        )
    if total != (expected := first.metadata.get("split.tensors.count")):
        raise ModelLoadError(
            f"{path}: it is part of a model of {total!r:.20} tensors, and the first part of one of {expected!r:.20}. "
            f"{REMEDY}"
        )
