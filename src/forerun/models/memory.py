"""The memory that a model will take, before its weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.cache import SequenceCache
from forerun.config import DEFAULT_DTYPE
from forerun.device import resolve_device
from forerun.errors import UnsupportedModelError
from forerun.kernels.partition import Form
from forerun.kernels.triton.availability import wants_triton
from forerun.models.attention.base import LayerAttention, Planner
from forerun.models.attention.path_planner import PathPlanner
from forerun.models.attention.reference import ReferenceAttention
from forerun.models.configuration import context_length
from forerun.models.decoders import library_for
from forerun.models.general import ATTENTION_NAME, register_attention
from forerun.models.llama import head_shape
from forerun.models.loading import served_kind
from forerun.models.quantising import check_quantisation
from forerun.models.reading import check_dtype, served_dtype
from forerun.models.sources import find_source
from forerun.models.transformers_model import empty_model
from forerun.models.triton_memory import step_nbytes
from forerun.models.weight_plan import Keeping, weight_nbytes


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What one model takes.

    Attributes:
        name: what it was asked for as.
        number_format: of its weights.
        dtype: of everything that is not in codes.
        device: where it computes.
        weights: bytes, when it is loaded; by the Triton kernels, with the memory that its steps are computed in.
        loading: bytes of the machine's memory at most while it is loaded.
        page_nbytes: of a page of keys and values.
        new_cache: makes an empty cache, of which how many pages a sequence takes can be asked.
        context_length: positions it can compute.
        vocab_size: width of the logits.
        width: numbers of a row that are held together in the widest layer.
    """

    name: str
    number_format: str
    dtype: torch.dtype
    device: torch.device
    weights: int
    loading: int
    page_nbytes: int
    new_cache: Callable[[], SequenceCache]
    context_length: int
    vocab_size: int
    width: int

    def pages_for(self, num_slots: int) -> int:
        """Pages of a sequence of so many positions."""
        return self.new_cache().pages_wanted(min(num_slots, self.context_length))


def model_memory(
    name: str | Path,
    dtype: str = DEFAULT_DTYPE,
    device: str | torch.device = "cpu",
    adapter: str | Path | None = None,
    quantize: str | None = None,
) -> ModelMemory:
    """What a model takes that `load_model` loads with these arguments. Of its files, the headers are read.

    Keys and values are those of the configuration's heads, the same in every layer.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: as `load_model`, as far as it can be told so early.
    """
    check_dtype(dtype)
    asked = check_quantisation(quantize, dtype)
    place = resolve_device(device)
    source = find_source(name)
    config = source.config()
    is_llama = served_kind("auto", source, config) == "llama"
    quantisation = asked or check_quantisation(source.quantisation(), dtype)
    served = served_dtype(source, dtype, is_quantised=quantisation is not None)
    register_attention()
    library = library_for(place, served, is_quantised=quantisation is not None)
    empty = empty_model(source.name, config, served, ATTENTION_NAME)
    is_triton = is_llama and wants_triton()
    has_adapter = adapter is not None
    keeping = Keeping(served, place, is_llama, library, quantisation, source.code_form(config), has_adapter, is_triton)
    tokens = source.output_tokens(config)
    kept, loading = weight_nbytes(empty, keeping, None if tokens is None else len(tokens))
    if is_triton:
        kept += step_nbytes(config, served)
    planner = _planner(config, keeping)
    hidden = config.hidden_size
    return ModelMemory(
        name=source.name,
        number_format=quantisation or str(served).removeprefix("torch."),
        dtype=served,
        device=place,
        weights=kept,
        loading=loading,
        page_nbytes=planner.pool.page_nbytes,
        new_cache=planner.new_cache,
        context_length=context_length(config),
        vocab_size=config.vocab_size,
        width=4 * hidden + 2 * (getattr(config, "intermediate_size", None) or 4 * hidden),
    )


def attention_widths(config: Any) -> tuple[int, int, int, int]:
    """Query heads, key heads, and the widths of a key and of a value as they are kept."""
    heads, kv_heads, width = head_shape(config)
    if getattr(config, "kv_lora_rank", None):  # of multi-head latent attention, what it is expanded to is kept
        return heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return heads, kv_heads, width, width


def _planner(config: Any, keeping: Keeping) -> Planner:
    """As the decoder of such a model makes it."""
    heads, kv_heads, key_width, value_width = attention_widths(config)
    if kv_heads < 1 or key_width < 1:
        raise UnsupportedModelError(f"a model of {kv_heads} key heads of width {key_width} cannot be served.")
    layer = LayerAttention(kv_heads, max(1, heads // kv_heads), key_width, value_width, Form(key_width**-0.5))
    layers, dtype = [layer] * config.num_hidden_layers, keeping.dtype
    if keeping.is_triton:
        return PathPlanner(layers, dtype, keeping.device)
    if keeping.library is not None:
        return PathPlanner(layers, dtype)
    return ReferenceAttention(dtype).planner(layers, keeping.device)
