"""The loss of an EAGLE head: of its unrolled predictions, and of its states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.train.accelerator import device_of
from forerun.train.eagle.module import EagleHead, unrolled
from forerun.train.eagle.options import EagleTraining
from forerun.train.heads.chain_loss import ChainTargets, chain_loss
from forerun.train.heads.loss import Targets, weighted_loss
from forerun.train.heads.options import DECAY
from forerun.train.heads.rows import HeadRows, predicted
from forerun.train.heads.run import COMPUTE, HeadLoss, Read
from forerun.train.workers import Batch


class EagleLoss(HeadLoss[EagleTraining]):
    """Of an EAGLE head."""

    def steps(self, model: nn.Module) -> int:
        """The unrolled ones."""
        return self.options.unroll

    def summed(self, model: nn.Module, read: Read, piece: Batch) -> Tensor:
        """As `HeadLoss.summed`."""
        assert isinstance(model, EagleHead)
        options, target, states, where = self.options, read.target, read.states, device_of(model)
        rows = read.rows.to(where)
        outputs, fed_back = unrolled(model, rows, states, read.embeddings, COMPUTE[where.type], read.augment)
        own = model.get_parameter("lm_head.weight") if model.config.own_output_rows else None
        weights = step_weights(options, rows.steps).to(where)
        last = states[rows.predictors, -1]
        targets = Targets(last, target.output_rows, rows.rows, weights[:, None] * rows.valid, options.loss)  # type: ignore[arg-type]
        if options.position_weights != DECAY:
            total = self._by_chains(outputs, target.output_rows if own is None else own, read, rows)
        else:
            total = weighted_loss(outputs, own, targets)
        if options.feature_weight:
            total = total + options.feature_weight * feature_loss(fed_back, last, targets)
        return total

    def _by_chains(self, outputs: Tensor, layer: Tensor, read: Read, rows: HeadRows) -> Tensor:
        """The sum with weights that follow acceptance, chain by chain. outputs: [J, A, H]."""
        targets = ChainTargets.of(read, rows, predicted(rows).float(), self.options)
        return chain_loss([(outputs.transpose(0, 1).flatten(0, 1), layer)], targets)[0]


def step_weights(options: EagleTraining, steps: int) -> Tensor:
    """[J] of the unrolled steps, of sum 1."""
    weights = options.step_weight ** torch.arange(steps, dtype=torch.float32)
    return weights / weights.sum()


def feature_loss(fed_back: Tensor, states: Tensor, targets: Targets) -> Tensor:
    """Sum of weight times the smooth L1 distance of the head's states to the target's next ones (EAGLE-1).

    Args:
        fed_back: [J, A, H].
        states: [W, H], the target's, of the places that predict: what the head's row stands for.
    """
    total = torch.zeros((), dtype=fed_back.dtype, device=fed_back.device)
    for step in range(len(fed_back)):
        found = fed_back[step, targets.rows[step]]
        distance = F.smooth_l1_loss(found, states.to(found.dtype), reduction="none").mean(-1)
        total = total + (distance * targets.weights[step].to(found.dtype)).sum()
    return total
