"""The Triton decoder of the Llama layers, captured as CUDA graphs: all steps of at most 16 rows replay the same graph.

Rows are padded to a bucket; the padding writes nothing, and its results are not read. Plain decoding and
verification of up to 15 drafted tokens differ in nothing but the numbers that these kernels read, so that they cannot
differ in a row's bits. States between layers are float32. `models/fused/decoder.py` computes the same in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from forerun.config import KERNELS_VARIABLE
from forerun.errors import UnsupportedModelError
from forerun.kernels.partition import AttentionShape
from forerun.kernels.quantize import QuantizedWeight
from forerun.kernels.torch.linear import QuantizedEmbedding
from forerun.kernels.triton.linear import FloatProduct, Product
from forerun.kernels.triton.quantized_linear import ActivationBuffers, quantized_product
from forerun.kernels.triton.rotation import RotationTables
from forerun.kernels.triton.step_arrays import BUCKETS, HEAD_ROWS, MAX_ROWS, TILE, Capacity, bucket_of, pieces
from forerun.models.attention.base import LayerAttention, Layout, Planner
from forerun.models.attention.native import PathPlanner
from forerun.models.base import HiddenStateOutputs, LayerRangeDecoder
from forerun.models.families.build import head_shape, layer_windows
from forerun.models.families.table import frequencies, spec_in
from forerun.models.fused.cuda_graphs import StepGraphs, StepInputBuffers, on_device
from forerun.models.fused.triton_backend import check_heads, page_layout
from forerun.models.fused.triton_layers import HEAD_BUCKETS, TritonLayer, TritonStep, TritonWeights
from forerun.models.linear import LinearPart, of_rows
from forerun.models.loading.configuration import context_length
from forerun.models.loading.weight_maker import WeightMaker
from forerun.models.rope import cos_sin_tables
from forerun.models.spec.decoder import DecoderSpec


class WeightPacker:
    """Packs the layers of a model of the Llama family one after another, and empties each.

    Attributes:
        num_heads, num_kv_heads, head_dim: of attention.
        takes: the input type of products, that of everything that is not quantized.
        norm: the final norm's weight, float32.

    Raises:
        UnsupportedModelError: the heads have a shape that the kernels do not compute, or quantized
            weights of different formats are joined.
    """

    def __init__(self, model: Any, dtype: torch.dtype, maker: WeightMaker | None) -> None:
        self._model = model
        self._maker = maker
        self.num_heads, self.num_kv_heads, self.head_dim = head_shape(model.config)
        check_heads(type(model).__name__, self.num_heads, self.num_kv_heads, self.head_dim)
        self.takes = dtype
        self._row_codes = ActivationBuffers(model.device)
        self.norm = _numbers(model.model.norm.weight)

    def outer(self, output_tokens: Tensor | None) -> tuple[Tensor | QuantizedEmbedding, Product]:
        """Return embedding and output layer. output_tokens: int64, the rows of the output layer to keep; None for
        all."""
        model = self._model
        table = model.model.embed_tokens
        head = model.lm_head
        is_tied = head.weight is table.weight
        part = LinearPart("model.embed_tokens.weight", table.weight)
        embedding = table.weight.detach() if self._maker is None else self._maker.embedding(part)
        part = part if is_tied else LinearPart("lm_head.weight", head.weight)
        product = self._product([part._replace(rows=output_tokens)], of_rows(head.bias, output_tokens), is_head=True)
        if not is_tied:
            head.to_empty(device="meta")
        return embedding, product

    def layer(self, index: int, window: int | None) -> TritonLayer:
        """Pack the weights of a layer, of which the model keeps nothing."""
        layer = self._model.model.layers[index]
        path = f"model.layers.{index}"
        attention = layer.self_attn

        def product(*names: str) -> Product:
            modules = [layer.get_submodule(name) for name in names]
            parts = [
                LinearPart(f"{path}.{name}.weight", module.weight) for name, module in zip(names, modules, strict=True)
            ]
            biases = [module.bias for module in modules if module.bias is not None]
            return self._product(parts, torch.cat(biases) if biases else None)

        head_norms = None
        if hasattr(attention, "q_norm"):
            head_norms = torch.stack([_numbers(attention.q_norm.weight), _numbers(attention.k_norm.weight)])
        packed = TritonLayer(
            input_norm=_numbers(layer.input_layernorm.weight),
            qkv=product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            head_norms=head_norms,
            out=product("self_attn.o_proj"),
            mlp_norm=_numbers(layer.post_attention_layernorm.weight),
            gate_up=product("mlp.gate_proj", "mlp.up_proj"),
            down=product("mlp.down_proj"),
            window=window,
        )
        layer.to_empty(device="meta")
        return packed

    def _product(self, parts: list[LinearPart], bias: Tensor | None, *, is_head: bool = False) -> Product:
        if self._maker is not None:
            quantized = [self._maker.weight(part, is_outer=is_head) for part in parts]
            if len({weight.form for weight in quantized}) > 1:
                names = ", ".join(part.name for part in parts)
                raise UnsupportedModelError(
                    f"{names} are quantized in different formats, which the Triton kernels do not multiply as one. "
                    f"Unset {KERNELS_VARIABLE} to compute in PyTorch, or load a file that has them in one form."
                )
            return quantized_product(QuantizedWeight.cat(quantized), bias, self.takes, self._row_codes)
        weights = [part.weight if part.rows is None else part.weight[part.rows] for part in parts]
        return FloatProduct(weights[0] if len(weights) == 1 else torch.cat(weights), bias)


def _numbers(weight: Tensor) -> Tensor:
    return weight.detach().float().clone()


class TritonDecoder(LayerRangeDecoder):
    """The decoder of a Transformers model of the Llama family on a CUDA device, or on the CPU in Triton's interpreter.

    Args:
        model: the loaded causal language model, on its device. Its layers are emptied one by one as their weights are
            packed; the model is of no use afterwards.
        dtype: of keys and values, and of weights that are not quantized.
        maker: of quantized weights; None: they are floats.
        output_tokens: int64, those whose logits are computed, in this order; None for all.
        spec: of the model; None: that of its configuration.
    """

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        maker: WeightMaker | None = None,
        output_tokens: Tensor | None = None,
        spec: DecoderSpec | None = None,
    ) -> None:
        config = model.config
        device = model.device
        packer = WeightPacker(model, dtype, maker)
        heads = packer.num_heads
        kv_heads = packer.num_kv_heads
        width = packer.head_dim
        windows = layer_windows(config)
        form = AttentionShape(width**-0.5)
        layers = [LayerAttention(kv_heads, heads // kv_heads, width, width, form)] * len(windows)
        planner = PathPlanner(layers, dtype, page_layout(layers, dtype, device))
        self.planner: Planner = planner
        self.num_layers = len(windows)
        embedding, head = packer.outer(output_tokens)
        ((frequency, scaling),), reach = frequencies(config, spec or spec_in(model)), context_length(config) + MAX_ROWS
        tables = cos_sin_tables(frequency, scaling, reach)
        self._weights = TritonWeights(
            embedding=embedding,
            layers=[packer.layer(index, window) for index, window in enumerate(windows)],
            norm=packer.norm,
            head=head,
            tables=RotationTables(*(table.to(device) for table in tables)),
            takes=packer.takes,
            base=planner.layout.new_page(),
            eps=config.rms_norm_eps,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width,
            layer_starts=planner.layout.layer_starts,
        )
        self._tile_rows = TILE // (heads // kv_heads)
        self._capacity = Capacity.of(reach, self._tile_rows)
        self._step = TritonStep(self._weights, self._capacity)
        self._words = StepInputBuffers(self._step.words, self._weights.base)
        self._hidden_states: dict[int, Tensor] = {}
        self._graphs = StepGraphs(device)
        self._lock = Lock()
        with self._computing():
            self._capture_all()

    @property
    def step_nbytes(self) -> int:
        """Return the bytes of the memory that steps are computed in, and of the rotations."""
        return self._step.nbytes + sum(table.nbytes for table in (self._weights.tables.cos, self._weights.tables.sin))

    def forward(self, layout: Layout, layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Return logits of the requested rows, [R, V] with R >= layout.num_logits, and the states that enter `layers`
        (`Decoder.forward`)."""
        hidden_outputs = HiddenStateOutputs(layers, layout)
        with self._computing():
            x = self._through_all(layout, tuple(layer for layer in layers if layer < self.num_layers), hidden_outputs)
            return self._head(x, layout, hidden_outputs), hidden_outputs.stacked()

    def embed(self, layout: Layout) -> Tensor:
        """Return what enters the first layer, [T, hidden] (`LayerRangeDecoder.embed`)."""
        return self.embedding_rows(layout.token_ids.to(self._step.x.device))

    def forward_layers(
        self, x: Tensor, layout: Layout, first: int, last: int, hidden_outputs: HiddenStateOutputs
    ) -> Tensor:
        """Compute layers `first` to `last` - 1: [T, hidden] -> [T, hidden] (`LayerRangeDecoder.forward_layers`); not
        captured."""
        requested = [layer for layer in hidden_outputs.layers if first <= layer < last]
        out = torch.empty_like(x, dtype=torch.float32)
        with self._computing():
            entering = {layer: torch.empty_like(out) for layer in requested}
            for start, end, bucket in self._fed(layout):
                self._step.x[: end - start] = x[start:end]
                targets = self._state_buffers(requested)
                self._step.layers(bucket, first, last, targets)
                out[start:end] = self._step.x[: end - start]
                for layer, states in targets:
                    entering[layer][start:end] = states[: end - start]
        for layer, states in entering.items():
            hidden_outputs.take(layer, states)
        return out

    def head(self, x: Tensor, layout: Layout, hidden_outputs: HiddenStateOutputs) -> Tensor:
        """Return the logits of the requested rows, [R, V], from the output of the last layer or, to exit early, any
        other (`LayerRangeDecoder.head`)."""
        with self._computing():
            return self._head(x, layout, hidden_outputs)

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, [n, hidden] float32 (`Decoder.embedding_rows`)."""
        return self._weights.embedding[token_ids].float()

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, [n, hidden] float32 (`Decoder.output_rows`)."""
        return self._weights.head.rows(token_ids)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the packed float weights with names like those of Transformers' parameters: query, key and value are
        one tensor, gate and up another. Quantized values are finite and left out."""
        if not isinstance(self._weights.embedding, QuantizedEmbedding):
            yield "model.embed_tokens.weight", self._weights.embedding
        yield "model.norm.weight", self._weights.norm
        products = {"lm_head": self._weights.head}
        for index, layer in enumerate(self._weights.layers):
            path = f"model.layers.{index}"
            yield f"{path}.input_layernorm.weight", layer.input_norm
            yield f"{path}.post_attention_layernorm.weight", layer.mlp_norm
            if layer.head_norms is not None:
                yield f"{path}.self_attn.(q, k)_norm.weight", layer.head_norms
            products |= {
                f"{path}.self_attn.(q, k, v)_proj": layer.qkv,
                f"{path}.self_attn.o_proj": layer.out,
                f"{path}.mlp.(gate, up)_proj": layer.gate_up,
                f"{path}.mlp.down_proj": layer.down,
            }
        for name, product in products.items():
            numbers = product.float_numbers()
            if numbers is not None:
                yield f"{name}.weight", numbers
            if product.bias is not None:
                yield f"{name}.bias", product.bias

    def _through_all(self, layout: Layout, layers: tuple[int, ...], hidden_outputs: HiddenStateOutputs) -> Tensor:
        """Return what leaves the last layer, [T, hidden]. What enters `layers` is stored in `hidden_outputs`."""
        parts: list[Tensor] = []
        entering: list[list[Tensor]] = [[] for _ in layers]
        for start, end, bucket in self._fed(layout):
            targets = self._state_buffers(layers)
            self._graphs.run(("layers", bucket, layers), partial(self._compute, bucket, targets))
            x = self._step.x[: end - start]
            parts.append(x if len(x) == layout.num_rows else x.clone())  # the next piece overwrites it
            for kept, (_, states) in zip(entering, targets, strict=True):
                kept.append(states[: end - start].clone())
        for layer, of_pieces in zip(layers, entering, strict=True):
            hidden_outputs.take(layer, torch.cat(of_pieces))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Lock the step's memory and make its device current: one step at a time is computed."""
        with self._lock, on_device(self._weights.base.device):
            yield

    def _compute(self, bucket: int, targets: Sequence[tuple[int, Tensor]]) -> None:
        self._step.embed(bucket)
        self._step.layers(bucket, 0, self.num_layers, targets)

    def _head(self, x: Tensor, layout: Layout, hidden_outputs: HiddenStateOutputs) -> Tensor:
        hidden_outputs.take(self.num_layers, x, self._step.normed)
        requested = layout.select_logit_rows(x)
        logits = self._step.logits.new_empty(len(requested), self._step.logits.shape[1])
        for start in range(0, len(requested), HEAD_ROWS):
            count = min(HEAD_ROWS, len(requested) - start)
            self._step.head_x[:count] = requested[start : start + count]
            bucket = bucket_of(count)
            self._graphs.run(("head", bucket), partial(self._step.head, bucket))
            logits[start : start + count] = self._step.logits[:count]
        return logits

    def _fed(self, layout: Layout) -> Iterator[tuple[int, int, int]]:
        """Copy a forward to the device piece by piece. Yields each piece's rows and bucket while its arrays lie
        there."""
        self._words.check(layout, len(self._weights.tables.cos))
        for tiles in pieces(self._words.plan_of(layout), self._tile_rows, self._capacity):
            start = tiles[0].first
            end = tiles[-1].end
            self._words.send(layout, tiles)
            yield start, end, bucket_of(end - start)

    def _state_buffers(self, layers: Sequence[int]) -> list[tuple[int, Tensor]]:
        """Return the tensors that receive what enters each of these layers, always at the same address."""
        for layer in layers:
            if layer not in self._hidden_states:
                self._hidden_states[layer] = torch.zeros_like(self._step.x)
        return [(layer, self._hidden_states[layer]) for layer in layers]

    def _capture_all(self) -> None:
        """Capture the graphs that every request needs, the largest first. Until the first forward all rows are dead."""
        if self._step.x.device.type != "cuda":
            return
        with torch.inference_mode():
            for bucket in reversed(BUCKETS):
                self._graphs.run(("layers", bucket, ()), partial(self._compute, bucket, ()))
            for bucket in reversed(HEAD_BUCKETS):
                self._graphs.run(("head", bucket), partial(self._step.head, bucket))
