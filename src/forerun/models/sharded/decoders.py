"""A rank's part of a Llama model: the PyTorch decoder and the native one, with sums over ranks in place of products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.native.library import Library
from forerun.kernels.native.structs import RowsStruct
from forerun.kernels.native_linear import NativeLinear
from forerun.models.attention.base import Layout
from forerun.models.attention.native import rows_struct
from forerun.models.chains import Chains, Pick
from forerun.models.linear import Linear, Maker, Part
from forerun.models.llama import LlamaDecoder
from forerun.models.native_llama import NativeLlamaDecoder
from forerun.models.sharded.entrance import Entrance
from forerun.models.sharded.linear import GatheredLogits, SummingCodes, SummingLinear, summing
from forerun.models.sharded.maker import ShardMaker
from forerun.models.sharded.shard import Shard, is_summed
from forerun.models.taps import Taps
from forerun.ranks.peers import Peers
from forerun.types import Cache


class ShardedLlamaDecoder(LlamaDecoder):
    """The layers in PyTorch (`models/llama.py`) of one rank. All but attention and products is computed by every rank.

    Args:
        model: Transformers' model of this rank's part.
        maker: of its layers, not wrapped yet.
        wide: what partial products and logits are gathered in.
    """

    def __init__(
        self,
        model: Any,
        maker: Maker,
        entrance: Entrance,
        shard: Shard,
        peers: Peers,
        gathered: GatheredLogits,
        wide: torch.dtype,
    ) -> None:
        super().__init__(model, ShardMaker(maker, shard, peers, gathered, wide))
        self._entrance, self._output = entrance, _Output(shard, peers, self.lm_head)

    def embed(self, layout: Layout) -> Tensor:
        """As `LayerRangeDecoder.embed`."""
        return self._entrance.embed(layout)

    def through(self, x: Tensor, layout: Layout, first: int, last: int, taps: Taps) -> Tensor:
        """As `LayerRangeDecoder.through`."""
        self._entrance.begin()
        return super().through(x, layout, first, last, taps)

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """As `Decoder.embedding_rows`."""
        return self._entrance.embedding_rows(token_ids)

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """As `Decoder.output_rows`, on the leader; all ranks ask for the same."""
        return self._output.rows(token_ids)


class ShardedNativeDecoder(NativeLlamaDecoder):
    """The layers by the native kernels (`models/native_llama.py`) of one rank, in halves: the products that ranks add
    up are computed between two calls of the library.

    Args:
        model: Transformers' model of this rank's part.
        maker: of linear layers that are `NativeLinear`.
    """

    def __init__(
        self,
        model: Any,
        library: Library,
        maker: Maker,
        cache_dtype: torch.dtype,
        entrance: Entrance,
        shard: Shard,
        peers: Peers,
        gathered: GatheredLogits,
    ) -> None:
        self._shard, self._peers, self._entrance, self._gathered = shard, peers, entrance, gathered
        self._summed: dict[str, SummingLinear | SummingCodes] = {}
        super().__init__(model, library, maker, cache_dtype)
        self._mixed_width = self.num_heads * self.head_dim
        self._gated_width: int = self._model.intermediate
        self._output = _Output(shard, peers, self.lm_head)

    def embed(self, layout: Layout) -> Tensor:
        """As `LayerRangeDecoder.embed`."""
        return self._entrance.embed(layout)

    def through(self, x: Tensor, layout: Layout, first: int, last: int, taps: Taps) -> Tensor:
        """As `LayerRangeDecoder.through`."""
        self._entrance.begin()
        x = x.to(torch.float32, copy=True).contiguous()
        rows = rows_struct(layout.plan, *self._rotation.reaching(layout.num_positions))
        for index in range(first, last):
            taps.take(index, x)
            path = f"model.layers.{index}"
            mixed = self._half(rows, index, x, self._mixed_width, is_gated=False)
            x = self._summed[f"{path}.self_attn.o_proj.weight"].add_to(x, mixed)
            gated = self._half(rows, index, x, self._gated_width, is_gated=True)
            x = self._summed[f"{path}.mlp.down_proj.weight"].add_to(x, gated)
        return x

    def head(self, x: Tensor, layout: Layout, taps: Taps) -> Tensor:
        """As `LayerRangeDecoder.head`."""
        taps.take_normed(self.num_layers, x, self._normed)
        if not layout.num_logits:
            return x.new_empty(0, self._shard.vocab_size)
        x = layout.wanted(x).to(torch.float32, copy=True).contiguous()
        logits = torch.empty(len(x), self.lm_head.out_features)
        self._library.head(ctypes.byref(self._model), len(x), x.data_ptr(), logits.data_ptr(), torch.get_num_threads())
        return self._gathered.of(logits, x)  # which is normed now

    def chains(self, caches: Sequence[Cache], pick: Pick) -> Chains | None:
        """As `LanguageModel.chains`: a rank computes no row alone."""
        return None

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """As `Decoder.embedding_rows`."""
        return self._entrance.embedding_rows(token_ids)

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """As `Decoder.output_rows`, on the leader; all ranks ask for the same."""
        return self._output.rows(token_ids)

    def _half(self, rows: RowsStruct, index: int, x: Tensor, width: int, *, is_gated: bool) -> Tensor:
        """What the second product of half a layer reads: [T, width]."""
        out = torch.empty(len(x), width)
        model, pointers = ctypes.byref(self._model), (x.data_ptr(), out.data_ptr())
        self._library.half_layer(model, ctypes.byref(rows), index, int(is_gated), *pointers, torch.get_num_threads())
        return out

    def _outer_layers(
        self, model: Any, maker: Maker, output_tokens: Tensor | None
    ) -> tuple[NativeLinear, NativeLinear]:
        """The output layer's part. The embedding, which the leader has (`Entrance`), is left out."""
        table = model.model.embed_tokens
        is_tied = model.lm_head.weight is table.weight
        name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
        head = self._native(maker, Part(name, model.lm_head.weight), model.lm_head.bias, is_head=True)
        table.to_empty(device="meta")
        model.lm_head.to_empty(device="meta")
        return head, head

    def _native(self, maker: Maker, part: Part, bias: Tensor | None = None, *, is_head: bool = False) -> NativeLinear:
        summed = is_summed(part.name)
        linear = super()._native(maker, part, None if summed else bias, is_head=is_head)
        if summed:
            inputs = self._shard.num_inputs(part.name)
            self._summed[part.name] = summing(linear, bias, self._peers, torch.float32, inputs)
        return linear


class _Output:
    """Rows of the output layer, of which each rank has some.

    Args:
        linear: of this rank's tokens.
    """

    def __init__(self, shard: Shard, peers: Peers, linear: Linear) -> None:
        self._shard, self._peers, self._linear = shard, peers, linear

    def rows(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden] float32 on the leader; on others their own among zeros."""
        first, last = self._shard.vocabulary
        own = (token_ids >= first) & (token_ids < last)
        rows = torch.zeros(len(token_ids), self._linear.in_features)
        rows[own] = self._linear.rows(token_ids[own] - first)
        parts = self._peers.to_leader(rows)
        return rows if parts is None else torch.stack(parts).sum(0)
