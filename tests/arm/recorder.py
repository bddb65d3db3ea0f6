"""Record calls of the native library while tests run: `pytest -p arm.recorder`, by `make arm`.

What a call reads and writes is copied into one stretch of memory as it lies at the address `BASE`, pointers included,
before and after the call. `replay.cpp` puts it there on another processor, calls the same function, and compares all.
"""

from __future__ import annotations

import ctypes
import gc
import os
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from forerun.kernels.cpu import native
from forerun.kernels.cpu.library import HEADER, Library
from forerun.kernels.cpu.page_layout import PAGE

BASE = 0x20_0000_0000
VARIABLE = "FORERUN_RECORDED"
"""Environment variable: the file to write to, behind what is there."""
INSTRUCTIONS = "avx2"
"""The set whose calls are recorded: its sums are fused, as those of ARM64."""
FUNCTIONS = (
    *("linear", "forward_layers", "head", "attention", "eagle", "fuse", "context", "greedy_chains", "argmax", "topk"),
    *("pack", "pack_blocks", "unpack", "unpack_words"),
)
_MOST_ROWS = 17
_EACH = 1
"""Calls of one form that are recorded of each test."""
_MOST = 10
"""Calls of one function that are."""
_PACKING = ("pack", "pack_blocks", "unpack", "unpack_words")
_MOST_PACKING = 40
"""Calls of one of these that are recorded of all tests: no instruction set has an own."""
_LARGEST = 1 << 25
"""Bytes of an array; what is larger is memory that parts are cut from."""
_GAP = 64
"""Bytes between arrays, which must stay as they are."""
_FILLER = 0xA5
_COUNTS = {"layers": "num_layers", "gate": "num_experts", "up": "num_experts", "down": "num_experts"}
"""By field, the field of the same structure that says how many a pointer is to; else one."""


class UnknownMemoryError(Exception):
    """No array is known at an address."""


class _Extents:
    """Where arrays lie that Python knows now: tensors, and NumPy's arrays that something refers to."""

    def __init__(self) -> None:
        objects = gc.get_objects()
        tensors = [each for each in objects if isinstance(each, torch.Tensor)]
        arrays = [each for each in gc.get_referents(*objects) if isinstance(each, np.ndarray)]
        found = [
            (each.data_ptr(), each.nbytes) for each in tensors if each.device.type == "cpu" and each.is_contiguous()
        ]
        found += [(each.ctypes.data, each.nbytes) for each in arrays]
        self._empty = {start for start, size in found if not size}
        self._found = list[tuple[int, int]]()  # by start; none lies in another
        end = 0
        for start, size in sorted(found, key=lambda each: (each[0], -each[1])):
            if 0 < size < _LARGEST and start + size > end:
                self._found.append((start, size))
                end = start + size

    def of(self, address: int) -> tuple[int, int]:
        """Return the start and size of the array that an address is in, which is part of no other."""
        index = bisect_right(self._found, address, key=lambda each: each[0]) - 1
        start, size = self._found[index] if index >= 0 else (0, 0)
        if address < start + size:
            return start, size
        if address in self._empty:
            return address, 0
        raise UnknownMemoryError(hex(address))


