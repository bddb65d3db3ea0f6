"""The header of a GGUF file: its metadata, and the list of tensors with their offsets.

Every count, length, type and offset is checked before it is used, so that no header makes this loop, allocate or read
beyond the file. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from forerun.errors import ModelLoadError, UnsupportedModelError

# Which types of tensors are read, and how many bytes they take.

READ_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")


def tensor_bytes(number: int, shape: Sequence[int], what: str, place: str, remedy: str) -> tuple[str, int]:
    """Return a type's name, and the bytes that a tensor of it takes.

    Args:
        number: of the type, as the file writes it.
        shape: rows first; a row is packed in blocks.
        what: the tensor, and the file it is in, for messages.

    Raises:
        UnsupportedModelError: it is not one of READ_TYPES.
        ModelLoadError: rows are not whole blocks, or there is no such type.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelLoadError(f"{place}: {what} is of type {number}, which is none. {remedy}") from None
    if kind.name not in READ_TYPES:
        raise UnsupportedModelError(
            f"{place}: {what} is stored as {kind.name}, which forerun does not read. Take a file of the model whose "
            f"tensors are {', '.join(READ_TYPES)}."
        )
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise ModelLoadError(
            f"{place}: {what} has rows of {shape[-1]:,} numbers, and {kind.name} packs {block_size} together. {remedy}"
        )
    return kind.name, math.prod(shape) // block_size * block_bytes


