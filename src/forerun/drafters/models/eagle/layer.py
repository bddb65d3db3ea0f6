"""The layer of an EAGLE head: the interface, and its computation in PyTorch and by the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.heads.layers import HeadLayers, NativeHead, fused_states, head_modules
from forerun.kernels.cpu.library import EagleStruct, Library, LinearStruct, RowsStruct
from forerun.kernels.torch.elementwise import rms_norm
from forerun.models.attention.base import Layout, Planner
from forerun.models.attention.native import rows_struct
from forerun.models.base import HiddenStateOutputs, Rows
from forerun.models.draft_session import DraftSession, NativeDraftSession, Pick
from forerun.models.fused.decoder import FusedDecoder
from forerun.models.linear import Linear
from forerun.models.model import lay_out
from forerun.types import Cache


class ReferenceEagleLayer:
    """Computes the rows of an EAGLE head in PyTorch, with linear layers of the target's kind.

    Attributes:
        planner: of its attention.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: EagleConfig, output: Linear) -> None:
        self._config = config
        self._made = made
        self._decoder = FusedDecoder(*head_modules(made, config, output))
        self._fuse = made.linear("fc")
        self._embedding_residual = made.linear("embedding_residual") if config.embedding_residual else None
        self._state_norms = [made.vector(f"{name}.weight") for name in config.state_norms]
        self._entry_norms = [made.vector(f"{name}.weight") for name in config.entry_norms]
        self._eps = torch.tensor(config.rms_norm_eps, dtype=made.compute, device=made.device)
        self.planner: Planner = self._decoder.planner

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's states for a head of version 3, [n, hidden_size].

        Args:
            states: [n, layers, target_hidden_size] in float32 or float64.
        """
        return fused_states(self._made, self._fuse, self._state_norms, states)

    def forward(self, layout: Layout, embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rows, whose keys and values join their caches.

        Args:
            embedding: [T, target_hidden_size], of the rows' tokens, in float32 or float64.
            states: [T, S], of the tokens before them: the target's, fused for version 3, or the head's own.

        Returns:
            [R, draft_vocab_size] logits of the requested rows, perhaps padded, and [., hidden_size] states for the next
            rows, of the rows whose hidden states the layout asks for.
        """
        output = self._layers(layout, embedding, states)
        decoder = self._decoder
        handed_on = HiddenStateOutputs((decoder.num_layers,) * self._config.norm_output, layout)
        logits = decoder.head(output, layout, handed_on)
        normed = handed_on.stacked()
        given = layout.select_hidden_rows(output) if normed is None else normed[:, 0]
        return logits.to(self._made.compute), given.to(self._made.compute)

    def draft_session(
        self, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> DraftSession | None:
        """Return a session that drafts chains row by row; None if this backend has none.

        Args:
            embed: [n] token ids -> [n, target_hidden_size].
        """
        return None

    def of_outputs(self, blocks: NDArray[np.int32]) -> EagleLayer | None:
        """Return the layer with these blocks of 16 outputs (`LanguageModel.of_outputs`); None: it computes all."""
        return None

    def keys(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> None:
        """Compute only the keys and values of rows, which join their caches' scratch.

        Args:
            embedding, states: as of `forward`, without padding.
        """
        layout = lay_out(batch, self.planner)
        self._layers(layout, *(_padded(x, layout.num_rows) for x in (embedding, states)))

    def blocks(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the rows of blocks (`Rows.is_block`), whose keys and values join their caches' scratch.

        Arguments and results are those of `forward`, for all rows, without padding.
        """
        layout = lay_out(batch, self.planner)
        logits, outputs = self.forward(layout, *(_padded(x, layout.num_rows) for x in (embedding, states)))
        return logits[: layout.num_new], outputs

    def _layers(self, layout: Layout, embedding: Tensor, states: Tensor) -> Tensor:
        """Return the output of the head's last layer, [T, hidden_size]. Arguments are those of `forward`."""
        made = self._made
        decoder = self._decoder
        nothing = HiddenStateOutputs((), layout)
        pair = [embedding, states]
        for place, norm in enumerate(self._entry_norms):
            pair[place] = rms_norm(pair[place], norm, self._eps)
        read = torch.cat(pair, 1)
        if self._config.version == 1:  # fc makes the hidden state of embedding and state, and the layers are whole
            x = made.multiply(self._fuse, read).to(made.takes)
            return decoder.forward_layers(x, layout, 0, decoder.num_layers, nothing)
        # version 3: attention of the first layer reads both, and the state is its residual
        x = pair[1] if self._config.norm_before_residual else states
        if self._embedding_residual is not None:
            x = x + made.multiply(self._embedding_residual, embedding)
        x = decoder.behind_norm(0, x.to(made.takes), read.to(made.takes), layout, decoder.cos_sin(layout))
        return decoder.forward_layers(x, layout, 1, decoder.num_layers, nothing)


def _padded(x: Tensor, num_rows: int) -> Tensor:
    """Return x with its last row repeated up to [num_rows, ...]."""
    return torch.cat([x, x[-1:].expand(num_rows - len(x), -1)])


class NativeEagleLayer(NativeHead[EagleConfig]):
    """Computes what `ReferenceEagleLayer` does by the native library; a call reads the head's weights once.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: EagleConfig, output: Linear, library: Library) -> None:
        super().__init__(made, config, output, library)
        self._eagle = self._eagle_struct()
        self._session: NativeEagleChains | None = None  # the last

    def forward(self, layout: Layout, embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        wanted = torch.arange(layout.num_rows) if layout.logit_rows is None else layout.logit_rows
        rows = rows_struct(layout.plan, *self._decoder.cos_sin.reaching(layout.num_positions))
        logits, x = self._computed(rows, embedding, states, wanted[: layout.num_logits])
        return logits, layout.select_hidden_rows(x)

    def draft_session(
        self, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> DraftSession | None:
        if self._session is None or not self._session.resumes(caches, pick):
            self._session = NativeEagleChains(self, caches, pick, embed)
        return self._session

    def of_outputs(self, blocks: NDArray[np.int32]) -> NativeEagleLayer:
        part = copy(self)
        part._decoder = self._decoder.of_outputs(blocks)
        part._session = None
        part._eagle = EagleStruct.from_buffer_copy(self._eagle)
        part._eagle.model.head = part._decoder.struct.head
        return part

    def keys(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> None:
        embedding = embedding.contiguous()
        states = states.contiguous()
        plan, tables = self._planned(batch)
        rows = rows_struct(plan, *tables)
        read = (embedding.data_ptr(), states.data_ptr())
        threads = torch.get_num_threads()
        self._library.eagle(ctypes.byref(self._eagle), ctypes.byref(rows), *read, None, 0, None, None, threads)

    def blocks(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        plan, tables = self._planned(batch)
        rows = rows_struct(plan, *tables, are_blocks=True)
        return self._computed(rows, embedding, states, torch.arange(len(embedding)))

    def compute(
        self, rows: RowsStruct, embedding: Tensor, states: Tensor, wanted: Tensor, x: Tensor, logits: Tensor
    ) -> None:
        """Write the states of all rows for the next rows to x, [T, hidden_size], and the logits of the wanted rows.

        Args:
            embedding, states: as of `forward`, contiguous.
        """
        library = self._library
        count = len(wanted)
        last = self._decoder.num_layers
        given = (embedding.data_ptr(), states.data_ptr(), wanted.data_ptr())
        threads = torch.get_num_threads()
        one = last == 1
        outputs = logits.data_ptr()
        library.eagle(
            ctypes.byref(self._eagle), ctypes.byref(rows), *given, count * one, x.data_ptr(), outputs, threads
        )
        if one:
            return
        model = ctypes.byref(self._decoder.struct)
        library.forward_layers(model, ctypes.byref(rows), 1, last, x.data_ptr(), None, 0, None, threads)
        read = x[wanted]
        library.head(model, count, read.data_ptr(), outputs, threads)
        if self._config.norm_output:  # without logits, the final norm alone
            library.head(model, len(x), x.data_ptr(), None, threads)

    def _computed(self, rows: RowsStruct, embedding: Tensor, states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the wanted rows, and the states of all rows for the next rows."""
        x = torch.empty(len(embedding), self._config.hidden_size)
        logits = torch.empty(len(wanted), self._decoder.num_outputs)
        self.compute(rows, embedding.contiguous(), states.contiguous(), wanted, x, logits)
        return logits, x

    def _eagle_struct(self) -> EagleStruct:
        config = self._config
        reads_pair = config.version == 3
        norms = config.entry_norms or (None, None)
        return EagleStruct(
            model=self._decoder.struct,
            embedding_norm=self._norm(norms[0]),
            state_norm=self._norm(norms[1]),
            fc=LinearStruct() if reads_pair else self._fuse,
            embedding_residual=self._linear("embedding_residual") if config.embedding_residual else LinearStruct(),
            embedding_width=config.target_hidden_size,
            state_width=config.hidden_size,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output and self._decoder.num_layers == 1,
        )


class NativeEagleChains(NativeDraftSession):
    """Drafts chains with an EAGLE head in native code.

    Args:
        caches, pick, embed: as of `ReferenceEagleLayer.draft_session`.
    """

    def __init__(
        self, layer: NativeEagleLayer, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(layer._library, caches, layer._decoder.cos_sin, layer._decoder.num_outputs, pick)
        self._layer = layer
        self._embed = embed
        self._given = torch.empty(0, layer._config.hidden_size)
        self._each = torch.arange(len(caches))

    def keep(self, places: Sequence[int]) -> None:
        super().keep(places)
        self._given = self._given[list(places)]

    def _compute(self, num_rows: int, num_chains: int, wanted: Tensor | None, states: Tensor | None) -> None:
        embedding = self._embed(torch.from_numpy(self._token_ids[:num_rows])).contiguous()
        read = self._given if states is None else states.contiguous()
        x = torch.empty(num_rows, self._layer._config.hidden_size)
        last = self._each[:num_chains] if wanted is None else wanted
        self._layer.compute(self._rows, embedding, read, last, x, self._logits)
        self._given = x if wanted is None else x[wanted]


EagleLayer = ReferenceEagleLayer | NativeEagleLayer