class _Image:
    """Copies of arrays and structures, side by side, whose pointers are to the copies."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._extents = _Extents()
        self._places: dict[tuple[int, int], int] = {}  # by start and size
        self._pointers: dict[int, int] = {}  # by the place of a pointer, what it becomes
        self.used = _GAP

    def bytes(self) -> bytearray:
        """Return what lies there now."""
        found = bytearray([_FILLER]) * self.used
        for (start, size), place in self._places.items():
            found[place : place + size] = ctypes.string_at(start, size)
        for place, pointer in self._pointers.items():
            found[place : place + 8] = struct.pack("<Q", pointer)
        return found

    def array(self, address: int | None, size: int | None = None) -> int:
        """Return where the copy of an array is. size: bytes from the address on, if the array may not be known."""
        if not address:
            return 0
        start, size = self._extents.of(address) if size is None else (address, size)
        if (start, size) not in self._places:
            self._places[start, size] = self.used
            self.used += -(-(size + _GAP) // _GAP) * _GAP
        return BASE + self._places[start, size] + address - start

    def structures(self, kind: str, address: int | None, count: int, outer: Any = None) -> int:
        """Return where the copies of structures of a kind are, side by side. outer: the model that they are of."""
        if not address:
            return 0
        cls = HEADER._classes[kind]
        is_new = (address, count * ctypes.sizeof(cls)) not in self._places
        there = self.array(address, count * ctypes.sizeof(cls))
        for index in range(count if is_new else 0):
            offset = index * ctypes.sizeof(cls)
            self._fields(kind, cls.from_address(address + offset), there - BASE + offset, outer)
        return there

    def _fields(self, kind: str, own: Any, place: int, outer: Any) -> None:
        if kind == "ForerunModel":
            outer = own
        for name, of in HEADER.fields[kind]:
            at, value = place + getattr(type(own), name).offset, getattr(own, name)
            if of in HEADER.fields:
                self._fields(of, value, at, outer)
            elif of.endswith("*"):
                self._pointers[at] = self._pointed(kind, own, name, of[:-1], value, outer)

    def _pointed(self, kind: str, own: Any, name: str, of: str, value: int | None, outer: Any) -> int:
        if not value or (kind == "ForerunLinear" and not own.out_features):
            return 0
        if (kind, name) == ("ForerunRows", "pages"):
            return self._pages(own)
        if (kind, name) == ("ForerunLinear", "blocks"):
            return self.array(value, 4 * -(-own.out_features // 16))
        if (kind, name) == ("ForerunRows", "states"):
            return self.structures(of, value, max(_int32s(own.sequence, own.num_rows)) + 1)
        if (kind, name) == ("ForerunLinear", "packed") and not own.blocks:
            return self.array(value, self._library.packed_bytes(own.kind, own.out_features, own.in_features, own.span))
        if kind == "ForerunExperts" and name == "num_read":
            return self.array(value, 8)
        if of in HEADER.fields:
            count = outer.num_heads if kind == "ForerunLatent" else getattr(own, _COUNTS.get(name, ""), 1)
            return self.structures(of, value, count, outer)
        return self.array(value)

    def _pages(self, rows: Any) -> int:
        sequences = max(_int32s(rows.sequence, rows.num_rows)) + 1
        count = _int32s(rows.page_start, sequences + 1)[-1]
        there = self.array(rows.pages, 8 * count)
        for index, page in enumerate((ctypes.c_uint64 * count).from_address(rows.pages)):
            self._pointers[there - BASE + 8 * index] = self.array(page)
        return there


def _int32s(address: int, count: int) -> Sequence[int]:
    return list((ctypes.c_int32 * count).from_address(address))


class Recorder:
    """Writes calls to a file.

    Attributes:
        written: by function, how many.
        unknown: by function, those of which some memory was not known.
        test: the one that runs.
    """

    def __init__(self, library: Library, file: BinaryIO) -> None:
        self._library, self._file = library, file
        self._seen = Counter[object]()
        self.written = Counter[str]()
        self.unknown = Counter[str]()
        self.test = ""
        for name in FUNCTIONS:
            setattr(library, name, self._recorded(name, getattr(library, name)))

    def _recorded(self, name: str, function: Any) -> Any:
        kinds = HEADER.functions[f"forerun_{name}"][1]

        def call(*arguments: Any) -> Any:
            if self._library.instructions != INSTRUCTIONS or not self._is_new(name, arguments):
                return function(*arguments)
            try:
                image = _Image(self._library)
                given = [self._argument(image, *each) for each in zip(kinds, arguments, strict=True)]
            except UnknownMemoryError:
                self.unknown[name] += 1
                return function(*arguments)
            before = image.bytes()
            result = function(*arguments)
            self._write(name, given, before, image.bytes(), result or 0)
            return result

        return call

    def _is_new(self, name: str, arguments: Sequence[Any]) -> bool:
        numbers = [each for each in arguments if isinstance(each, int) and abs(each) < 1 << 31]
        fields = [value for each in arguments for value in _plain(each)]
        rows = [own.num_rows for own in map(_structure, arguments) if hasattr(own, "num_rows")]
        if name in ("linear", "head") and numbers[0] > _MOST_ROWS and self._seen[self.test, name]:
            return False
        if self._seen[self.test, name] >= _MOST or (name in _PACKING and self.written[name] >= _MOST_PACKING):
            return False
        key = (self.test, name, *numbers, *fields, *rows)
        self._seen[key] += 1
        if self._seen[key] > _EACH:
            return False
        self._seen[self.test, name] += 1
        return True

    def _argument(self, image: _Image, kind: tuple[str, str], value: Any) -> int:
        of = kind[1]
        if of == "float":
            return int(struct.unpack("<I", struct.pack("<f", value))[0])
        if not of.endswith("*"):
            return int(value)
        if (own := _structure(value)) is not None:
            return image.structures(of[:-1], ctypes.addressof(own), 1)
        if isinstance(value, ctypes.Array):
            return image.array(ctypes.addressof(value), max(8, ctypes.sizeof(value)))
        return image.array(getattr(value, "value", value))

    def _write(self, name: str, given: Sequence[int], before: bytearray, after: bytearray, result: int) -> None:
        changed = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)) // _GAP
        lines = np.unique(changed)
        title = f"{self.test} {name}".encode()
        self._file.write(struct.pack("<II", len(title), len(given)) + title + struct.pack("<I", FUNCTIONS.index(name)))
        self._file.write(struct.pack(f"<{len(given)}q", *given) + struct.pack("<qQQ", result, len(before), len(lines)))
        self._file.write(before)
        for line in lines:
            self._file.write(struct.pack("<Q", line * _GAP) + bytes(after[line * _GAP : (line + 1) * _GAP]))
        self.written[name] += 1


def _structure(argument: Any) -> Any:
    """Return the structure that an argument points to, or None."""
    own = getattr(argument, "_obj", argument)
    own = own.contents if isinstance(own, ctypes._Pointer) else own
    return own if isinstance(own, ctypes.Structure) else None


def _plain(argument: Any) -> Iterator[object]:
    own = _structure(argument)
    if type(own).__name__ != "RowsStruct" and own is not None:
        for name, kind in own._fields_:
            if kind in (ctypes.c_int32, ctypes.c_int64):
                yield getattr(own, name)


_recorder: Recorder | None = None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    global _recorder
    library = native()
    assert library is not None and INSTRUCTIONS in library.supported and PAGE % 16 == 0
    library.use_instructions(INSTRUCTIONS)
    _recorder = Recorder(library, Path(os.environ[VARIABLE]).open("ab"))  # noqa: SIM115


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is there before any test is no array of a test


def pytest_runtest_setup(item: pytest.Item) -> None:
    assert _recorder is not None
    _recorder.test = item.nodeid.rpartition("/")[2]
    gc.freeze()  # nor what others left, which would be looked through at each call


def pytest_sessionfinish(session: pytest.Session) -> None:
    assert _recorder is not None
    _recorder._file.close()
    print("\nrecorded:", ", ".join(f"{count} {name}" for name, count in sorted(_recorder.written.items())))
    if _recorder.unknown:
        print("of memory that is not known:", dict(_recorder.unknown))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
