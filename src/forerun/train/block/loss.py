"""The loss of a block head: of its blocks' tokens against the target's distributions, and of its confidence."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.train.accelerator import device_of
from forerun.train.block.module import BlockHead, blocks
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads.loss import ChainTargets, Parts, chain_loss
from forerun.train.heads.module import HeadRows, predicted
from forerun.train.heads.options import DECAY, BlockTraining
from forerun.train.heads.run import COMPUTE, HeadLoss, Read, Target
from forerun.train.loop import Batch


def choose_anchors(
    rows: HeadRows, wanted: Tensor, documents: Tensor, numbers: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Active rows, at most `count` of each packed row, drawn without replacement.

    Args:
        wanted, documents: [packed rows, window + 1], that `rows` were made of.
        numbers: [packed rows], what each row's draws depend on.

    Returns:
        [a] their indices among the active rows, rising; [a] what each counts: of a packed row together as much as its
        wanted tokens.
    """
    used = documents != NO_DOCUMENT
    packed = torch.arange(len(documents))[:, None].expand_as(documents)[used]
    of_active = packed[rows.states[rows.active]]
    chosen, counts = [], []
    for row, number in enumerate(numbers.tolist()):
        members = (of_active == row).nonzero().flatten()
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(number))[:count]
        taken = members[order].sort().values
        chosen.append(taken)
        counts.append(torch.full((len(taken),), float(wanted[row].sum()) / max(1, len(taken))))
    return torch.cat(chosen), torch.cat(counts)


def restricted(rows: HeadRows, chosen: Tensor) -> HeadRows:
    """With these active rows alone. `predictors`, `rows` and `valid` stay those of all. chosen: [a], rising."""
    ends = torch.searchsorted(chosen, torch.tensor([segment.last_active for segment in rows.segments])).tolist()
    segments = [
        replace(segment, first_active=first, last_active=last)
        for segment, first, last in zip(rows.segments, [0, *ends], ends, strict=False)
    ]
    return replace(
        rows,
        active=rows.active[chosen],
        tokens=rows.tokens[:, chosen],
        segments=[segment for segment in segments if segment.last_active > segment.first_active],
    )


class BlockLoss(HeadLoss[BlockTraining]):
    """Of a block head."""

    def steps(self, model: nn.Module) -> int:
        """The tokens of a block."""
        assert isinstance(model, BlockHead)
        return model.config.block_size

    def summed(self, model: nn.Module, read: Read, piece: Batch) -> Tensor:
        """As `HeadLoss.summed`, as if there were a block for each wanted token."""
        assert isinstance(model, BlockHead)
        options, where = self.options, device_of(model)
        _, wanted, documents, _, numbers = piece
        chosen, counts = choose_anchors(read.rows, wanted, documents, numbers, options.anchors)
        there = (predicted(read.rows)[chosen] * counts[:, None]).to(where)
        rows = restricted(read.rows, chosen).to(where)
        outputs, before = block_outputs(model, rows, read)
        decays = options.position_weights == DECAY
        weights = there * position_weights(options, rows.steps).to(where) if decays else there
        targets = ChainTargets.of(read, rows, weights, options)
        total, overlaps = chain_loss(logit_parts(model, read.target, outputs.flatten(0, 1), before.flatten()), targets)
        if model.config.confidence and options.confidence_weight:
            decayed = there * position_weights(options, rows.steps).to(where)
            total = total + options.confidence_weight * confidence_loss(
                model, read.target, outputs, before, overlaps, decayed
            )
        return total


def position_weights(options: BlockTraining, steps: int) -> Tensor:
    """[K] of the tokens of a block, exp(-(k - 1) / gamma), of sum 1."""
    weights = torch.exp(-torch.arange(steps, dtype=torch.float32) / options.gamma)
    return weights / weights.sum()


def block_outputs(head: BlockHead, rows: HeadRows, read: Read) -> tuple[Tensor, Tensor]:
    """[A, K, H] what the output layer reads of each block, and [A, K] the token before each."""
    mask = mask_of(head, read.target)
    outputs = blocks(head, rows, read.states, read.embeddings, mask, COMPUTE[read.states.device.type], read.augment)
    return outputs, rows.token_ids[rows.tokens.T]


def mask_of(head: BlockHead, target: Target) -> Tensor | None:
    """[H] what stands in the slots after the first; None where they hold no mask."""
    if head.config.context_tokens:
        return None
    if head.config.mask_token_id is None:
        return head.get_parameter("mask_embedding.weight")
    return target.embeddings(torch.tensor([head.config.mask_token_id], device=device_of(head)))[0]


def logit_parts(head: BlockHead, target: Target, outputs: Tensor, before: Tensor) -> Parts:
    """What the logits are made of: outputs by the output layer, and the tokens before by the Markov bias.

    outputs: [n, H]. before: [n].
    """
    own = head.config.own_output_rows
    parts = [(outputs, head.get_parameter("lm_head.weight") if own else target.output_rows)]
    if head.config.markov_rank:
        embedded, second = markov_before(head, target, before), head.get_parameter("markov_head.markov_w2.weight")
        if head.config.markov_shared:  # of the same output rows
            return [(outputs + F.linear(embedded, second).to(outputs.dtype), parts[0][1])]
        parts.append((embedded.to(outputs.dtype), second))
    return parts


def markov_before(head: BlockHead, target: Target, before: Tensor) -> Tensor:
    """[..., rank], what the Markov bias is a map of. before: tokens."""
    first = head.get_parameter("markov_head.markov_w1.weight")
    if not head.config.markov_shared:
        return F.embedding(before, first)
    return F.linear(target.embeddings(before.flatten()).to(first.dtype), first).view(*before.shape, -1)


def confidence_loss(
    head: BlockHead, target: Target, outputs: Tensor, before: Tensor, overlaps: Tensor, weights: Tensor
) -> Tensor:
    """Sum of weight times the cross-entropy of the confidence against the overlap, 1 - total variation. It does not
    alter what it is estimated from. All [A, K], outputs [A, K, H]."""
    features = outputs.detach()
    if head.config.markov_rank and head.config.confidence_with_markov:
        embedded = markov_before(head, target, before).detach()
        features = torch.cat([features, embedded.to(features.dtype)], -1)
    layer = head.get_parameter("confidence_head.proj.weight"), head.get_parameter("confidence_head.proj.bias")
    logits = F.linear(features, layer[0].to(features.dtype), layer[1].to(features.dtype))[..., 0]
    losses = F.binary_cross_entropy_with_logits(logits, overlaps.clamp(0, 1).to(logits.dtype), reduction="none")
    return (losses * weights.to(losses.dtype)).sum()
