"""The layers of a block head and what surrounds them, in a few calls of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.block.config import BlockConfig
from forerun.drafters.heads.layers import HeadLayers, head_attention
from forerun.drafters.heads.native import NativeHead
from forerun.kernels.cpu.library import LayerStruct, Library
from forerun.kernels.cpu.linear import NativeLinear
from forerun.models.attention.base import Planner
from forerun.models.attention.native import rows_struct
from forerun.models.attention.path_planner import PathPlanner
from forerun.models.base import Rows
from forerun.models.linear import Linear


class NativeBlockLayers(NativeHead[BlockConfig]):
    """`BlockLayers` by the native library: one call for context rows, one for all layers of a block, and one for its
    logits.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: BlockConfig, output: Linear, library: Library) -> None:
        super().__init__(made, config, library)
        self._context_norm = made.vector("hidden_norm.weight").contiguous()
        form, attention = head_attention(config)
        self._path_planner = PathPlanner([attention] * config.num_layers, made.dtype)
        self.planner: Planner = self._path_planner
        self._layers = (LayerStruct * config.num_layers)(*map(self._layer, range(config.num_layers)))
        self._model = self._model_struct(self._layers, config.num_layers, output, form.scale)

    def context(self, batch: Sequence[Rows]) -> None:
        parts = [rows.states for rows in batch if rows.states is not None]
        states = (parts[0] if len(parts) == 1 else torch.cat(parts)).float().contiguous()
        plan, tables = self._planned(batch)
        rows = rows_struct(plan, *tables)
        self._library.context(
            ctypes.byref(self._model),
            self._context_norm.data_ptr(),
            ctypes.byref(rows),
            states.data_ptr(),
            torch.get_num_threads(),
        )

    def forward(self, batch: Sequence[Rows], x: Tensor) -> tuple[Tensor, Tensor]:
        threads, model = torch.get_num_threads(), ctypes.byref(self._model)
        x = x.contiguous()
        plan, tables = self._planned(batch)
        rows = rows_struct(plan, *tables, are_blocks=True)
        self._library.layers(model, ctypes.byref(rows), 0, self._config.num_layers, x.data_ptr(), threads)
        parts = torch.split(x, [len(each.token_ids) for each in batch])
        wanted = [part[len(part) - each.num_wanted :] for part, each in zip(parts, batch, strict=True)]
        output = wanted[0] if len(wanted) == 1 else torch.cat(wanted)
        logits = torch.empty(len(output), self._config.draft_vocab_size)
        self._library.head(model, len(output), output.data_ptr(), logits.data_ptr(), threads)
        return output, logits

    def _layer(self, index: int) -> LayerStruct:
        place = f"layers.{index}"
        return self._layer_struct(
            place,
            input_norm=self._norm(f"{place}.input_layernorm"),
            query_norm=self._norm(f"{place}.self_attn.q_norm"),
            key_norm=self._norm(f"{place}.self_attn.k_norm"),
        )


def greedy_chains(
    library: Library,
    after: NativeLinear,
    before: Tensor,
    token_ids: Tensor,
    logits: Tensor,
    last: Sequence[int],
    lengths: Sequence[int],
) -> list[int]:
    """Return the most probable tokens of chains, each with the Markov bias of the one before it; -1 from the first row
    on whose logits are not finite.

    Args:
        after, before, token_ids: of the head (`BlockEnds`).
        logits: [sum of lengths, draft_vocab_size], those of one chain after another.
        last: [chains] the token before each chain. lengths: [chains], at least 1.
    """
    logits, picked = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64)
    firsts, counts = torch.tensor(last), torch.tensor(lengths)
    pointers = [each.data_ptr() for each in (before, token_ids, logits, firsts, counts)]
    library.greedy_chains(
        ctypes.byref(after.struct), *pointers, len(lengths), picked.data_ptr(), torch.get_num_threads()
    )
    tokens: list[int] = picked.tolist()
    return tokens
