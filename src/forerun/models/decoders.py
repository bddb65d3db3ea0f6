"""Which decoder serves a model: native kernels or PyTorch, the Llama family's or Transformers' modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.native import native_for
from forerun.kernels.native.library import Library
from forerun.kernels.native_linear import NativeLinear
from forerun.models.attention.native import NativeAttention
from forerun.models.general import GeneralDecoder
from forerun.models.linear import FloatMaker, Maker
from forerun.models.llama import LlamaDecoder
from forerun.models.model import Decoder
from forerun.models.native_llama import NativeLlamaDecoder

_NATIVE_TYPES = (torch.bfloat16, torch.float32)


def library_for(device: torch.device, dtype: torch.dtype, *, is_quantised: bool) -> Library | None:
    """The native library, where it computes models of this kind: bfloat16 and codes on the CPU. Weights in float32 and
    float64 are computed in PyTorch, by oneDNN's products: for them it is not even looked for."""
    if dtype not in _NATIVE_TYPES or (dtype == torch.float32 and not is_quantised):
        return None
    return native_for(device)


def make_decoder(
    hf: Any, dtype: torch.dtype, kind: str, maker: Maker | None, output_tokens: Tensor | None = None
) -> Decoder:
    """The decoder of a loaded Transformers model, on its device.

    Args:
        dtype: of all that is not in codes.
        kind: "llama" or "general".
        maker: of quantised layers; None: weights are as they are.
        output_tokens: int64, those whose rows of the output layer are computed, of the Llama family's decoders only;
            None for all.
    """
    library = library_for(hf.device, dtype, is_quantised=maker is not None)
    if kind == "general":
        attention = None if library is None else NativeAttention(library, dtype, dtype)
        return GeneralDecoder(hf, maker, attention)
    if library is None:
        return LlamaDecoder(hf, maker, output_tokens)
    return NativeLlamaDecoder(hf, library, maker or FloatMaker(partial(NativeLinear, library)), dtype, output_tokens)
