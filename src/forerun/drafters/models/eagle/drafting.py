"""An EAGLE head as a model that drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.drafters.base import Binding
from forerun.drafters.models.base import BoundModel
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.eagle.model import EagleModel
from forerun.drafters.models.head_files.source import HeadSource
from forerun.drafters.models.heads.config import HeadConfig, StoredHead
from forerun.drafters.models.heads.drafting import FusingHead, HeadState, pair_ids
from forerun.kernels.quantize import quantize_int8
from forerun.models import Forward, LanguageModel, Rows
from forerun.models.draft_session import DraftSession, NextTokens
from forerun.types import Sequence


class EagleHead(FusingHead):
    """An EAGLE head: its rows of a draft read the outputs of the rows that they follow."""

    @property
    def learnable(self) -> LearnableEagle | None:
        source = self.source
        if not isinstance(source, HeadSource) or source.head is None:
            return None
        config = source.head.config
        is_plain = isinstance(config, EagleConfig) and not (config.is_mtp or any(config.further_parts.values()))
        return LearnableEagle(source.head.of(EagleConfig, "", "eagle"), *self.given) if is_plain else None

    def prefix_ids(self, sequence: Sequence) -> list[int]:
        return pair_ids(self.columns.readable(sequence.token_ids), self.vocab_size)

    def feed(self, rows: Seq[Rows], states: Seq[HeadState], final: bool = False) -> Forward:
        """Compute rows; those of committed tokens, which read the target's states, are final at once."""
        return super().feed(rows, states, final or states[0].next_token < len(states[0].sequence.token_ids))

    def advance(
        self, chains: DraftSession, tokens: Seq[list[int]], states: Seq[HeadState], read: Tensor | None = None
    ) -> NextTokens:
        """Feed the chains. Rows of the draft read the chain's own outputs, and are dropped when it ends."""
        target_states = [state.states_for(len(each)) for each, state in zip(tokens, states, strict=True)]
        fused = list(self.fused([part for part in target_states if part is not None]))
        for state, part in zip(states, fused, strict=False):
            state.keep_fused(part)
        return super().advance(chains, tokens, states, torch.cat(fused) if fused else None)

    def forward(self, rows: Seq[Rows], states: Seq[HeadState]) -> Forward:
        result = super().forward(rows, states)
        assert result.hidden_outputs is not None
        parts = torch.split(result.hidden_outputs[:, 0], [each.num_hidden_rows for each in rows])
        for state, part in zip(states, parts, strict=True):
            state.keep_outputs(part)
        return result


class LearnableEagle:
    """An EAGLE head, all tensors of which can go on learning (`Learnable`).

    Attributes:
        head: as it was read.

    Args:
        bound, binding: as they were given to the head's `DraftingModel`.
    """

    def __init__(self, head: StoredHead[EagleConfig], bound: BoundModel, binding: Binding) -> None:
        self.head = head
        self._bound = bound
        self._target = binding.target

    @property
    def name(self) -> str:
        return self._bound.model.name

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach().float().clone() for name, tensor in self.head.tensors.items()}

    def changed(self, tensors: Mapping[str, Tensor]) -> BoundModel:
        quantized = {name: quantize_int8(tensors[name], self.name) for name in self.head.quantized}
        model = EagleModel(replace(self.head, tensors=tensors, quantized=quantized), self._target, self.name)
        served = self._bound.model
        assert isinstance(served, EagleModel)
        model.share_pages(served)
        return replace(self._bound, model=model, columns=model)


def eagle_head(model: str | Path | StoredHead[HeadConfig] | None, draft_vocab: int | None) -> EagleHead:
    """Return an EAGLE head, which is read when it is bound. Arguments as of `Eagle`."""
    return EagleHead(HeadSource(model, "eagle", make_eagle), draft_vocab)


def make_eagle(head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> EagleModel:
    """Build the model of an EAGLE head (`HeadSource`)."""
    return EagleModel(head.of(EagleConfig, name, "eagle"), target, name)
