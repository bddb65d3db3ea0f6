"""The memory that a model will take, computed before its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.config import AUTO, DEFAULT_DTYPE, UNQUANTIZED
from forerun.errors import UnsupportedModelError
from forerun.kernels.block_weight import BlockType
from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import linear_nbytes, with_page_ends
from forerun.kernels.partition import AttentionShape
from forerun.kernels.quantize import QuantizedFormat
from forerun.kernels.torch.linear import can_pack
from forerun.kernels.triton.availability import is_triton_selected
from forerun.kernels.triton.product_cut import Cut
from forerun.kernels.triton.step_arrays import HEAD_ROWS, MAX_ROWS, TILE, Capacity
from forerun.kv_cache.recurrent_state import StateMaker
from forerun.models.attention.base import LayerAttention, Planner
from forerun.models.attention.native import PathPlanner
from forerun.models.attention.reference import ReferenceAttention
from forerun.models.decoders import cache_dtype_of, library_for, mixture_as_stored, multiplies_floats, served_kind
from forerun.models.fused.decoder import attentions_of
from forerun.models.fused.experts import stacked
from forerun.models.fused.options import head_shape
from forerun.models.fused.recurrence import state_layout
from forerun.models.general import ATTENTION_NAME
from forerun.models.loading.configuration import context_length
from forerun.models.loading.find_source import find_source
from forerun.models.loading.fused_modules import Numbers, empty_fused
from forerun.models.loading.load import check_dtype, served_dtype
from forerun.models.loading.quantized_layers import Quantization, check_quantization, form_kept, outer_modules
from forerun.models.loading.source import ModelSource
from forerun.models.loading.transformers_modules import empty_model
from forerun.models.spec.attention import LatentAttention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import FeedForward
from forerun.utils.device import resolve_device

# The shapes are those of an empty model of the configuration, which loading compares with the headers of the files.
# Transformers' tensors are replaced one by one by the layers that compute (`linear.py`, the decoders): meanwhile, one
# tensor at a time is held twice.

_FLOAT32 = 4
_PRODUCT = 8
"""Bytes a number that `QuantizedLinear`, which multiplies in float64, keeps beside the quantized values."""
_PART = 1 << 27
"""Bytes of the part of a tensor that is held once more while it is converted."""


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """How the weights of a model are stored once it is loaded.

    Attributes:
        dtype: of everything that is not quantized.
        device: where they lie.
        is_fused: the fused decoder computes it.
        library: the native kernels, where they compute.
        quantize: what matrices are brought to; None: nothing.
        stored: by name, the format of a quantized weight of the files, or None; without `quantize`, of one that is
            computed with as it is stored.
        has_adapter: an adapter is merged before anything else.
        is_triton: the Triton kernels compute it.
    """

    dtype: torch.dtype
    device: torch.device
    is_fused: bool
    library: Library | None
    quantize: Quantization | None
    stored: Callable[[str], QuantizedFormat | BlockType | None]
    has_adapter: bool
    is_triton: bool = False

    @property
    def is_native(self) -> bool:
        """Return whether all layers are computed by the native kernels."""
        return self.is_fused and self.library is not None

    def linear(self, name: str, shape: torch.Size, *, is_outer: bool) -> int:
        """Return the bytes of a linear layer's weight. shape: outputs, inputs. is_outer: of the output layer or the
        embedding."""
        if self.quantize is None:
            if self.library is not None and multiplies_floats(self.device, self.dtype, is_fused=self.is_fused):
                return linear_nbytes(self.library, shape[0], shape[1], self.stored(name) or self.dtype)
            return shape.numel() * self.dtype.itemsize
        form = self._form(name, is_outer=is_outer)
        if self.library is not None:
            return linear_nbytes(self.library, shape[0], shape[1], form)
        if self.is_triton:
            return _quantized_nbytes(form, shape, is_packed=True)
        return _quantized_nbytes(form, shape) + _PRODUCT * shape.numel()

    def embedding(self, name: str, shape: torch.Size) -> int:
        """Return the bytes of the embedding."""
        if self.is_native:
            return self.linear(name, shape, is_outer=True)
        if self.is_fused and self.quantize is not None:
            return _quantized_nbytes(self._form(name, is_outer=True), shape)
        return shape.numel() * self.dtype.itemsize

    def tied_head(self, name: str, shape: torch.Size, num_outputs: int | None = None) -> int:
        """Return the bytes of an output layer beside the embedding whose weight it shares.

        num_outputs: tokens that the output layer is kept for; None for all.
        """
        if num_outputs is not None:
            return self.linear(name, torch.Size((num_outputs, shape[1])), is_outer=True)
        if self.is_native:
            return 0
        if self.is_triton:
            return 0 if self.quantize is None else self.linear(name, shape, is_outer=True)
        if self.quantize is not None:
            return _PRODUCT * shape.numel() if self.is_fused else self.linear(name, shape, is_outer=True)
        is_packed = self.library is not None or can_pack(self.dtype, self.device)
        return self.linear(name, shape, is_outer=True) if is_packed else 0

    def other(self, parameter: Tensor) -> int:
        """Return the bytes of a norm, a bias or any other parameter; the fused decoders keep them in float32 at
        least."""
        return parameter.numel() * max(parameter.element_size(), _FLOAT32 if self.is_fused else 0)

    def read(self, parameter: Tensor, *, is_matrix: bool) -> int:
        """Return the bytes of a parameter as Transformers reads it. is_matrix: it is quantized, if any parameter is."""
        size = parameter.element_size()
        if self.has_adapter or (is_matrix and self.quantize is not None):
            size = max(size, _FLOAT32)
        return size * parameter.numel()

    def _form(self, name: str, *, is_outer: bool) -> QuantizedFormat:
        assert self.quantize is not None
        stored = None if self.has_adapter else self.stored(name)
        assert not isinstance(stored, BlockType)  # those are not quantized anew
        return form_kept(stored, self.quantize, is_outer=is_outer)


def weight_nbytes(
    model: Any, storage: WeightStorage, num_outputs: int | None = None, spec: DecoderSpec | None = None
) -> tuple[int, int]:
    """Return the bytes that a model's weights take once loaded, and at most while loading.

    Args:
        model: of Transformers, as `empty_model` makes it.
        num_outputs: tokens that the output layer is kept for, in rows beside the embedding's; None for all.
        spec: of a model that the fused decoder computes.
    """
    head, *tables = outer_modules(model, spec)
    is_streamed = storage.is_fused and storage.quantize is not None and not storage.has_adapter
    kept = read = largest = 0
    for name, module, parameter in _parameters(model):
        is_embedding = any(module is table for table in tables) and parameter.dim() == 2
        is_matrix = (isinstance(module, nn.Linear) or _is_conv(module)) and parameter.dim() == 2
        if is_embedding:
            kept += storage.embedding(name, parameter.shape)
            if head is not None and head.weight is parameter:
                kept += storage.tied_head(name, parameter.shape, num_outputs)
        elif is_matrix:
            shape = parameter.shape[::-1] if _is_conv(module) else parameter.shape  # outputs first
            if module is head and num_outputs is not None:
                shape = torch.Size((num_outputs, shape[1]))
            kept += storage.linear(name, shape, is_outer=module is head)
        elif isinstance(module, Numbers) and parameter.dim() == 2:
            kept += parameter.nbytes
        else:
            kept += storage.other(parameter)
        is_coded = is_matrix or (is_embedding and storage.is_fused)
        is_block = is_coded and storage.quantize is None and storage.stored(name) is not None  # packed from the file
        size = 0 if is_block else storage.read(parameter, is_matrix=is_coded)
        largest = max(largest, size)
        read += 0 if is_streamed and is_coded else size
    kept = with_page_ends(kept) if storage.is_native else kept
    return kept, max(kept, read if not is_streamed else kept + read) + largest + min(largest, _PART)


def experts_nbytes(model: Any, spec: DecoderSpec, storage: WeightStorage) -> tuple[int, int]:
    """Return the bytes that weights of experts take, and those that a token reads. Arguments as `weight_nbytes`."""
    if spec.experts is None:
        return 0, 0
    names = {name for parts in stacked(spec).values() for each in parts for name in each}
    taken = sum(
        storage.linear(name, parameter.shape, is_outer=False)
        for name, _, parameter in _parameters(model)
        if name in names and parameter.dim() == 2
    )
    return taken, taken * spec.experts.num_experts_per_tok // spec.experts.num_experts


def _parameters(model: Any) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield each parameter once, with its name and the first module that has it."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, module, parameter


def _is_conv(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"  # GPT-2's; Transformers' classes are not imported here


def _quantized_nbytes(form: QuantizedFormat, shape: torch.Size, *, is_packed: bool = False) -> int:
    """Return the bytes of a `QuantizedWeight`. is_packed: two values of 4 bits share a byte."""
    if form.group is None:
        return shape.numel() + _FLOAT32 * shape[0]
    groups = -(-shape[1] // form.group) * shape[0]
    values = groups * form.group // 2 if is_packed and form.bits == 4 else shape.numel()
    return values + 2 * groups * (2 if form.has_minimum else 1)


def step_nbytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the memory that a Triton step computes in (`triton_layers.TritonStep`), and of the rotations.

    Args:
        config: of Transformers, of the Llama family. dtype: of everything that is not quantized.
    """
    heads, kv_heads, width = head_shape(config)
    hidden: int = config.hidden_size
    intermediate: int = config.intermediate_size
    vocab: int = config.vocab_size
    reach = context_length(config) + MAX_ROWS
    capacity = Capacity.of(reach, max(1, TILE // (heads // kv_heads)))
    shapes = [((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width), (2 * intermediate, hidden)]
    shapes.append((hidden, intermediate))
    sums: int = max(MAX_ROWS * out * Cut.of(out, size, dtype.itemsize).splits for out, size in shapes)
    sums = max(sums, HEAD_ROWS * vocab * Cut.of(vocab, hidden, dtype.itemsize).splits)
    floats = sums + MAX_ROWS * hidden + HEAD_ROWS * (hidden + vocab)
    floats += capacity.items * kv_heads * TILE * (width + 2)
    narrow = MAX_ROWS * (hidden + 2 * heads * width + intermediate)
    return _FLOAT32 * (floats + reach * width) + dtype.itemsize * narrow + 8 * capacity.words


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
        weights, loading = self.weights - self.experts, self.loading - self.experts
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
    requested, has_adapter = check_quantization(quantize, dtype), adapter is not None
    target_device, source = resolve_device(device), find_source(name)
    config = source.plain_config()
    _, spec = served_kind("auto", source, config)
    is_fused = spec is not None
    quantization = requested or check_quantization(source.quantization(), dtype)
    served = served_dtype(source, dtype, is_quantized=quantization not in (None, UNQUANTIZED))
    mixture = mixture_as_stored(source, quantization, target_device, served, is_fused=is_fused, adapted=has_adapter)
    quantization = None if quantization == UNQUANTIZED else quantization
    library = library_for(target_device, served)
    empty: Any = None if spec is None else empty_fused(source.name, config, spec, served)
    empty = empty or empty_model(source.name, source.config(), served, ATTENTION_NAME)
    is_triton = is_fused and is_triton_selected()
    stored = _stored_forms(source, spec, quantization, mixture)
    storage = WeightStorage(served, target_device, is_fused, library, quantization, stored, has_adapter, is_triton)
    tokens = source.output_tokens(config)
    kept, loading = weight_nbytes(empty, storage, None if tokens is None else len(tokens), spec)
    kept += step_nbytes(config, served) if is_triton else 0
    # of other models, all weights are in memory while they are loaded
    streams = storage.is_native and not has_adapter and (quantization or mixture) is not None
    experts, read = experts_nbytes(empty, spec, storage) if streams and spec is not None else (0, 0)
    return ModelMemory(
        name=source.name,
        number_format=quantization or mixture or str(served).removeprefix("torch."),
        dtype=served,
        device=target_device,
        weights=kept,
        loading=loading,
        planner=_planner(config, spec, storage, cache_dtype_of(kv_cache_dtype, target_device, served)),
        context_length=context_length(config),
        vocab_size=config.vocab_size,
        width=_row_width(config, spec),
        experts=experts,
        experts_read=read,
    )


def _row_width(config: Any, spec: DecoderSpec | None) -> int:
    """Return the numbers of a row that are held together in the widest layer."""
    residual: int = 4 * config.hidden_size
    if spec is None:
        return residual + 2 * (getattr(config, "intermediate_size", None) or residual)
    inputs, experts, recurrence = spec.embeddings.per_layer, spec.experts, spec.recurrence
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


def _stored_forms(
    source: ModelSource, spec: DecoderSpec | None, quantize: Quantization | None, mixture: str | None
) -> Callable[[str], QuantizedFormat | BlockType | None]:
    """Return `WeightStorage.stored`. mixture: of the files, if weights are computed with as they are stored."""
    if quantize is not None:
        return source.quantized_format(spec)
    return source.block_form(spec) if mixture is not None and spec is not None else lambda name: None


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


def _planner(config: Any, spec: DecoderSpec | None, storage: WeightStorage, cache_dtype: torch.dtype) -> Planner:
    """Make the planner that the decoder of such a model makes."""
    heads, kv_heads, key_width, value_width = attention_widths(config, spec)
    if kv_heads < 1 or key_width < 1:
        raise UnsupportedModelError(f"a model of {kv_heads} key heads of width {key_width} cannot be served.")
    layer = LayerAttention(kv_heads, max(1, heads // kv_heads), key_width, value_width, AttentionShape(key_width**-0.5))
    layers, states = [layer] * config.num_hidden_layers, None
    if spec is not None:
        layers, states = attentions_of(spec), state_layout(spec)
    if storage.is_triton or storage.library is not None:
        planner: Planner = PathPlanner(layers, cache_dtype, storage.device if storage.is_triton else None)
    else:
        planner = ReferenceAttention(storage.dtype).planner(layers, storage.device)
    if states is not None:
        planner.new_state = StateMaker(states, config.num_hidden_layers, is_native=storage.is_native)
    return planner
