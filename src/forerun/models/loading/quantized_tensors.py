"""Quantized weights as tensors of safetensors files: their names, and how they are read and checked.

A weight NAME is kept as NAME.codes [out, in] uint8, or, of 4 bits and an even number of inputs, NAME.packed_codes
[out, in / 2], two numbers a byte, the first in the low half; NAME.scale; NAME.minimum where it has minima. One that
Transformers holds as [in, out] has NAME.transposed in place of NAME. Scales in float32 are one per output, those in
float16 one per group of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import EllipsisType

import torch
from torch import Tensor

from forerun.errors import ModelLoadError
from forerun.kernels.quantize import GROUP, QuantizedFormat, QuantizedWeight
from forerun.models.loading.weights import Dequantized, TensorSlice
from forerun.utils.foreign_errors import REMEDY

_CODES = "codes"
_PACKED = "packed_codes"
_SCALE = "scale"
_MINIMUM = "minimum"
_KINDS = {_CODES: "U8", _PACKED: "U8", _SCALE: ("F16", "F32"), _MINIMUM: "F16"}
_TRANSPOSED = ".transposed"


def stored_tensors(name: str, weight: QuantizedWeight, *, is_transposed: bool = False) -> dict[str, Tensor]:
    """Return the tensors of one weight by name."""
    prefix = name + (_TRANSPOSED if is_transposed else "")
    packs = weight.bits == 4 and weight.shape[1] % 2 == 0
    quantized = weight.quantized[:, ::2] | (weight.quantized[:, 1::2] << 4) if packs else weight.quantized
    found = {f"{prefix}.{_PACKED if packs else _CODES}": quantized, f"{prefix}.{_SCALE}": weight.scale}
    if weight.minimum is not None:
        found[f"{prefix}.{_MINIMUM}"] = weight.minimum
    return {key: tensor.contiguous() for key, tensor in found.items()}


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The quantized weights of some files.

    Attributes:
        place: the folder, for messages.
        parts: by the weight's name, its tensors by kind, not read yet.
        transposed: names of weights that Transformers holds as [in, out].
    """

    place: str
    parts: Mapping[str, Mapping[str, TensorSlice]]
    transposed: frozenset[str]

    @classmethod
    def sort(cls, slices: Mapping[str, TensorSlice], place: str) -> tuple[QuantizedTensors, dict[str, TensorSlice]]:
        """Separate the quantized weights from the other tensors.

        Raises:
            ModelLoadError: a weight lacks a part, or one has a shape or number format that cannot be.
        """
        parts: dict[str, dict[str, TensorSlice]] = {}
        transposed = set()
        remaining = {}
        for key, each in slices.items():
            prefix, _, kind = key.rpartition(".")
            if kind not in _KINDS or not prefix.removesuffix(_TRANSPOSED).endswith("weight"):
                remaining[key] = each
                continue
            name = prefix.removesuffix(_TRANSPOSED)
            if name != prefix:
                transposed.add(name)
            if kind in parts.setdefault(name, {}) or name in slices:
                raise ModelLoadError(f"{place}: the weight {name} is there twice. {REMEDY}")
            parts[name][kind] = each
        found = cls(place, parts, frozenset(transposed))
        for name in parts:
            found._check(name)
        return found, remaining

    def shape(self, name: str) -> tuple[int, int]:
        """Return the numbers of outputs and inputs."""
        quantized = self._quantized(name).get_shape()
        return quantized[0], quantized[1] * (2 if _PACKED in self.parts[name] else 1)

    def read(self, name: str) -> QuantizedWeight | None:
        """Return the weight of a name; None if it is not stored quantized.

        Raises:
            ModelLoadError: a scale or minimum is NaN or infinite, or a value of 4 bits has more.
        """
        if name not in self.parts:
            return None
        parts = self.parts[name]
        scale = parts[_SCALE][...]
        quantized = self._quantized(name)[...]
        minimum = parts[_MINIMUM][...] if _MINIMUM in parts else None
        if not (scale.isfinite().all() and (minimum is None or minimum.isfinite().all())):
            raise ModelLoadError(f"{self.place}: the weight {name} has a scale that is NaN or infinite. {REMEDY}")
        if _PACKED in parts:
            quantized = torch.stack([quantized & 15, quantized >> 4], 2).flatten(1)
        form = self._form(name)
        if form.bits == 4 and int(quantized.max()) > 15:
            raise ModelLoadError(f"{self.place}: the weight {name} has codes of more than 4 bits. {REMEDY}")
        return QuantizedWeight(form.bits, quantized, form.zero or 0, scale, minimum, form.group)

    def form(self, name: str) -> QuantizedFormat | None:
        """Return the format of what `read` returns."""
        return self._form(name) if name in self.parts else None

    def _form(self, name: str) -> QuantizedFormat:
        parts = self.parts[name]
        has_minimum = _MINIMUM in parts
        group = GROUP if parts[_SCALE].get_dtype() == "F16" else None
        if _PACKED in parts or has_minimum:
            return QuantizedFormat(4, 0 if has_minimum else 8, group, has_minimum)
        return QuantizedFormat(8, 128, group, False)

    def slices(self, dtype: torch.dtype) -> Iterator[tuple[str, TensorSlice]]:
        """Yield the weights by the names that Transformers uses, dequantized when they are read."""
        for name in self.parts:
            shape = list(self.shape(name))
            shape = shape[::-1] if name in self.transposed else shape
            yield name, Dequantized(shape, partial(self._numbers, name, dtype))

    def _numbers(self, name: str, dtype: torch.dtype, index: EllipsisType | int) -> Tensor:
        weight = self.read(name)
        assert weight is not None
        numbers = weight.dequantize(dtype)
        return (numbers.T.contiguous() if name in self.transposed else numbers)[index]

    def _quantized(self, name: str) -> TensorSlice:
        parts = self.parts[name]
        return parts[_PACKED] if _PACKED in parts else parts[_CODES]

    def _check(self, name: str) -> None:
        parts = self.parts[name]
        if (_CODES in parts) == (_PACKED in parts) or _SCALE not in parts:
            raise ModelLoadError(f"{self.place}: the weight {name} has {', '.join(sorted(parts))} only. {REMEDY}")
        for kind, each in parts.items():
            if each.get_dtype() not in _KINDS[kind]:
                raise ModelLoadError(f"{self.place}: {kind} of the weight {name} is {each.get_dtype()}. {REMEDY}")
        if len(self._quantized(name).get_shape()) != 2 or 0 in self._quantized(name).get_shape():
            raise ModelLoadError(f"{self.place}: the weight {name} has codes that are no matrix. {REMEDY}")
        num_outputs, num_inputs = self.shape(name)
        by_group = parts[_SCALE].get_dtype() == "F16"
        expected = [num_outputs, -(-num_inputs // GROUP) if by_group else 1]
        for kind in (_SCALE, _MINIMUM):
            if kind in parts and parts[kind].get_shape() != expected:
                raise ModelLoadError(
                    f"{self.place}: {kind} of the weight {name} has shape {parts[kind].get_shape()}, and must "
                    f"have {expected}. {REMEDY}"
                )
        if not by_group and len(parts) > 2:
            raise ModelLoadError(f"{self.place}: the weight {name} has minima, and no groups. {REMEDY}")
        if not by_group and _PACKED in parts:
            raise ModelLoadError(f"{self.place}: the weight {name} has 4 bits, and no groups. {REMEDY}")
