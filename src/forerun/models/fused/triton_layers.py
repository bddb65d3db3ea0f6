"""The Llama layers by Triton kernels: weights, the memory that a step computes in, and the order of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.torch.linear import QuantizedEmbedding
from forerun.kernels.triton.attention import PartialResults, attend_pages
from forerun.kernels.triton.elementwise import add_and_norm, gated
from forerun.kernels.triton.linear import Product, add_splits
from forerun.kernels.triton.rotation import RotationTables, rotate_and_write
from forerun.kernels.triton.step_arrays import BUCKETS, HEAD_ROWS, MAX_ROWS, Capacity, row_start

_PROGRAMS = 256
"""That attention is spread over, for all key heads together: two for each multiprocessor of a large device."""


@dataclass(frozen=True, slots=True, eq=False)
class TritonLayer:
    """The weights of one layer; norms in float32.

    Attributes:
        head_norms: [2, D] of queries and keys, or None.
        window: a row at position p sees positions above p - window; None: all.
    """

    input_norm: Tensor
    qkv: Product
    head_norms: Tensor | None
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class TritonWeights:
    """The weights and tables that a model's steps read and never write.

    Attributes:
        embedding: gives [n, hidden] when it is indexed with token ids.
        norm: the final one's weight. head: the output layer.
        takes: the input type of products.
        base: the page that distances of pages are counted from.
        num_heads, num_kv_heads, head_dim: of attention.
        layer_starts: by layer, the first number of its keys in a page.
    """

    embedding: Tensor | QuantizedEmbedding
    layers: Sequence[TritonLayer]
    norm: Tensor
    head: Product
    tables: RotationTables
    takes: torch.dtype
    base: Tensor
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_starts: Sequence[int]


class TritonStep:
    """One step of a model at fixed addresses: its memory, and its kernels in order.

    Attributes:
        words: [Capacity.words] int64 on the device (`step_arrays`).
        x: [MAX_ROWS, hidden] float32, the residual stream.
        head_x: [HEAD_ROWS, hidden] float32, the states whose logits are computed. logits: [HEAD_ROWS, V] float32.

    Args:
        capacity: of words and work items.
    """

    def __init__(self, weights: TritonWeights, capacity: Capacity) -> None:
        self._weights = weights
        device = weights.norm.device
        hidden = len(weights.norm)
        heads = weights.num_heads
        width = weights.head_dim
        products = [each for layer in weights.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        largest = max(MAX_ROWS * product.splits * product.out_features for product in products)
        head_largest = HEAD_ROWS * weights.head.splits * weights.head.out_features

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.words = zeros(capacity.words, dtype=torch.int64)
        self.x = zeros(MAX_ROWS, hidden)
        self.head_x = zeros(HEAD_ROWS, hidden)
        self.logits = zeros(HEAD_ROWS, weights.head.out_features)
        self._normed = zeros(MAX_ROWS, hidden, dtype=weights.takes)
        self._query = zeros(MAX_ROWS, heads, width, dtype=weights.base.dtype)
        self._attended = zeros(MAX_ROWS, heads, width, dtype=weights.takes)
        activated = max(layer.down.in_features for layer in weights.layers)
        self._activated = zeros(MAX_ROWS, activated, dtype=weights.takes)
        self._sums = zeros(max(largest, head_largest))
        self._partial = PartialResults.of(capacity.items, weights.num_kv_heads, width, device)
        self._programs = max(1, _PROGRAMS // weights.num_kv_heads) if device.type == "cuda" else 1

    @property
    def nbytes(self) -> int:
        """Return the bytes of the memory that a step computes in."""
        tensors = [each for each in vars(self).values() if isinstance(each, Tensor)]
        return sum(each.nbytes for each in (*tensors, self._partial.results, self._partial.stats))

    def embed(self, bucket: int) -> None:
        """Write what enters the first layer to x."""
        self.x[:bucket] = self._weights.embedding[self.words[row_start("token") :][:bucket]]

    def layers(self, bucket: int, first: int, last: int, hidden_outputs: Sequence[tuple[int, Tensor]] = ()) -> None:
        """Advance x from what enters layer `first` to what enters layer `last`.

        Args:
            bucket: rows, of those in BUCKETS.
            hidden_outputs: layers, and where what enters each is written, [MAX_ROWS, hidden].
        """
        x = self.x[:bucket]
        outputs_of = dict(hidden_outputs)
        # of the product that is not added yet
        sums = None
        bias = None
        for index in range(first, last):
            layer = self._weights.layers[index]
            normed = self._normed[:bucket]
            add_and_norm(x, sums, bias, layer.input_norm, normed, self._weights.eps)
            if index in outputs_of:
                outputs_of[index][:bucket] = x
            sums = self._product(layer.out, self._attention(index, layer, normed).flatten(1))
            add_and_norm(x, sums, layer.out.bias, layer.mlp_norm, normed, self._weights.eps)
            activated = self._activated[:bucket]
            gated(self._product(layer.gate_up, normed), activated)
            sums = self._product(layer.down, activated)
            bias = layer.down.bias
        if sums is not None:
            add_and_norm(x, sums, bias)

    def normed(self, x: Tensor) -> Tensor:
        """Apply the final norm to rows, [n, hidden] float32; not captured."""
        out = torch.empty_like(x)
        if len(x):
            add_and_norm(x.contiguous(), weight=self._weights.norm, out=out, eps=self._weights.eps)
        return out

    def head(self, bucket: int) -> None:
        """Compute the logits of `head_x`. bucket: rows, at most HEAD_ROWS."""
        normed = self._normed[:bucket]
        add_and_norm(self.head_x[:bucket], weight=self._weights.norm, out=normed, eps=self._weights.eps)
        head = self._weights.head
        add_splits(self._product(head, normed), head.bias, self.logits[:bucket])

    def _attention(self, index: int, layer: TritonLayer, normed: Tensor) -> Tensor:
        """Compute attention, [rows, H, D], and write keys and values."""
        weights = self._weights
        bucket = len(normed)
        query = self._query[:bucket]
        out = self._attended[:bucket]
        start = weights.layer_starts[index]
        sums = self._product(layer.qkv, normed)
        rotate_and_write(
            sums,
            layer.qkv.bias,
            layer.head_norms,
            weights.eps,
            weights.tables,
            self.words,
            query,
            weights.base,
            start,
            weights.num_kv_heads,
        )
        scale = weights.head_dim**-0.5
        attend_pages(query, self.words, weights.base, self._partial, out, start, scale, layer.window, self._programs)
        return out

    def _product(self, product: Product, x: Tensor) -> Tensor:
        """Return the sums of a product, [splits, rows, out] float32, overwritten by the next product."""
        shape = product.splits, len(x), product.out_features
        sums = self._sums[: shape[0] * shape[1] * shape[2]].view(shape)
        product.sums(x, sums)
        return sums


HEAD_BUCKETS = tuple(bucket for bucket in BUCKETS if bucket <= HEAD_ROWS)
