"""The loss of a head's predictions against the target's distributions, a few positions at a time.

A large vocabulary makes logits of all positions larger than anything else in training. So logits, loss and the loss's
gradient by the outputs are computed together, chunk by chunk, and only that gradient is kept. The target's
distribution is recomputed from its last state and its output rows of the draft vocabulary: restricted to these tokens
and renormalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.train.losses import LossName, divergence

CHUNK = 64
"""Positions at a time: their logits should stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the head should predict.

    Attributes:
        states: [W, target hidden], the target's, after its final norm, of the places that predict.
        output_rows: [V, target hidden], of its output layer: those of the draft vocabulary.
        rows: [J, W] which of the head's rows predicts the same token at each step.
        weights: [J, W] of each prediction in the sum; 0 where there is none.
        loss: see `losses.py`.
    """

    states: Tensor
    output_rows: Tensor
    rows: Tensor
    weights: Tensor
    loss: LossName


def weighted_loss(outputs: Tensor, own_rows: Tensor | None, targets: Targets, chunk: int = CHUNK) -> Tensor:
    """Sum over steps and positions of weight times loss.

    Args:
        outputs: [J, A, H], what the output layer reads.
        own_rows: [V, H] of an output layer that is trained; None: the target's rows.
        chunk: positions at a time.
    """
    total: Tensor = _Chunked.apply(outputs, own_rows, targets, chunk)  # type: ignore[no-untyped-call]
    return total


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, own_rows: Tensor | None, targets: Targets, chunk: int) -> Tensor:
        product = targets.output_rows.dtype
        kept = outputs.to(product)
        layer = targets.output_rows if own_rows is None else own_rows.to(product)
        gradient = torch.zeros_like(outputs)
        by_layer = None if own_rows is None else torch.zeros_like(own_rows)
        total = torch.zeros((), dtype=gradient.dtype, device=outputs.device)
        count = len(targets.states)
        for start in range(0, count, chunk):
            # the last chunk is as long as the others, and counts what it shares with the one before but once
            first = max(0, min(start, count - chunk))
            here = slice(first, first + chunk)
            wide = (targets.states[here].to(product) @ targets.output_rows.T).to(outputs.dtype)
            wanted = torch.softmax(wide, -1)
            for step in range(len(outputs)):
                rows, weights = targets.rows[step, here], targets.weights[step, here].to(outputs.dtype)
                if first < start:
                    weights = weights.index_fill(0, torch.arange(start - first, device=weights.device), 0)
                read = kept[step, rows]
                logits = (read @ layer.T).to(outputs.dtype)
                losses, wide = loss_and_gradient(logits, wanted, targets.loss)
                total += (losses * weights).sum()
                by_logits = wide.to(product)
                gradient[step].index_add_(0, rows, (by_logits @ layer).to(outputs.dtype) * weights[:, None])
                if by_layer is not None:
                    by_layer += (by_logits.T @ (read * weights[:, None].to(product))).to(by_layer.dtype)
        ctx.save_for_backward(gradient, by_layer)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient, by_layer = ctx.saved_tensors
        (factor,) = grad_outputs
        return gradient * factor, None if by_layer is None else by_layer * factor, None, None


def loss_and_gradient(logits: Tensor, wanted: Tensor, loss: LossName) -> tuple[Tensor, Tensor]:
    """Loss of each row, [n], and the gradient of their sum by the logits, [n, V].

    Args:
        logits: [n, V] of the head.
        wanted: [n, V] probabilities of the target.
    """
    if loss == "forward-kl":  # by hand: half of the passes over memory
        logprobs = torch.log_softmax(logits, -1)
        losses = -(wanted * logprobs).sum(-1)
        return losses, logprobs.exp_().sub_(wanted)
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        losses = divergence(loss, torch.log_softmax(logits, -1), wanted)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
    return losses.detach(), gradient
