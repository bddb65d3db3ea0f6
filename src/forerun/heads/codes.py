"""A head's matrices at 8 bits, as tensors of its file: NAME.codes [out, in] uint8 and NAME.scale [out, 1] float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from forerun.errors import ConfigError, ModelLoadError
from forerun.files.json_file import ErrorType
from forerun.kernels.quantise import quantise_int8
from forerun.kernels.quantised_weight import QuantisedWeight

_CODES, _SCALE = ".codes", ".scale"
_ZERO = 128


def has_codes(names: Iterable[str]) -> bool:
    """Whether any of these tensors of a file is in codes."""
    return any(name.endswith(_CODES) for name in names)


def in_codes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with every matrix as codes and scales, one scale a row; vectors stay numbers.

    Raises:
        ConfigError: a matrix cannot be quantised.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            found[name] = tensor
            continue
        try:
            weight = quantise_int8(tensor, f"the tensor {name}")
        except ModelLoadError as failure:
            raise ConfigError(str(failure)) from None
        found |= {name + _CODES: weight.codes, name + _SCALE: weight.scale}
    return found


def take_codes(tensors: dict[str, Tensor], place: str, error: ErrorType, remedy: str) -> dict[str, QuantisedWeight]:
    """The matrices in codes by name, taken out of `tensors`.

    Raises:
        error: one lacks its scales, is there as numbers too, or has a shape or type that cannot be.
    """
    names = sorted(key.removesuffix(_CODES) for key in tensors if key.endswith(_CODES))
    found = {}
    for name in names:
        if name in tensors or name + _SCALE not in tensors:
            raise error(f"{place}: the tensor {name} must be either numbers, or codes with scales. {remedy}")
        codes, scale = tensors.pop(name + _CODES), tensors.pop(name + _SCALE)
        fits = codes.dim() == 2 and scale.shape == (len(codes), 1)
        if not fits or codes.dtype != torch.uint8 or scale.dtype != torch.float32:
            raise error(
                f"{place}: the tensor {name} has codes {list(codes.shape)} of {codes.dtype} and scales "
                f"{list(scale.shape)} of {scale.dtype}, but must have a scale of float32 a row of uint8. {remedy}"
            )
        if not bool(scale.isfinite().all()):
            raise error(f"{place}: the tensor {name} has a scale that is NaN or infinite. {remedy}")
        found[name] = QuantisedWeight(8, codes, _ZERO, scale, None, None)
    return found
