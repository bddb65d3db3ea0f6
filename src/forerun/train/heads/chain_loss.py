"""The loss of drafts, chain by chain: what each of their tokens was predicted by, against the target's distributions.

Logits, loss and the loss's gradient by what they were made from are computed together, a few chains at a time, and only
that gradient is kept, as `loss.py` does position by position. Chains are whole, so that the weights of a chain's
tokens may follow from how well it agrees with the target (`losses.survival_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.train.heads.loss import CHUNK, loss_and_gradient
from forerun.train.heads.options import D_PACE, ON_POLICY, HeadTraining
from forerun.train.heads.rows import HeadRows
from forerun.train.heads.run import D_PACE_SMOOTHING, Read
from forerun.train.losses import LossName, reach_weights, survival_weights


@dataclass(frozen=True, slots=True)
class ChainTargets:
    """What the tokens of C chains of K should be.

    Attributes:
        states: [C * K, target hidden], the target's, after its final norm, of the places that predict them.
        output_rows: [V, target hidden], of its output layer: those of the draft vocabulary.
        weights: [C, K] of each token in the sum; 0 where there is none.
        loss: see `losses.py`.
        smoothing: of `survival_weights`, which multiply these weights; None: they are taken as they are.
        text: [C * K] the text's tokens by their place in the draft vocabulary, -1 for one that is not in it; with it,
            `reach_weights` multiply these weights.
    """

    states: Tensor
    output_rows: Tensor
    weights: Tensor
    loss: LossName
    smoothing: float | None = None
    text: Tensor | None = None

    @classmethod
    def of(cls, read: Read, rows: HeadRows, weights: Tensor, options: HeadTraining) -> ChainTargets:
        """Of active rows, weighted as the options tell. weights: [A, J]."""
        places = rows.tokens.T.flatten()
        smoothing = D_PACE_SMOOTHING if options.position_weights == D_PACE else None
        text = None
        if options.position_weights == ON_POLICY:
            following = rows.token_ids[(places + 1).clamp(max=len(rows.token_ids) - 1)]
            text = read.target.columns.to(following.device)[following]
        loss: LossName = options.loss  # type: ignore[assignment]
        return cls(read.states[places, -1], read.target.output_rows, weights, loss, smoothing, text)


Parts = Sequence[tuple[Tensor, Tensor]]
"""Features [C * K, F] and a layer [V, F] each, whose products add up to the logits."""


def chain_loss(parts: Parts, targets: ChainTargets, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Sum over chains and tokens of weight times loss, and the overlap with the target, [C, K], without gradient.

    chunk: tokens at a time.
    """
    flat = [tensor for part in parts for tensor in part]
    total, overlaps = _Chains.apply(targets, chunk, *flat)  # type: ignore[no-untyped-call]
    return total, overlaps


class _Chains(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, targets: ChainTargets, chunk: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        features, layers = tensors[::2], tensors[1::2]
        needed = ctx.needs_input_grad[2:]
        product, wide = targets.output_rows.dtype, features[0].dtype
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
                own, hoped = (_of(each, targets.text[rows]).view(-1, length) for each in (drafted, wanted))
                weights = weights * reach_weights(own, hoped, weights > 0)
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
        factor, count = grad_outputs[0], len(ctx.trained)
        by_features, by_layers = ctx.saved_tensors[:count], iter(ctx.saved_tensors[count:])
        found: list[Tensor | None] = [None, None]
        for gradient, is_trained in zip(by_features, ctx.trained, strict=True):
            found += [gradient * factor, next(by_layers) * factor if is_trained else None]
        return tuple(found)


def _of(probabilities: Tensor, columns: Tensor) -> Tensor:
    """[n] the probability of one token of each row; 0 for -1. probabilities: [n, V]."""
    found = probabilities.gather(-1, columns.clamp(min=0)[:, None])[:, 0]
    return found.masked_fill(columns < 0, 0)
