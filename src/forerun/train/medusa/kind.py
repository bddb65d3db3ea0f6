"""Medusa heads as a kind of head that is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forerun.drafters.model.medusa import Medusa
from forerun.heads import MedusaConfig, StoredHead
from forerun.models import LanguageModel
from forerun.train.heads.evaluate import HeldOut
from forerun.train.heads.kind import HeadKind
from forerun.train.heads.module import HeadModule
from forerun.train.heads.run import COMPUTE, Read
from forerun.train.heads.start import hidden_size, target_config
from forerun.train.medusa.accuracies import accuracies
from forerun.train.medusa.loss import MedusaLoss
from forerun.train.medusa.module import MedusaHead, head_outputs, output_layers, set_first_weights
from forerun.train.medusa.options import MedusaTraining


def medusa_guess(head: HeadModule, read: Read) -> list[tuple[Tensor, Tensor]]:
    """As `evaluate.Guess`, of the first heads."""
    assert isinstance(head, MedusaHead)
    outputs = head_outputs(head, read.rows, read.states, read.embeddings, COMPUTE[read.states.device.type])
    layers = output_layers(head, read.target.output_rows)[: len(outputs)]
    if len(layers) == 1:
        return [(outputs, layers[0])]
    # one part for each head, which has features at its step alone
    parts = [torch.zeros_like(outputs) for _ in layers]
    for k, part in enumerate(parts):
        part[k] = outputs[k]
    return list(zip(parts, layers, strict=True))


class MedusaKind(HeadKind[MedusaTraining]):
    """Medusa heads, also in Hydra's order."""

    loss = MedusaLoss
    guess = staticmethod(medusa_guess)

    @property
    def most_draft_tokens(self) -> int:
        """As `HeadKind.most_draft_tokens`."""
        return self.options.shape.num_heads

    def config(self, name: str, served: LanguageModel, max_positions: int) -> MedusaConfig:
        """As `HeadKind.config`."""
        shape = self.options.shape
        return MedusaConfig(
            vocab_size=served.vocab_size,
            draft_vocab_size=min(shape.draft_vocab, served.vocab_size),
            target_hidden_size=hidden_size(served),
            num_heads=shape.num_heads,
            layers=(target_config(name).num_hidden_layers,),
            num_layers=shape.num_layers,
            sequential=shape.sequential,
            output_rows=shape.output_rows,
        )

    def module(self, config: MedusaConfig) -> MedusaHead:
        """As `HeadKind.module`."""
        return MedusaHead(config)

    def set_first_weights(self, head: MedusaHead, last_states: Tensor, output_rows: Tensor) -> None:
        """As `HeadKind.set_first_weights`."""
        set_first_weights(head, output_rows)

    def finish(self, head: MedusaHead, held_out_of: Callable[[int], HeldOut]) -> None:
        """Keep the accuracies that shape trees."""
        found = accuracies(held_out_of(head.config.num_heads).ranks(head), head.config.num_heads)
        head.config = replace(head.config, accuracies=found)

    def drafter(self, head: StoredHead[MedusaConfig]) -> Medusa:
        """As `HeadKind.drafter`."""
        return Medusa(head)
