"""The memory that a model will take, computed before its weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forerun.config import AUTO, DEFAULT_DTYPE
from forerun.errors import UnsupportedModelError
from forerun.kernels.cpu.linear import with_page_ends
from forerun.kernels.partition import AttentionShape
from forerun.kv_cache.recurrent_state import StateMaker
from forerun.models.attention.base import ATTENTION_NAME, LayerAttention, Planner
from forerun.models.attention.native import PathPlanner
from forerun.models.decoders import cache_dtype_of, served_kind, triton_backend
from forerun.models.families.build import head_shape
from forerun.models.fused.parts import attentions_of, state_layout
from forerun.models.loading.configuration import context_length
from forerun.models.loading.fused_modules import Numbers, empty_fused
from forerun.models.loading.source import find_source
from forerun.models.loading.transformers_modules import empty_model
from forerun.models.spec.attention import LatentAttention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import FeedForward
from forerun.models.weight_plan import PlannedProduct, WeightPlan, check_dtype, check_quantization
from forerun.utils.deferred import DeferredModule
from forerun.utils.device import resolve_device

if TYPE_CHECKING:
    from forerun.models.attention import reference
else:
    reference = DeferredModule("forerun.models.attention.reference")

# The shapes are those of an empty model of the configuration, which loading compares with the headers of the files.
# Transformers' tensors are replaced one by one by the layers that compute (`linear.py`, the decoders): meanwhile, one
# tensor at a time is held twice.

_FLOAT32 = 4
_PART = 1 << 27
"""Bytes of the part of a tensor that is held once more while it is converted."""


def weight_nbytes(model: Any, plan: WeightPlan, products: Sequence[PlannedProduct]) -> tuple[int, int]:
    """Return the bytes that a model's weights take once loaded, and at most while loading.

    Args:
        model: of Transformers, as `empty_model` makes it. products: of the model.
    """
    stored = {
        name: each
        for product in products
        for names in product.matrices
        for name, each in zip(names, product.stored, strict=True)
    }
    is_made = plan.is_streamed and plan.quantize is not None
    kept = sum(product.nbytes for product in products)
    read = largest = 0
    for name, module, parameter in _parameters(model):
        is_matrix = name in stored
        if not is_matrix:
            is_number = isinstance(module, Numbers) and parameter.dim() == 2
            kept += parameter.nbytes if is_number else other_nbytes(parameter, plan)
        is_as_stored = is_matrix and plan.quantize is None and stored[name] is not None  # packed from the file
        size = 0 if is_as_stored else _read_nbytes(parameter, plan, is_matrix=is_matrix)
        largest = max(largest, size)
        read += 0 if is_made and is_matrix else size
    kept = with_page_ends(kept) if plan.is_native else kept
    return kept, max(kept, read if not is_made else kept + read) + largest + min(largest, _PART)


def other_nbytes(parameter: Tensor, plan: WeightPlan) -> int:
    """Return the bytes of a norm, a bias or any other parameter; the fused decoders keep them in float32 at least."""
    return parameter.numel() * max(parameter.element_size(), _FLOAT32 if plan.is_fused else 0)


def _read_nbytes(parameter: Tensor, plan: WeightPlan, *, is_matrix: bool) -> int:
    """Return the bytes of a parameter as Transformers reads it. is_matrix: it is quantized, if any parameter is."""
    size = parameter.element_size()
    if plan.has_adapter or (is_matrix and plan.quantize is not None):
        size = max(size, _FLOAT32)
    return size * parameter.numel()


def _parameters(model: Any) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield each parameter once, with its name and the first module that has it."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, module, parameter


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory that one model takes.

    Attributes:
        name: the name that the user gave.
        number_format: of its weights.
        dtype: of everything that is not quantized.
        device: where it computes.
        weights: bytes, when it is loaded; by the Triton kernels, with the memory that its steps are computed in.
        experts: bytes of these that may lie on a disk, as only a part is read for each token: those of experts.
        experts_read: bytes of experts that a token reads.
        loading: bytes of the machine's memory at most while it is loaded.
        planner: makes an empty cache, which computes the pages of a sequence.
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
    planner: Planner
    context_length: int
    vocab_size: int
    width: int
    experts: int = 0
    experts_read: int = 0

    def with_experts_on_disk(self) -> ModelMemory:
        """Return the same model with its experts in a file."""
        weights = self.weights - self.experts
        loading = self.loading - self.experts
        return replace(self, weights=weights, loading=max(weights, loading), experts=0)

    @property
    def page_nbytes(self) -> int:
        """Return the bytes of a page of keys and values."""
        return self.planner.pool.page_nbytes

    @property
    def state_nbytes(self) -> int:
        """Return the bytes that a sequence takes besides its pages, in recurrent layers."""
        return 0 if self.planner.new_state is None else self.planner.new_state.layout.nbytes

    def pages_for(self, num_slots: int) -> int:
        """Return the pages of a sequence of so many positions."""
        return self.planner.new_cache().pages_wanted(min(num_slots, self.context_length))


def model_memory(
    name: str | Path,
    dtype: str = DEFAULT_DTYPE,
    device: str | torch.device = "cpu",
    adapter: str | Path | None = None,
    quantize: str | None = None,
    kv_cache_dtype: str = AUTO,
) -> ModelMemory:
    """Return the memory of a model that `load_model` loads with these arguments, by the headers of its files. Keys and
    values are those of the configuration's heads, the same in every layer.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: as `load_model`, as far as the headers show.
    """
    check_dtype(dtype)
    requested = check_quantization(quantize, dtype)
    target_device = resolve_device(device)
    source = find_source(name)
    config = source.plain_config()
    _, spec = served_kind("auto", source, config)
    plan = WeightPlan.of(
        *(source, spec, dtype, target_device, requested),
        is_fused=spec is not None,
        has_adapter=adapter is not None,
    )
    empty: Any = None if spec is None else empty_fused(source.name, config, spec, plan.dtype)
    if empty is None:
        empty = empty_model(source.name, source.config(), plan.dtype, ATTENTION_NAME)
    tokens = source.output_tokens(config)
    is_reordered = tokens is not None and plan.is_native  # such decoders keep all rows, and where each token's is
    products = plan.products(empty, spec, None if tokens is None or is_reordered else len(tokens))
    kept, loading = weight_nbytes(empty, plan, products)
    places = config.vocab_size * torch.int64.itemsize if is_reordered else 0
    kept += places
    kept += triton_backend().step_nbytes(config, plan.dtype) if plan.is_triton else 0
    experts = read = 0
    if spec is not None and plan.is_native and plan.is_streamed and plan.number_format is not None:
        # of other models, all weights are in memory while they are loaded
        experts = sum(product.nbytes for product in products if product.is_expert)
        read = _read_share(spec, experts)
    return ModelMemory(
        name=source.name,
        number_format=plan.number_format or str(plan.dtype).removeprefix("torch."),
        dtype=plan.dtype,
        device=target_device,
        weights=kept,
        loading=loading + places,
        planner=_planner(config, spec, plan, cache_dtype_of(kv_cache_dtype, target_device, plan.dtype)),
        context_length=context_length(config),
        vocab_size=config.vocab_size,
        width=_row_width(config, spec),
        experts=experts,
        experts_read=read,
    )


def _read_share(spec: DecoderSpec, nbytes: int) -> int:
    """Return the bytes that a token reads of so many of experts."""
    experts = spec.experts
    return 0 if experts is None else nbytes * experts.num_experts_per_tok // experts.num_experts


def _row_width(config: Any, spec: DecoderSpec | None) -> int:
    """Return the numbers of a row that are held together in the widest layer."""
    residual: int = 4 * config.hidden_size
    if spec is None:
        return residual + 2 * (getattr(config, "intermediate_size", None) or residual)
    inputs = spec.embeddings.per_layer
    experts = spec.experts
    recurrence = spec.recurrence
    wide = residual + 2 * _intermediate(config, spec)
    if recurrence is not None:
        wide += 3 * recurrence.channels + 2 * recurrence.wide
    if inputs is not None:
        wide += 2 * len(spec.layers) * inputs.width
    if experts is not None:  # rows are copied for each of their experts
        copied = spec.hidden + experts.moe_intermediate_size
        wide += 2 * experts.num_experts_per_tok * copied + 2 * experts.num_experts
    own = spec.attention
    return wide + 2 * own.num_heads * sum(own.cached_widths) if isinstance(own, LatentAttention) else wide


def _intermediate(config: Any, spec: DecoderSpec) -> int:
    """Return the intermediate numbers of a dense feed-forward layer; of a mixture of experts, those of the expert of
    all rows, or what the configuration says."""
    feeds = [layer.feed_forward for layer in spec.layers]
    if dense := [feed.intermediate_size for feed in feeds if isinstance(feed, FeedForward)]:
        return dense[0]
    return (getattr(config, "intermediate_size", None) or 0) if spec.experts is not None else 0


def attention_widths(config: Any, spec: DecoderSpec | None) -> tuple[int, int, int, int]:
    """Return the query heads, key heads, and the widths of a key and of a value as they are cached. spec: of a model
    that the fused decoder computes."""
    if spec is not None:
        own = spec.attention
        return (1, 1, 2, 2) if own is None else (own.num_heads, own.num_kv_heads, *own.cached_widths)
    heads, kv_heads, width = head_shape(config)
    if getattr(config, "kv_lora_rank", None):  # of multi-head latent attention, what it is expanded to is kept
        return heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return heads, kv_heads, width, width


def _planner(config: Any, spec: DecoderSpec | None, plan: WeightPlan, cache_dtype: torch.dtype) -> Planner:
    """Make the planner that the decoder of such a model makes."""
    heads, kv_heads, key_width, value_width = attention_widths(config, spec)
    if kv_heads < 1 or key_width < 1:
        raise UnsupportedModelError(f"a model of {kv_heads} key heads of width {key_width} cannot be served.")
    layer = LayerAttention(kv_heads, max(1, heads // kv_heads), key_width, value_width, AttentionShape(key_width**-0.5))
    layers = [layer] * config.num_hidden_layers
    states = None
    if spec is not None:
        layers = attentions_of(spec)
        states = state_layout(spec)
    if plan.is_triton or plan.library is not None:
        device_pages = triton_backend().page_layout(layers, cache_dtype, plan.device) if plan.is_triton else None
        planner: Planner = PathPlanner(layers, cache_dtype, device_pages)
    else:
        planner = reference.ReferenceAttention(plan.dtype).planner(layers, plan.device)
    if states is not None:
        planner.new_state = StateMaker(states, config.num_hidden_layers, is_native=plan.is_native)
    return planner