REMEDY = "Download or convert it anew."
MAX_BYTES = 1 << 28
"""Of metadata and the list of tensors; a vocabulary of 300,000 tokens takes 10 MB."""
MAX_ENTRIES = 1 << 16
"""Keys, and tensors; large models have a few thousand."""
MAX_ELEMENTS = 1 << 23
"""Of all arrays together."""
MAX_NAME = 1 << 16
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_LENGTH = struct.Struct("<Q")
_NUMBERS: Mapping[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 10, 11, 12), ["u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "i8", "f8"], strict=True)
)
"""Value type in the file -> NumPy's name of the numbers; 7, 8 and 9 are truth values, strings and arrays."""
_OTHER_FORMATS: Mapping[bytes, str] = {
    b"FUGG": "it is a GGUF file for big-endian machines, which forerun does not read",
    b"lmgg": "it is a GGML file, which came before GGUF",
    b"fmgg": "it is a GGMF file, which came before GGUF",
    b"tjgg": "it is a GGJT file, which came before GGUF",
    b"vers": "it seems to be a pointer of Git LFS instead of the file",
    b"<!DO": "it seems to be a web page instead of the file",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The type, shape and location of a tensor in the file.

    Attributes:
        shape: in torch's order, rows first.
        type_name: such as "Q4_1".
        start: its first byte in the file. num_bytes: how many there are.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The contents of the header. Values of the metadata are int, float, bool, str, or lists of one of them.

    Attributes:
        kinds: by key, the type of the value as the file numbers it; of a list, also that of its elements.
    """

    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]
    kinds: Mapping[str, tuple[int, ...]]


def read_header(content: memoryview, place: str) -> GgufHeader:
    """Read the header of a file.

    Args:
        content: the whole file.
        place: the file, for messages.

    Raises:
        ModelLoadError: it is no GGUF file, damaged or cut off.
        UnsupportedModelError: a tensor is of a type that is not read here.
    """
    cursor = _Cursor(content, place)
    version = _version(cursor)
    num_tensors, num_keys = cursor.count("tensors"), cursor.count("keys")
    metadata, kinds = dict[str, Any](), dict[str, tuple[int, ...]]()
    for _ in range(num_keys):
        key = cursor.text("a key's name", MAX_NAME)
        if not key or key in metadata:
            cursor.fail(f"it has the key {brief(key)} twice" if key else "a key has no name")
        kind, start = cursor.integer("<I", "a value's type"), cursor.at
        metadata[key] = cursor.value(kind, f"the key {brief(key)}")
        kinds[key] = (kind, *struct.unpack_from("<I", content, start)) if kind == _ARRAY else (kind,)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment!r:.60}, but must be a power of two")
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    start = _aligned(cursor.at, alignment)
    end = _check_offsets(infos, start, alignment, cursor)
    if infos and len(content) > end:
        cursor.fail(f"it holds {len(content) - end:,} bytes after its last tensor, which belong to none")
    tensors = tuple(
        TensorInfo(info.name, info.shape, info.type_name, start + info.start, info.num_bytes) for info in infos
    )
    return GgufHeader(version, metadata, tensors, kinds)


def brief(text: str) -> str:
    """Quote and escape a name of the file for a message, shortened to 60 characters."""
    return repr(text if len(text) <= 60 else text[:60] + "...")


class _Cursor:
    """A position in the file, which advances with every read. Raises ModelLoadError beyond the end."""

    def __init__(self, content: memoryview, place: str) -> None:
        self.content, self.place, self.at, self.size = content[:MAX_BYTES], place, 0, len(content)
        self._elements = 0

    def fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self.place}: {what}. {REMEDY}")

    def need(self, num_bytes: int, what: str) -> int:
        """Advance by so many bytes, and return where they begin."""
        start, left = self.at, len(self.content) - self.at
        if num_bytes > left:
            if len(self.content) == MAX_BYTES:
                self.fail(f"its header is longer than {MAX_BYTES:,} bytes, which no such file's is")
            self.fail(f"it ends within its header, in {what}: {num_bytes:,} bytes are needed and {left:,} are left")
        self.at += num_bytes
        return start

    def integer(self, layout: str, what: str) -> int:
        number: int = struct.unpack_from(layout, self.content, self.need(struct.calcsize(layout), what))[0]
        return number

    def count(self, what: str) -> int:
        number = self.integer("<Q", f"the number of {what}")
        if number > MAX_ENTRIES:
            self.fail(f"it says that it has {number:,} {what}, and no such file has more than {MAX_ENTRIES:,}")
        return number

    def text(self, what: str, limit: int = MAX_BYTES) -> str:
        length: int = _LENGTH.unpack_from(self.content, self.need(_LENGTH.size, what))[0]
        if length > limit:
            self.fail(f"{what} is {length:,} bytes long, and may be {limit:,}")
        start = self.need(length, what)
        try:
            return str(self.content[start : self.at], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        return self._numbers(kind, 1, what)[0]

    def _array(self, what: str) -> list[Any]:
        kind, count = self.integer("<I", f"the type of {what}"), self.integer("<Q", f"the length of {what}")
        if kind == _ARRAY:
            self.fail(f"{what} holds an array of arrays, which llama.cpp writes none of")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            self.fail(f"with {what} its arrays have {self._elements:,} elements; no such file has {MAX_ELEMENTS:,}")
        if kind == _STRING:
            return self._texts(count, what)
        return self._numbers(kind, count, what)

    def _texts(self, count: int, what: str) -> list[str]:
        """Read so many texts: a vocabulary has 100,000, so without a call for each."""
        content, at, end, texts = self.content, self.at, len(self.content), list[str]()
        try:
            for _ in range(count):
                start = at + _LENGTH.size
                at = start + _LENGTH.unpack_from(content, at)[0]
                texts.append(str(content[start:at], "utf-8"))
        except (struct.error, UnicodeDecodeError):
            at = end + 1
        if at > end:
            return [self.text(what) for _ in range(count)]  # one by one, which says what is wrong
        self.at = at
        return texts

    def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
        if kind != _BOOL and kind not in _NUMBERS:
            self.fail(f"{what} has a value of type {kind}, which GGUF does not define")
        layout = np.dtype("<" + _NUMBERS.get(kind, "u1"))
        start = self.need(count * layout.itemsize, what)
        numbers: list[Any] = np.frombuffer(self.content, layout, count, start).tolist()
        if kind != _BOOL:
            return numbers
        if any(number > 1 for number in numbers):
            self.fail(f"{what} is neither true nor false")
        return [bool(number) for number in numbers]


def _version(cursor: _Cursor) -> int:
    start = cursor.need(4, "its first four bytes")
    magic = bytes(cursor.content[start : cursor.at])
    if magic != b"GGUF":
        cursor.fail(_OTHER_FORMATS.get(magic, f"it is no GGUF file: it begins with {magic!r}"))
    version = cursor.integer("<I", "its version")
    if version & 0xFFFF == 0 and version:
        cursor.fail(_OTHER_FORMATS[b"FUGG"])
    if version not in (2, 3):
        cursor.fail(f"its version of GGUF is {version}, and forerun reads 2 and 3")
    return version


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    """Read a tensor's entry, whose `start` counts from the first byte of all tensors."""
    name = cursor.text("a tensor's name", MAX_NAME)
    what = f"tensor {brief(name)}"
    num_dimensions = cursor.integer("<I", f"the shape of {what}")
    if not 1 <= num_dimensions <= 4:
        cursor.fail(f"{what} has {num_dimensions:,} dimensions, but must have 1 to 4")
    shape = tuple(cursor.integer("<Q", f"the shape of {what}") for _ in range(num_dimensions))[::-1]
    if min(shape) == 0:
        cursor.fail(f"{what} has the shape {list(shape)}, which holds nothing")
    type_name, num_bytes = tensor_bytes(cursor.integer("<I", f"the type of {what}"), shape, what, cursor.place, REMEDY)
    return TensorInfo(name, shape, type_name, cursor.integer("<Q", f"the offset of {what}"), num_bytes)


def _check_offsets(infos: list[TensorInfo], start: int, alignment: int, cursor: _Cursor) -> int:
    """Check that tensors lie one behind the other, each aligned, all within the file, and that names are unique, as
    llama.cpp does. Returns where their data ends in the file."""
    offset, names = 0, set[str]()
    for info in infos:
        what = f"tensor {brief(info.name)}"
        if not info.name or info.name in names:
            cursor.fail(f"it has the {what} twice" if info.name else "a tensor has no name")
        names.add(info.name)
        if info.start != offset:
            cursor.fail(f"{what} lies at {info.start:,} instead of {offset:,}, where the tensor before it ends")
        if start + offset + info.num_bytes > cursor.size:
            missing = start + offset + info.num_bytes - cursor.size
            cursor.fail(f"it is cut off: {what} ends {missing:,} bytes behind the file's end")
        offset = _aligned(offset + info.num_bytes, alignment)
    return start + offset


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
