"""The decoder of each model family: native, Triton or PyTorch kernels, and the Llama family's or Transformers'
modules."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.config import KERNELS_VARIABLE, TRITON
from forerun.errors import UnsupportedModelError
from forerun.kernels.cpu import native_for
from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.triton.availability import check_device, is_triton_selected
from forerun.models.attention.native import NativeAttention
from forerun.models.general import GeneralDecoder
from forerun.models.linear import FloatMaker
from forerun.models.llama.decoder import LlamaDecoder
from forerun.models.llama.native import NativeLlamaDecoder
from forerun.models.loading.quantise import QuantisedMaker
from forerun.models.model import Decoder

if TYPE_CHECKING:
    from forerun.models.llama.triton import TritonLlamaDecoder

_NATIVE_TYPES = (torch.bfloat16, torch.float32)


def library_for(device: torch.device, dtype: torch.dtype, *, is_quantised: bool) -> Library | None:
    """Return the native library if it computes models of this kind: bfloat16 and quantized weights on the CPU. Weights
    in float32 and float64 are multiplied by PyTorch's oneDNN products, and the library is not even searched for."""
    if dtype not in _NATIVE_TYPES or (dtype == torch.float32 and not is_quantised):
        return None
    return native_for(device)


def make_decoder(
    hf: Any, dtype: torch.dtype, kind: str, maker: QuantisedMaker | None, output_tokens: Tensor | None = None
) -> Decoder:
    """Return the decoder of a loaded Transformers model, on its device. If FORERUN_KERNELS selects Triton, no other
    kernels are used.

    Args:
        dtype: of everything that is not quantised.
        kind: "llama" or "general".
        maker: of quantised layers; None: weights are as they are.
        output_tokens: int64, those whose rows of the output layer are computed, of the Llama family's decoders only;
            None for all.

    Raises:
        ConfigError: the Triton kernels are selected, but unavailable for this device or dtype.
        UnsupportedModelError: they are selected, but do not compute this model.
    """
    if is_triton_selected():
        return _by_triton(hf, dtype, kind, maker, output_tokens)
    library = library_for(hf.device, dtype, is_quantised=maker is not None)
    if kind == "general":
        attention = None if library is None else NativeAttention(library, dtype, dtype)
        return GeneralDecoder(hf, maker, attention)
    if library is None:
        return LlamaDecoder(hf, maker, output_tokens)
    return NativeLlamaDecoder(hf, library, maker or FloatMaker(partial(NativeLinear, library)), dtype, output_tokens)


def _by_triton(
    hf: Any, dtype: torch.dtype, kind: str, maker: QuantisedMaker | None, output_tokens: Tensor | None
) -> TritonLlamaDecoder:
    check_device(hf.device, dtype)
    if kind != "llama":
        raise UnsupportedModelError(
            f"{KERNELS_VARIABLE} is {TRITON}, but its kernels compute the Llama family (Llama, Mistral, Qwen2, Qwen3), "
            f"not {hf.config.model_type}. Unset {KERNELS_VARIABLE} to compute it in PyTorch."
        )
    from forerun.models.llama.triton import TritonLlamaDecoder  # it imports triton

    return TritonLlamaDecoder(hf, dtype, maker, output_tokens)
