"""From a source to the Transformers model of its weights: as they are, with an adapter, or to be quantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun.config import DTYPES
from forerun.errors import ConfigError
from forerun.models.adapter import with_adapter
from forerun.models.quantising import Quantisation, QuantisedMaker, streamed
from forerun.models.sources import ModelSource
from forerun.models.transformers_model import read_model


def read(source: ModelSource, config: Any, dtype: str, adapter: str | Path | None, attention: str | None = None) -> Any:
    """The Transformers model of a source, with an adapter if there is one."""

    def in_format(number_format: torch.dtype) -> Any:
        checkpoint = source.checkpoint(config, number_format)
        return read_model(source.name, config, checkpoint, number_format, attention)

    return with_adapter(in_format, _torch_dtype(source, dtype), adapter, source.name)


def read_to_quantise(
    source: ModelSource,
    config: Any,
    dtype: str,
    adapter: str | Path | None,
    quantisation: Quantisation,
    streams: bool,
    attention: str | None = None,
) -> tuple[Any, QuantisedMaker]:
    """The Transformers model of a source, and what makes quantised layers of its weights.

    streams: it is for the Llama decoder. Its matrices are placeholders then, and read one by one by the maker; with an
        adapter all of them are there, merged.
    """
    if adapter is not None:
        hf = read(source, config, dtype, adapter, attention)
        return hf, QuantisedMaker(quantisation, None, {}, hf.dtype)  # the files hold other weights
    number_format = _torch_dtype(source, dtype)
    checkpoint = source.checkpoint(config, torch.float32)
    if streams:
        checkpoint = replace(checkpoint, unread=streamed(checkpoint.slices, config.tie_word_embeddings))
    hf = read_model(source.name, config, checkpoint, number_format, attention)
    return hf, QuantisedMaker(quantisation, source.quantised_weight(config), checkpoint.unread_slices(), hf.dtype)


def check_dtype(dtype: str) -> None:
    """Raises ConfigError where there is no such number format."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}.")


def _torch_dtype(source: ModelSource, dtype: str) -> torch.dtype:
    """That of a name. "auto" is the weights' own, and float32, which holds all of it, for float16 and what quantised
    weights stand for."""
    if dtype == "auto":
        dtype = source.stored_dtype() or "float32"
    found: torch.dtype = getattr(torch, "float32" if dtype == "float16" else dtype)
    return found
