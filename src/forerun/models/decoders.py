"""The decoder of each model family: forerun's own, or Transformers' modules for all others.

The entries of `families/table.py` are computed by `fused/decoder.py` and `fused/native.py`, and those that are like
Llama's by `fused/triton.py`. All other families run in `general.py` without further code, if Transformers computes
their attention through its attention interface.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from forerun.config import AUTO, KERNELS_VARIABLE, KV_CACHE_DTYPES, TRITON
from forerun.errors import ConfigError, UnsupportedModelError
from forerun.kernels.cpu import is_triton_selected
from forerun.kernels.cpu.linear import NativeLinear
from forerun.models.attention.native import NativeAttention
from forerun.models.families.table import description_of
from forerun.models.fused.native import NativeDecoder
from forerun.models.fused.parts import state_layout
from forerun.models.linear import FloatMaker, Maker
from forerun.models.loading.configuration import OUTPUT_TOKENS, refuse_unservable
from forerun.models.loading.source import ModelSource
from forerun.models.loading.weight_maker import WeightMaker
from forerun.models.model import Decoder
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.weight_plan import WeightPlan, library_for
from forerun.utils.deferred import DeferredModule

if TYPE_CHECKING:
    from forerun.models import general
    from forerun.models.fused import decoder as fused
else:
    general = DeferredModule("forerun.models.general")
    fused = DeferredModule("forerun.models.fused.decoder")

Kind = Literal["auto", "fused", "general"]


def llama_refusal(config: Any) -> str | None:
    """Return the reason why a Transformers configuration is not of the Llama family; None if it is."""
    found = description_of(config)
    if found.served is not None and not found.served.is_llama:
        return f"model type {config.model_type!r} with these options adds to Llama's layers"
    return found.refusal


def served_kind(kind: Kind, source: ModelSource, config: Any) -> tuple[Kind, DecoderSpec | None]:
    """Return "fused" or "general", and the decoder if the first can compute it. A load calls this once: the decoder is
    handed on from here.

    Raises:
        ConfigError: the fused decoder is requested for a model that it does not serve.
        UnsupportedModelError: no decoder serves it, or not with its reduced output vocabulary.
    """
    found = refuse_unservable(config, source.name)
    reason = found.refusal
    spec = found.served
    if kind == "general" and spec is not None and state_layout(spec) is not None:
        raise UnsupportedModelError(
            f"{source.name} ({config.model_type}) has recurrent layers, which only the fused decoder rolls back. Leave "
            "kind='general' out."
        )
    if kind == "fused" and reason:
        raise ConfigError(f"forerun's decoder cannot serve {source.name}: {reason}. Use kind='general'.")
    if (kind == "general" or reason) and source.output_tokens(config) is not None:
        raise UnsupportedModelError(
            f"{source.name} proposes a part of its vocabulary ({OUTPUT_TOKENS} in its configuration), which only the "
            f"fused decoder serves{': ' + reason if reason else ''}. Remove that key to compute all tokens."
        )
    if kind == "auto":
        kind = "general" if reason else "fused"
    return kind, spec


def cache_dtype_of(kv_cache_dtype: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the number format of a model's keys and values, which the reference kernels choose themselves.

    Args:
        kv_cache_dtype: one of KV_CACHE_DTYPES.
        dtype: of everything in the model that is not quantized.

    Raises:
        ConfigError: there is no such format, or other kernels than the native ones compute the model.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype is {kv_cache_dtype!r}, but must be one of {', '.join(KV_CACHE_DTYPES)}.")
    if kv_cache_dtype == AUTO:
        return dtype
    if is_triton_selected() or library_for(device, dtype) is None:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, but only the native CPU kernels store keys and values in a format "
            f"of choice, and they do not compute {name} on {device} here. Leave kv_cache_dtype out; or see `forerun "
            "info` for which kernels run and why."
        )
    found: torch.dtype = getattr(torch, kv_cache_dtype)
    return found


def make_decoder(
    hf: Any,
    plan: WeightPlan,
    maker: WeightMaker | None,
    output_tokens: Tensor | None = None,
    kv_cache_dtype: str = AUTO,
    *,
    spec: DecoderSpec | None = None,
) -> Decoder:
    """Return the decoder of a loaded Transformers model, on its device. If FORERUN_KERNELS selects Triton, no other
    kernels are used.

    Args:
        maker: of its layers; None: its weights are numbers, as they are.
        spec: of the model that a fused decoder computes.
        output_tokens: int64, those whose rows of the output layer are computed, of the fused decoders only;
            None for all.
        kv_cache_dtype: of `cache_dtype_of`.

    Raises:
        ConfigError: the Triton kernels are selected, but unavailable for this device or dtype; or as `cache_dtype_of`.
        UnsupportedModelError: they are selected, but do not compute this model.
    """
    cache_dtype = cache_dtype_of(kv_cache_dtype, hf.device, plan.dtype)
    if is_triton_selected():
        return _by_triton(hf, plan, maker, output_tokens, spec)
    if plan.library is None:
        if plan.is_fused:
            return fused.FusedDecoder(hf, maker, output_tokens, spec)
        return general.GeneralDecoder(hf, maker)
    made: Maker | None = maker
    if maker is None and plan.multiplies_floats:
        made = FloatMaker(partial(NativeLinear, plan.library))
    if plan.is_fused:
        assert made is not None
        return NativeDecoder(hf, plan.library, made, cache_dtype, output_tokens, spec)
    return general.GeneralDecoder(hf, made, NativeAttention(plan.library, plan.dtype, cache_dtype))


def _by_triton(
    hf: Any, plan: WeightPlan, maker: WeightMaker | None, output_tokens: Tensor | None, spec: DecoderSpec | None
) -> Decoder:
    triton_backend().check_device(hf.device, plan.dtype)
    if spec is None or not plan.is_fused or not spec.is_llama:
        raise UnsupportedModelError(
            f"{KERNELS_VARIABLE} is {TRITON}, but its kernels compute the Llama family (Llama, Mistral, Qwen2, Qwen3), "
            f"not {hf.config.model_type}. Unset {KERNELS_VARIABLE} to compute it in PyTorch."
        )
    made: Decoder = triton_backend().make_decoder(hf, plan.dtype, maker, output_tokens, spec)
    return made


def triton_backend() -> Any:
    """Return the module `fused/triton_backend.py`: nothing else finds the Triton kernels."""
    return import_module("forerun.models.fused.triton_backend")
