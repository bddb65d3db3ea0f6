"""Reads the Transformers model of a source: as it is, with an adapter, or to be quantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun.config import DTYPES
from forerun.errors import ConfigError
from forerun.models.loading.lora import with_adapter
from forerun.models.loading.quantise import Quantisation, QuantisedMaker, matrices, stored_numbers, streamed
from forerun.models.loading.source import ModelSource
from forerun.models.loading.transformers_modules import read_model, rounded


def read(source: ModelSource, config: Any, dtype: str, adapter: str | Path | None, attention: str | None = None) -> Any:
    """Return the Transformers model of a source, with an adapter if there is one."""
    return _read(source, config, served_dtype(source, dtype, is_quantised=False), adapter, attention)


def read_to_quantise(
    source: ModelSource,
    config: Any,
    dtype: str,
    adapter: str | Path | None,
    quantisation: Quantisation,
    *,
    is_llama: bool,
    attention: str | None = None,
) -> tuple[Any, QuantisedMaker]:
    """Return the Transformers model of a source, and the maker of its quantised layers.

    dtype: of all that is not quantised (`served_dtype`).
    is_llama: it is for the Llama decoder. Its matrices are placeholders then, and read one by one by the maker. Those
        of other models, and of models with an adapter, are there as float32; all other parameters are of `dtype`.
    """
    number_format = served_dtype(source, dtype, is_quantised=True)
    stored = None if adapter is not None else source.quantised_weight(config)  # with an adapter, they are others
    if is_llama and adapter is None:
        checkpoint = source.checkpoint(config, torch.float32)
        is_tied = config.tie_word_embeddings
        checkpoint = replace(checkpoint, unread=streamed(checkpoint.slices, is_tied))
        model = read_model(source.name, config, checkpoint, number_format, attention)
        numbers = stored_numbers(checkpoint.slices, is_tied)
        return model, QuantisedMaker(quantisation, stored, numbers, number_format)
    model = _read(source, config, torch.promote_types(number_format, torch.float32), adapter, attention)
    leave = {f"{path}.weight" for path in matrices(model, is_llama)}
    return rounded(model, number_format, leave), QuantisedMaker(quantisation, stored, {}, number_format)


def _read(
    source: ModelSource, config: Any, number_format: torch.dtype, adapter: str | Path | None, attention: str | None
) -> Any:
    def in_format(wanted: torch.dtype) -> Any:
        return read_model(source.name, config, source.checkpoint(config, wanted), wanted, attention)

    return with_adapter(in_format, number_format, adapter, source.name)


def check_dtype(dtype: str) -> None:
    """Raise ConfigError if there is no such number format."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}.")


def served_dtype(source: ModelSource, dtype: str, *, is_quantised: bool) -> torch.dtype:
    """Return the dtype of a name. "auto" is the weights' own, and float32, which holds all of it, for float16 and for
    dequantised weights.

    is_quantised: weights are to be codes, and this is for everything else: float32 where "auto" finds float64, in which
        no codes are multiplied.
    """
    if dtype == "auto":
        dtype = source.stored_dtype() or "float32"
    found: torch.dtype = getattr(torch, "float32" if dtype == "float16" else dtype)
    return torch.float32 if is_quantised and found == torch.float64 else found
