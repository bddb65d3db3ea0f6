"""Opens GGUF files: checked and mapped into memory. Tensors are read when they are used."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from forerun.errors import ModelLoadError
from forerun.models.loading.gguf import SUFFIX, part_paths
from forerun.models.loading.gguf.header import REMEDY, GgufHeader, brief, read_header
from forerun.models.loading.gguf.tensors import GgufTensor
from forerun.utils.foreign_errors import as_memory_errors
from forerun.utils.json_file import Fields, open_regular


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


def _open(path: Path) -> tuple[GgufHeader, dict[str, GgufTensor]]:
    """Map a file into memory, read-only, and return its header and its tensors."""
    try:
        with as_memory_errors(str(path)), open_regular(path) as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as failure:  # ValueError: a path with a null character, an empty file, or a pipe
        raise ModelLoadError(
            f"{path}: it cannot be read: {getattr(failure, 'strerror', 0) or failure}. {REMEDY}"
        ) from None
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
            f"of {count}. Give all parts the names that they were published under, such as NAME-00001-of-00003{SUFFIX}."
        )
    if total != (expected := first.metadata.get("split.tensors.count")):
        raise ModelLoadError(
            f"{path}: it is part of a model of {total!r:.20} tensors, and the first part of one of {expected!r:.20}. "
            f"{REMEDY}"
        )
