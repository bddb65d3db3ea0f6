"""EAGLE heads as a kind of head that is trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.model.eagle import Eagle
from forerun.heads import EagleConfig
from forerun.models import LanguageModel
from forerun.train.accelerator import device_of
from forerun.train.eagle.module import EagleHead, unrolled
from forerun.train.heads.kind import HeadKind
from forerun.train.heads.loss import ChainTargets, Targets, chain_loss, step_weights, weighted_loss
from forerun.train.heads.module import HeadModule
from forerun.train.heads.options import DECAY, EagleShape, EagleTraining
from forerun.train.heads.rows import HeadRows, predicted
from forerun.train.heads.run import COMPUTE, HeadLoss, Read
from forerun.train.heads.start import (
    first_size,
    hidden_size,
    random_matrix,
    shape_for,
)
from forerun.train.loop import Batch


def head_config(target: str, served: LanguageModel, shape: EagleShape, max_positions: int) -> EagleConfig:
    """The configuration of a head for a target.

    Raises:
        ConfigError: layers that the target does not have, or sizes that contradict each other.
    """
    is_third = shape.version == 3
    return EagleConfig(
        **shape_for(target, served, shape, max_positions, shape.version),
        version=shape.version,
        target_hidden_size=hidden_size(served),
        norm_before_fc=is_third,
        norm_before_residual=is_third,
        norm_output=is_third,
        embedding_residual=is_third and not shape.plain_residual,
        own_output_rows=(is_third or shape.is_mtp) and shape.own_output_rows,
        is_mtp=shape.is_mtp,
    )


@torch.no_grad()
def set_first_weights(head: EagleHead, last_states: Tensor, output_rows: Tensor, seed: int) -> None:
    """Set all tensors: the fused state is the target's last one, normalised, the layer adds little to it, and the final
    norm gives it half of its size back: what it predicts is a token too early, and should not be believed too much.

    Args:
        last_states: [n, target hidden] of some tokens.
        output_rows: [V, target hidden] of the draft vocabulary.
    """
    config = head.config
    generator = torch.Generator().manual_seed(seed)
    size = first_size(last_states)
    for name, parameter in head.named_parameters():
        if name == "norm.weight":
            value = torch.full((len(parameter),), size)
        elif parameter.ndim == 1:
            value = torch.ones(len(parameter))
        elif name == "fc.weight":
            value = torch.zeros(parameter.shape)
            value[:, -config.target_hidden_size :] = torch.eye(config.hidden_size, config.target_hidden_size)
        elif name == "embedding_residual.weight":
            value = torch.zeros(parameter.shape)
        elif name == "lm_head.weight" and parameter.shape == output_rows.shape:
            value = output_rows.float()
        else:
            value = random_matrix(name, parameter.shape, 1, generator)
        parameter.copy_(value)
    head.check()


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
        weights = step_weights(options.step_weight, rows.steps).to(where)
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


def unrolled_guess(head: HeadModule, read: Read) -> list[tuple[Tensor, Tensor]]:
    """As `evaluate.Guess`, of an EAGLE head."""
    assert isinstance(head, EagleHead)
    outputs, _ = unrolled(head, read.rows, read.states, read.embeddings, COMPUTE[read.states.device.type])
    own = head.config.own_output_rows
    return [(outputs, head.get_parameter("lm_head.weight") if own else read.target.output_rows)]


class EagleKind(HeadKind[EagleTraining]):
    """EAGLE heads."""

    loss = EagleLoss
    guess = staticmethod(unrolled_guess)
    module, drafter = EagleHead, Eagle

    def config(self, name: str, served: LanguageModel, max_positions: int) -> EagleConfig:
        """As `HeadKind.config`."""
        return head_config(name, served, self.options.shape, max_positions)

    def set_first_weights(self, head: EagleHead, last_states: Tensor, output_rows: Tensor) -> None:
        """As `HeadKind.set_first_weights`."""
        set_first_weights(head, last_states, output_rows, self.options.seed)
