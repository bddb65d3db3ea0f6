"""The blocks of a GGUF tensor as codes and scales, without another rounding."""

from __future__ import annotations

import numpy as np
import torch

from forerun.errors import ModelLoadError
from forerun.gguf_format.header import REMEDY
from forerun.gguf_format.tensor import GgufTensor
from forerun.kernels.quantised_weight import GROUP, CodeForm, QuantisedWeight

_KEPT = {"Q8_0": (8, 128), "Q4_0": (4, 8), "Q4_1": (4, 0)}
"""Types whose blocks are taken as they are -> bits, and the code that stands for 0 or for the minimum."""


def code_form(tensor: GgufTensor) -> CodeForm | None:
    """The form of what `from_gguf` gives."""
    if tensor.type_name not in _KEPT or len(tensor.shape) != 2:
        return None
    return CodeForm(*_KEPT[tensor.type_name], GROUP, tensor.type_name == "Q4_1")


def from_gguf(tensor: GgufTensor) -> QuantisedWeight | None:
    """The numbers of a matrix in Q8_0, Q4_0 or Q4_1, to the last bit; None for other types.

    Raises:
        ModelLoadError: a scale is NaN or infinite.
    """
    form = code_form(tensor)
    if form is None:
        return None
    blocks = tensor.blocks.reshape(tensor.shape[0], tensor.shape[1] // GROUP, -1)
    num_scales = 2 if form.has_minimum else 1
    scales = _copy(blocks[..., : 2 * num_scales]).view(np.float16)
    if not np.isfinite(scales).all():
        raise ModelLoadError(f"tensor {tensor.name} has a scale that is NaN or infinite. {REMEDY}")
    packed = blocks[..., 2 * num_scales :]
    # int8 about 0 becomes uint8 about 128; the low halves of a block's bytes stand before the high ones
    if form.bits == 8:
        codes = packed ^ np.uint8(128)
    else:
        codes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], -1)
    return QuantisedWeight(
        form.bits,
        torch.from_numpy(codes.reshape(tensor.shape)),
        form.zero,
        torch.from_numpy(_copy(scales[..., 0])),
        torch.from_numpy(_copy(scales[..., 1])) if num_scales == 2 else None,
        GROUP,
    )


def _copy(array: np.ndarray) -> np.ndarray:
    """A contiguous array that can be written."""
    return np.array(array, order="C", copy=True)
