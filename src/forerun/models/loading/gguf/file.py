"""A GGUF file: opened, checked and mapped into memory. Tensors are read when they are used."""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.loading.gguf.header import REMEDY, GgufHeader, read_header
from forerun.models.loading.gguf.tensors import GgufTensor

SUFFIX = ".gguf"
_SPLIT_NAME = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """An open GGUF file.

    Attributes:
        path: where it is.
        metadata: by key, values as int, float, bool, str, or lists of one of them.
        tensors: by name. Their blocks keep the file mapped.
        kinds: of the metadata's values, as `GgufHeader.kinds`.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    kinds: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Open a file and check its header. The file must not be changed while it is open.

        Raises:
            ModelLoadError: it cannot be read, is no GGUF file, damaged, or cut off.
            UnsupportedModelError: it is one of several parts, or holds tensors of a type that is not read here.
        """
        path = Path(path)
        content = _mapped(path)
        header = read_header(memoryview(content), str(path))
        _refuse_part(path, header)
        packed = np.frombuffer(content, np.uint8)
        tensors = {
            info.name: GgufTensor(
                info.name,
                info.shape,
                info.type_name,
                packed[info.start : info.start + info.num_bytes].reshape(*info.shape[:-1], -1),
            )
            for info in header.tensors
        }
        return cls(path, MappingProxyType(dict(header.metadata)), MappingProxyType(tensors), header.kinds)


def _mapped(path: Path) -> mmap.mmap:
    """Map a regular file into memory, read-only."""
    try:
        # opening a pipe would wait for its other end
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is not a regular file")
            if os.fstat(descriptor).st_size == 0:
                raise ValueError("it is empty")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as failure:  # ValueError: a path with a null character
        reason = getattr(failure, "strerror", None) or failure
        raise ModelLoadError(f"{path}: it cannot be read: {reason}. {REMEDY}") from None


def _refuse_part(path: Path, header: GgufHeader) -> None:
    """Raise UnsupportedModelError for one of several files of a model, by metadata or by name."""
    named = _SPLIT_NAME.search(path.name)
    num_parts = header.metadata.get("split.count", int(named[1]) if named else 1)
    if num_parts not in (0, 1):
        raise UnsupportedModelError(
            f"{path}: it is one of {num_parts} parts of a model, which forerun does not put together. Join them: "
            "llama-gguf-split --merge FIRST-PART MODEL.gguf."
        )
