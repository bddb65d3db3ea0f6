"""The loss of a head's predictions against the target's distributions, a few positions at a time.

A large vocabulary makes logits of all positions larger than anything else in training. So logits, loss and the loss's
gradient by the outputs are computed together, chunk by chunk, and only that gradient is kept. The target's
distribution is recomputed from its last state and its output rows of the draft vocabulary: restricted to these tokens
and renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.train.defaults import LossName
from forerun.train.heads.module import HeadRows
from forerun.train.heads.options import D_PACE, ON_POLICY, HeadTraining
from forerun.train.heads.target_states import HeadInputs
from forerun.train.losses import divergence, reach_weights, survival_weights

D_PACE_SMOOTHING = 0.5
"""Smoothing of the acceptance probabilities that weights follow: the authors' (2605.18810)."""
CHUNK = 64
"""Positions at a time: their logits fit a core's cache."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The soft labels of a head's predictions.

    Attributes:
        states: [W, target hidden], the target's, after its final norm, at the predicting positions.
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
    """Sum weight times loss over steps and positions.

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
                rows = targets.rows[step, here]
                weights = targets.weights[step, here].to(outputs.dtype)
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


def step_weights(base: float, steps: int) -> Tensor:
    """Return [J] weights of the steps of a draft, each `base` times the one before, of sum 1."""
    weights = base ** torch.arange(steps, dtype=torch.float32)
    return weights / weights.sum()


def loss_and_gradient(logits: Tensor, wanted: Tensor, loss: LossName) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, [n], and the gradient of their sum by the logits, [n, V].

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


@dataclass(frozen=True, slots=True)
class ChainTargets:
    """The soft labels of the tokens of C chains of K.

    Attributes:
        states: [C * K, target hidden], the target's, after its final norm, at the positions that predict them.
        output_rows: [V, target hidden], of its output layer: those of the draft vocabulary.
        weights: [C, K] of each token in the sum; 0 where there is none.
        loss: see `losses.py`.
        smoothing: of `survival_weights`, which multiply these weights; None: they are taken as they are.
        text: [C * K] the text's tokens by their index in the draft vocabulary, -1 for one that is not in it; with it,
            `reach_weights` multiply these weights.
    """

    states: Tensor
    output_rows: Tensor
    weights: Tensor
    loss: LossName
    smoothing: float | None = None
    text: Tensor | None = None

    @classmethod
    def of(cls, inputs: HeadInputs, rows: HeadRows, weights: Tensor, options: HeadTraining) -> ChainTargets:
        """Return the targets of active rows, weighted by the options. weights: [A, J]."""
        offsets = rows.tokens.T.flatten()
        smoothing = D_PACE_SMOOTHING if options.position_weights == D_PACE else None
        text = None
        if options.position_weights == ON_POLICY:
            following = rows.token_ids[(offsets + 1).clamp(max=len(rows.token_ids) - 1)]
            text = inputs.target.columns.to(following.device)[following]
        loss: LossName = options.loss  # type: ignore[assignment]
        return cls(inputs.states[offsets, -1], inputs.target.output_rows, weights, loss, smoothing, text)


Parts = Sequence[tuple[Tensor, Tensor]]
"""Features [C * K, F] and a layer [V, F] each, whose products add up to the logits."""


def chain_loss(parts: Parts, targets: ChainTargets, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Sum weight times loss over chains and tokens; also return the overlap with the target, [C, K].

    The overlap has no gradient.

    chunk: tokens at a time.
    """
    flat = [tensor for part in parts for tensor in part]
    total, overlaps = _Chains.apply(targets, chunk, *flat)  # type: ignore[no-untyped-call]
    return total, overlaps


class _Chains(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, targets: ChainTargets, chunk: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        features = tensors[::2]
        layers = tensors[1::2]
        needed = ctx.needs_input_grad[2:]
        product = targets.output_rows.dtype
        wide = features[0].dtype
        cast = [layer.to(product) for layer in layers]
        by_features = [torch.zeros_like(each) for each in features]
        by_layers = [torch.zeros_like(each) if needed[2 * i + 1] else None for i, each in enumerate(layers)]
        chains, length = targets.weights.shape
        overlaps = torch.zeros(chains, length, dtype=wide, device=features[0].device)
        total = torch.zeros((), dtype=wide, device=features[0].device)
        step = max(1, chunk // length)
        for start in range(0, chains, step):
            here = slice(start, min(start + step, chains))
            rows = slice(here.start * length, here.stop * length)
            read = [each[rows].to(product) for each in features]
            logits = sum((each @ layer.T).to(wide) for each, layer in zip(read, cast, strict=True))
            assert isinstance(logits, Tensor)
            wanted = torch.softmax((targets.states[rows].to(product) @ targets.output_rows.T).to(wide), -1)
            drafted = torch.softmax(logits, -1)
            overlaps[here] = torch.minimum(wanted, drafted).sum(-1).view(-1, length)
            losses, by_logits = loss_and_gradient(logits, wanted, targets.loss)
            weights = targets.weights[here].to(wide)
            if targets.smoothing is not None:
                weights = weights * survival_weights(overlaps[here], weights > 0, targets.smoothing)
            if targets.text is not None:
                drafted_tokens, target_tokens = (
                    _columns_of(each, targets.text[rows]).view(-1, length) for each in (drafted, wanted)
                )
                weights = weights * reach_weights(drafted_tokens, target_tokens, weights > 0)
            flat = weights.reshape(-1, 1)
            total += (losses * flat[:, 0]).sum()
            gradient = by_logits.to(product)
            for i, layer in enumerate(cast):
                by_features[i][rows] = (gradient @ layer).to(wide) * flat
                whole = by_layers[i]
                if whole is not None:
                    whole += (gradient.T @ (read[i] * flat.to(product))).to(whole.dtype)
        ctx.save_for_backward(*by_features, *(each for each in by_layers if each is not None))
        ctx.trained = [each is not None for each in by_layers]
        ctx.mark_non_differentiable(overlaps)
        return total, overlaps

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_outputs[0]
        count = len(ctx.trained)
        by_features = ctx.saved_tensors[:count]
        by_layers = iter(ctx.saved_tensors[count:])
        found: list[Tensor | None] = [None, None]
        for gradient, is_trained in zip(by_features, ctx.trained, strict=True):
            found += [gradient * factor, next(by_layers) * factor if is_trained else None]
        return tuple(found)


def _columns_of(probabilities: Tensor, columns: Tensor) -> Tensor:
    """Return [n] the probability of one token of each row; 0 for -1. probabilities: [n, V]."""
    found = probabilities.gather(-1, columns.clamp(min=0)[:, None])[:, 0]
    return found.masked_fill(columns < 0, 0)
