"""How today's code names what the golden files show. A field keeps the name that it has in the files."""

from __future__ import annotations

import ctypes
from typing import Any

from forerun.kernels.cpu.library import (
    WEIGHT_KINDS,
    ExpertsStruct,
    LatentStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    RecurrenceStruct,
)

RENAMED: dict[str, str] = {}
"""Name in the golden files -> name today, such as "recurrence.mixed": "recurrence.in_proj" for a field of a structure,
"kind.MXFP4" for a weight's format. `meaning.py` has those of a spec."""

MODEL, LAYER, RECURRENCE, EXPERTS, LATENT, LINEAR = (
    *(ModelStruct, LayerStruct, RecurrenceStruct, ExpertsStruct, LatentStruct, LinearStruct),
)
BELOW: dict[str, tuple[str, type[ctypes.Structure]]] = {
    "layer.recurrence": ("recurrence", RECURRENCE),
    "layer.experts": ("experts", EXPERTS),
    "layer.latent": ("latent", LATENT),
}
"""Pointers to one structure."""


def golden_name(of: str, name: str) -> str:
    """Return the name in the golden files. of: "layer", "experts", "kind" and the like."""
    now = f"{of}.{name}"
    return next((old for old, new in RENAMED.items() if new == now), now).partition(".")[2]


def value(of: str, struct: ctypes.Structure, name: str) -> Any:
    """Return a field of a structure by its name in the golden files."""
    return getattr(struct, RENAMED.get(f"{of}.{name}", f"{of}.{name}").partition(".")[2])


def kind_name(kind: int) -> str:
    """Return the name of a weight's format."""
    return golden_name("kind", next(name for name, number in WEIGHT_KINDS.items() if number == kind))


def structure(decoder: Any) -> ctypes.Structure:
    """Return `ForerunModel` of a native decoder."""
    found: ctypes.Structure = decoder.struct
    return found


def layers(decoder: Any) -> list[ctypes.Structure]:
    """Return each layer's `ForerunLayer`."""
    struct = structure(decoder)
    pointer = ctypes.cast(value("model", struct, "layers"), ctypes.POINTER(LAYER))
    return [pointer[index] for index in range(value("model", struct, "num_layers"))]


def embedding(decoder: Any) -> ctypes.Structure:
    """Return `ForerunLinear` of the embedding."""
    found: ctypes.Structure = decoder.embedding.struct
    return found


def library(decoder: Any) -> Any:
    """Return the native library."""
    return decoder.library
