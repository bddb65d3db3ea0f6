"""The layer of an EAGLE head and what surrounds it, in one call of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.eagle.layer import EagleNames
from forerun.drafters.heads.layers import HeadLayers, head_attention
from forerun.drafters.heads.native import NativeHead
from forerun.kernels.cpu.library import EagleStruct, Library, LinearStruct, RowsStruct
from forerun.models.attention.base import Layout, Planner
from forerun.models.attention.native import rows_struct
from forerun.models.attention.path_planner import PathPlanner
from forerun.models.base import Rows
from forerun.models.draft_session import DraftSession, Pick
from forerun.models.draft_session_native import NativeDraftSession
from forerun.models.linear import Linear
from forerun.types import Cache


class NativeEagleLayer(NativeHead[EagleConfig]):
    """`EagleLayer` by the native library. Whatever a call computes, it reads the head's weights once.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: EagleConfig, output: Linear, library: Library) -> None:
        super().__init__(made, config, library)
        names = EagleNames(config)
        self._layer = self._layer_struct(
            names.layer, input_norm=None if config.version == 3 else self._norm(names.input_norm)
        )
        form, attention = head_attention(config)
        self._path_planner = PathPlanner([attention], made.dtype)
        self.planner: Planner = self._path_planner
        self._eagle = self._eagle_struct(names, output, form.scale)

    def forward(self, layout: Layout, embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """As `EagleLayer.forward`."""
        wanted = torch.arange(layout.num_rows) if layout.logit_rows is None else layout.logit_rows
        rows = rows_struct(layout.plan, *self._rotation.reaching(layout.num_positions))
        return self._computed(rows, embedding, states, wanted[: layout.num_logits])

    def draft_session(
        self, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> DraftSession | None:
        """As `EagleLayer.chains`."""
        return NativeEagleChains(self, caches, pick, embed)

    def keys(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> None:
        """As `EagleLayer.keys`."""
        embedding, states = embedding.contiguous(), states.contiguous()
        plan, tables = self._planned(batch)
        rows, read = rows_struct(plan, *tables), (embedding.data_ptr(), states.data_ptr())
        threads = torch.get_num_threads()
        self._library.eagle(ctypes.byref(self._eagle), ctypes.byref(rows), *read, None, 0, None, None, threads)

    def blocks(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """As `EagleLayer.blocks`."""
        plan, tables = self._planned(batch)
        rows = rows_struct(plan, *tables, are_blocks=True)
        return self._computed(rows, embedding, states, torch.arange(len(embedding)))

    def _computed(self, rows: RowsStruct, embedding: Tensor, states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the wanted rows, and what the rows give to those that follow."""
        embedding, states = embedding.contiguous(), states.contiguous()
        x = torch.empty(len(embedding), self._config.hidden_size)
        logits = torch.empty(len(wanted), self._config.draft_vocab_size)
        self._library.eagle(
            ctypes.byref(self._eagle),
            ctypes.byref(rows),
            embedding.data_ptr(),
            states.data_ptr(),
            wanted.data_ptr(),
            len(wanted),
            x.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        return logits, x

    def _eagle_struct(self, names: EagleNames, output: Linear, scale: float) -> EagleStruct:
        config = self._config
        reads_pair = config.version == 3
        norms = (names.input_norm, names.hidden_norm) if reads_pair else names.entry_norms or (None, None)
        return EagleStruct(
            model=self._model_struct(ctypes.pointer(self._layer), 1, output, scale),
            embedding_norm=self._norm(norms[0]),
            state_norm=self._norm(norms[1]),
            entry=LinearStruct() if reads_pair else self._fuse,
            residual=self._linear("embedding_residual") if config.embedding_residual else LinearStruct(),
            embedding_width=config.target_hidden_size,
            state_width=config.hidden_size,
            keeps_norm=config.norm_before_residual,
            gives_norm=config.norm_output,
        )


class NativeEagleChains(NativeDraftSession):
    """Chains of an EAGLE head.

    Args:
        caches, pick, embed: as of `EagleLayer.chains`.
    """

    def __init__(
        self, layer: NativeEagleLayer, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(layer._library, caches, layer._rotation, layer._config.draft_vocab_size, pick)
        self._layer, self._embed = layer, embed
        self._given = torch.empty(0, layer._config.hidden_size)
        self._each = torch.arange(len(caches))

    def keep(self, places: Sequence[int]) -> None:
        """As `DraftSession.keep`."""
        super().keep(places)
        self._given = self._given[list(places)]

    def _compute(self, num_rows: int, num_chains: int, wanted: Tensor | None, states: Tensor | None) -> None:
        embedding = self._embed(torch.from_numpy(self._token_ids[:num_rows])).contiguous()
        read = self._given if states is None else states.contiguous()
        x = torch.empty(num_rows, self._layer._config.hidden_size)
        self._library.eagle(
            ctypes.byref(self._layer._eagle),
            ctypes.byref(self._rows),
            embedding.data_ptr(),
            read.data_ptr(),
            (self._each if wanted is None else wanted).data_ptr(),
            num_chains,
            x.data_ptr(),
            self._logits.data_ptr(),
            self._threads,
        )
        self._given = x if wanted is None else x[wanted]
