"""The loss of Medusa heads: of each head's token against the target's distribution."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from forerun.train.accelerator import device_of
from forerun.train.heads.chain_loss import ChainTargets, chain_loss
from forerun.train.heads.loss import Targets, weighted_loss
from forerun.train.heads.options import DECAY
from forerun.train.heads.rows import predicted
from forerun.train.heads.run import COMPUTE, HeadLoss, Read
from forerun.train.medusa.module import MedusaHead, head_outputs, output_layers
from forerun.train.medusa.options import MedusaTraining
from forerun.train.workers import Batch


class MedusaLoss(HeadLoss[MedusaTraining]):
    """Of Medusa heads."""

    def steps(self, model: nn.Module) -> int:
        """One for each head."""
        assert isinstance(model, MedusaHead)
        return model.config.num_heads

    def summed(self, model: nn.Module, read: Read, piece: Batch) -> Tensor:
        """As `HeadLoss.summed`."""
        assert isinstance(model, MedusaHead)
        where = device_of(model)
        rows = read.rows.to(where)
        outputs = head_outputs(model, rows, read.states, read.embeddings, COMPUTE[where.type], read.augment)
        layers = output_layers(model, read.target.output_rows)
        loss, of_target = self.options.loss, read.target.output_rows
        if self.options.position_weights != DECAY:
            paced = ChainTargets.of(read, rows, predicted(rows).float(), self.options)
            return chain_loss([(outputs.transpose(0, 1).flatten(0, 1), layers[0])], paced)[0]
        weights = head_weights(self.options, rows.steps).to(where)[:, None] * rows.valid
        targets = Targets(read.states[rows.predictors, -1], of_target, rows.rows, weights, loss)  # type: ignore[arg-type]
        own = [None if model.config.output_rows == "target" else layer for layer in layers]
        if len(own) == 1:
            return weighted_loss(outputs, own[0], targets)
        total = torch.zeros((), dtype=outputs.dtype, device=where)
        for k, layer in enumerate(own):
            part = replace(targets, rows=rows.rows[k : k + 1], weights=weights[k : k + 1])
            total = total + weighted_loss(outputs[k : k + 1], layer, part)
        return total


def head_weights(options: MedusaTraining, num_heads: int) -> Tensor:
    """[K] of the heads, of sum 1."""
    weights = options.step_weight ** torch.arange(num_heads, dtype=torch.float32)
    return weights / weights.sum()
