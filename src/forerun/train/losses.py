"""Losses that teach a draft to agree with its target.

The acceptance rate of a drawn draft is the sum of min(target, draft) at each position, so total
variation is the loss that speaks of it directly; forward KL has the better gradient while the two
distributions are still far apart. Target distributions come as their `k` most probable tokens (see `continuations`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward_kl(draft_logprobs: Tensor, target_ids: Tensor, target_probs: Tensor) -> Tensor:
    """Cross-entropy of the draft under the target's distribution: KL(target || draft) up to a constant.

    draft_logprobs [N, V]; target_ids int64 [N, k]; target_probs [N, k]; returns [N] in nats.
    """
    return -(target_probs * draft_logprobs.gather(-1, target_ids)).sum(-1)


def total_variation(draft_logprobs: Tensor, target_ids: Tensor, target_probs: Tensor) -> Tensor:
    """1 - sum of min(target, draft): the probability that a drawn draft token is rejected, [N].

    Tokens outside the target's `k` most probable count as never accepted.
    """
    return 1 - overlap(draft_logprobs, target_ids, target_probs)


def overlap(draft_logprobs: Tensor, target_ids: Tensor, target_probs: Tensor) -> Tensor:
    """Sum of min(target, draft), [N]: the probability that a drawn draft token is accepted."""
    return torch.minimum(target_probs, draft_logprobs.gather(-1, target_ids).exp()).sum(-1)


def distillation_loss(
    draft_logits: Tensor, target_ids: Tensor, target_probs: Tensor, *, variation_share: float
) -> Tensor:
    """Mean over positions of (1 - share) forward KL + share total variation.

    draft_logits [..., V]; target_ids and target_probs [..., k].
    """
    logprobs = torch.log_softmax(draft_logits.float(), dim=-1)
    loss = torch.zeros((), device=logprobs.device)
    if variation_share < 1:
        loss = loss + (1 - variation_share) * forward_kl(logprobs, target_ids, target_probs).mean()
    if variation_share > 0:
        loss = loss + variation_share * total_variation(logprobs, target_ids, target_probs).mean()
    return loss
