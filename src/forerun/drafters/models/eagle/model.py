"""The model of an EAGLE head: one decoder layer over pages, for rows of any sequences in one forward.

`EagleConfig` describes the computation. Linear layers are of the target's kind: quantized to 8 bits if the target's
weights are quantized, else in its number format, native where the target is. Attention is that of any other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.eagle.layer import EagleLayer, NativeEagleLayer, ReferenceEagleLayer
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.heads.layers import HeadLayers, HeadModel
from forerun.errors import IncompatibleDrafterError
from forerun.models.base import Forward, LanguageModel, Rows
from forerun.models.draft_session import DeviceDraftSession, DraftSession, Pick
from forerun.models.model import lay_out
from forerun.types import Cache


class EagleModel(HeadModel):
    """A head over its target.

    Row i holds token i + 1 and `fuse` of the target's states of token i, or what the row before gave as its state
    (`Forward.hidden_outputs`, [T, 1, hidden]); its logits are of token i + 2.

    Args:
        head: its tensors, in any number format, or quantized.
        target: whose embeddings, and perhaps output layer, it reads.
        name: for messages and stored costs.

    Raises:
        IncompatibleDrafterError: the target is of another size.
    """

    def __init__(self, head: StoredHead[EagleConfig], target: LanguageModel, name: str = "a head") -> None:
        config = head.config
        super().__init__(head, target, name)
        if not config.own_output_rows and config.hidden_size != config.target_hidden_size:
            raise IncompatibleDrafterError(
                f"{name} has {config.hidden_size} numbers a state and reads the target's output layer, which has "
                f"{config.target_hidden_size}. A head of another width needs output rows of its own."
            )
        self.config = config
        made = HeadLayers.of(head, target)
        self.compute_dtype = made.compute
        output = made.output(config.own_output_rows, target, self.token_ids)
        self._layer: EagleLayer = (
            ReferenceEagleLayer(made, config, output)
            if made.library is None
            else NativeEagleLayer(made, config, output, made.library)
        )
        self.planner = self._layer.planner

    def share_pages(self, other: EagleModel) -> None:
        """Keep keys and values in the pages of another head of the same shapes."""
        self.planner = self._layer.planner = other._layer.planner

    @torch.inference_mode()
    def fuse(self, hidden_outputs: Tensor) -> Tensor:
        """Fuse the target's states to [n, hidden_size] in `compute_dtype`."""
        states = hidden_outputs.to(self.device, self.compute_dtype)
        return states[:, 0] if self.config.version == 1 else self._layer.fuse(states)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """Compute rows; `Forward.hidden_outputs` are always the states for the rows that come next.

        Raises:
            ValueError: rows have no states, or layers are requested.
        """
        if layers or any(rows.states is None for rows in batch):
            raise ValueError("a head reads a state beside every token, and has no layers to look into")
        layout = lay_out(batch, self._layer.planner)
        assert layout.states is not None
        embedding = self._embedded(layout.token_ids)
        logits, states = self._layer.forward(layout, embedding, layout.states.to(self.compute_dtype))
        return Forward(logits[: layout.num_logits], states[:, None])

    def draft_session(self, caches: Sequence[Cache], pick: Pick) -> DraftSession | None:
        if self.device.type == "cpu":
            return self._layer.draft_session(caches, pick, self._embedded)
        names = None if self.proposes_all else self.token_ids
        return DeviceDraftSession(self, caches, pick, names) if pick.num_ahead > 1 else None

    def of_outputs(self, blocks: NDArray[np.int32]) -> EagleModel | None:
        """Return the same head whose logits are those of some tokens alone (`LanguageModel.of_outputs`)."""
        layer = self._layer.of_outputs(blocks) if self.proposes_all else None
        if layer is None:
            return None
        model = copy(self)
        model._layer = layer
        return model

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return self.target.embedding_rows(token_ids).to(self.compute_dtype)
