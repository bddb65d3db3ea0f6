"""The keys of a GGUF file's metadata that describe the model; their names begin with its architecture's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import numpy as np

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.files.json_file import REQUIRED, Fields
from forerun.gguf_format import GgufFile
from forerun.gguf_format.header import REMEDY

D = TypeVar("D")


def metadata_of(file: GgufFile) -> Fields:
    """All keys."""
    return Fields(str(file.path), file.metadata, ModelLoadError, REMEDY)


class ModelFields:
    """The keys "ARCHITECTURE.KEY": each method gives the value of KEY, or raises as the method of `Fields` does."""

    def __init__(self, fields: Fields, architecture: str) -> None:
        self.fields, self.architecture = fields, architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def __contains__(self, key: str) -> bool:
        return self.name(key) in self.fields

    def integer(self, key: str, default: D = REQUIRED, low: float = 0) -> int | D:
        """A whole number of `low` or more."""
        return self.fields.integer(self.name(key), default, low)

    def number(self, key: str, default: D = REQUIRED, low: float = 0) -> float | D:
        """A number of `low` or more: the shortest decimal that float32 rounds to the stored one, as the model's
        configuration had it."""
        value = self.fields.number(self.name(key), default, low)
        if isinstance(value, float) and float(np.float32(value)) == value:
            return float(str(np.float32(value)))
        return value

    def string(self, key: str, default: D = REQUIRED) -> str | D:
        return self.fields.string(self.name(key), default)

    def of_all_layers(self, key: str, default: D = REQUIRED) -> int | D:
        """A count of 1 or more that files may give once or for every layer.

        Raises:
            UnsupportedModelError: it differs from layer to layer.
        """
        if not isinstance(self.fields.values.get(self.name(key)), list):
            return self.integer(key, default, low=1)
        each = set(self.fields.list_of(self.name(key), int))
        if len(each) != 1:
            self.refuse(f"{self.name(key)} differs from layer to layer")
        value = Fields(self.fields.place, {self.name(key): each.pop()}, self.fields.error, self.fields.remedy)
        return value.integer(self.name(key), low=1)

    def refuse_other(self, neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Raises UnsupportedModelError where a key has a value that is not one of those given for it."""
        for key, values in neutral.items():
            value: Any = self.fields.values.get(self.name(key))
            if value is not None and value not in values:
                self.refuse(f"{self.name(key)} is {value!r:.60}")

    def refuse(self, what: str) -> NoReturn:
        """Raises UnsupportedModelError for something that is valid, but that no Transformers model of the architecture
        computes."""
        raise UnsupportedModelError(
            f"{self.fields.place}: {what}, which Transformers' {self.architecture} does not compute. Serve it with "
            "llama.cpp, or give the model's Transformers folder or hub id."
        )
