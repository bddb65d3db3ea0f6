"""Reads the header of a GGUF file: its metadata, and the list of tensors with their offsets.

Every count, length, type and offset is checked before it is used, so that no header makes this loop, allocate or read
beyond the file. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, NoReturn

import numpy as np

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.loading.gguf import MAGIC

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
        key = reader.texts(1, "a key's name")[0]
        if not key or key in header.metadata:
            reader.fail(f"it has the key {brief(key)} twice" if key else "a key has no name")
        what = f"the key {brief(key)}"
        kind = reader.integer("<I", "a value's type")
        header.kinds[key] = (kind, reader.integer("<I", what)) if kind == _ARRAY else (kind,)
        count = reader.count(f"elements with {what}") if kind == _ARRAY else 1
        values = reader.values(header.kinds[key][-1], count, what)
        header.metadata[key] = values if kind == _ARRAY else values[0]
    infos = [_tensor_info(reader) for _ in range(num_tensors)]
    header.tensors.extend(_located(infos, header.metadata.get("general.alignment", 32), reader, len(content)))
    return header


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
        if magic != MAGIC:
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
