"""Losses that train a draft to agree with its target.

The acceptance rate of a drawn draft is the sum of min(target, draft) at each position, so total variation is the loss
that measures it directly, and its negative logarithm has the same optimum with a gradient that does not vanish where
the two distributions are still far apart. Forward KL has the better gradient there, and it also trains the ranking of
tokens, which is what matters for greedy drafts. The hybrid passes from forward KL to total
variation as acceptance rises (2602.23881).

Every loss compares two arrays over the same tokens, [..., k]: the draft's log-probabilities, of its whole softmax, and
the target's probabilities, of its own. The tokens are the target's `k` most probable ones where its soft labels come
from disk (`draft/samples.py`), or a head's whole vocabulary. Of the other tokens only the sum is known, which biases
each loss differently:

- forward KL ignores them: the best draft is the target's distribution renormalised over the tokens given.
- reverse KL and Jensen-Shannon compare the sums as if they were one more token, a lower bound of the divergence.
- total variation and the negative log overlap count none of them as accepted: acceptance is underestimated by at most
  the smaller of the two sums, and no gradient reaches the draft there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from forerun.train.defaults import LOSSES as LOSSES, LossName as LossName

HYBRID_RATE = 3.0
"""The hybrid's share of forward KL is exp(-HYBRID_RATE * acceptance rate)."""
_LEAST = 2.0**-24
"""Smallest positive number in float16, the type of stored target probabilities: a stored 0 may be anything below.
Also the least sum outside the tokens given, which rounding can make 0 or negative."""
_NONE = math.log(torch.finfo(torch.float32).tiny)


def at_tokens(draft_logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the draft's log-probabilities of the tokens given. draft_logits [..., V]; token_ids int64 [..., k].

    A token of which the draft has no logit is -1, and gets the smallest probability there is.
    """
    logits = draft_logits.float()
    logprobs = logits.gather(-1, token_ids.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    return logprobs.masked_fill(token_ids < 0, _NONE)


def forward_kl(draft_logprobs: Tensor, target_probs: Tensor) -> Tensor:
    """Return KL(target || draft) up to a constant, the target's entropy: the cross-entropy, in nats.

    Arguments [..., k], as of all losses; returns [...].
    """
    return -(target_probs * draft_logprobs).sum(-1)


def reverse_kl(draft_logprobs: Tensor, target_probs: Tensor) -> Tensor:
    """Return KL(draft || target) in nats, with all other tokens as one."""
    draft_probs = draft_logprobs.exp()
    inside = (draft_probs * (draft_logprobs - target_probs.clamp(min=_LEAST).log())).sum(-1)
    draft_rest = (1 - draft_probs.sum(-1)).clamp(min=_LEAST)
    target_rest = (1 - target_probs.sum(-1)).clamp(min=_LEAST)
    return inside + draft_rest * (draft_rest.log() - target_rest.log())


def jensen_shannon(draft_logprobs: Tensor, target_probs: Tensor) -> Tensor:
    """Return the mean divergence of target and draft from their middle, 0 to log 2 nats, all other tokens as one."""
    draft_probs = draft_logprobs.exp()
    target = target_probs.clamp(min=_LEAST)
    middle = (0.5 * (draft_probs + target)).log()
    inside = target * (target.log() - middle) + draft_probs * (draft_logprobs - middle)
    draft_rest = (1 - draft_probs.sum(-1)).clamp(min=_LEAST)
    target_rest = (1 - target_probs.sum(-1)).clamp(min=_LEAST)
    rest = (0.5 * (draft_rest + target_rest)).log()
    outside = target_rest * (target_rest.log() - rest) + draft_rest * (draft_rest.log() - rest)
    return 0.5 * (inside.sum(-1) + outside)


def overlap(draft_logprobs: Tensor, target_probs: Tensor) -> Tensor:
    """Return the sum of min(target, draft): the probability that a drawn draft token is accepted."""
    return torch.minimum(target_probs, draft_logprobs.exp()).sum(-1)


def total_variation(draft_logprobs: Tensor, target_probs: Tensor) -> Tensor:
    """Return 1 - overlap: the probability that a drawn draft token is rejected."""
    return 1 - overlap(draft_logprobs, target_probs)


def log_overlap(draft_logprobs: Tensor, target_probs: Tensor) -> Tensor:
    """Return -log overlap. Its gradient is total variation's over the overlap, and does not vanish at first."""
    target_logprobs = target_probs.clamp(min=torch.finfo(target_probs.dtype).tiny).log()
    return -torch.minimum(target_logprobs, draft_logprobs).logsumexp(-1)


def hybrid_share(acceptance: Tensor) -> Tensor:
    """Return forward KL's share of the hybrid, exp(-HYBRID_RATE * acceptance); no gradient goes through it."""
    return torch.exp(-HYBRID_RATE * acceptance.detach())


_PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jensen-shannon": jensen_shannon,
    "total-variation": total_variation,
    "log-overlap": log_overlap,
}


def divergence(
    name: LossName,
    draft_logprobs: Tensor,
    target_probs: Tensor,
    *,
    variation_share: float = 0.0,
    acceptance: Tensor | None = None,
) -> Tensor:
    """Compute the loss of this name at every position, [...]. Arguments [..., k].

    Args:
        variation_share: of total variation in `kl-then-tv`; forward KL has the rest.
        acceptance: that the hybrid goes by, a number; None takes the mean over these positions.
    """
    both = draft_logprobs, target_probs
    if name in _PLAIN:
        return _PLAIN[name](*both)
    if name == "hybrid":
        accepted = overlap(*both)
        share = hybrid_share(accepted.mean() if acceptance is None else acceptance)
        return share * forward_kl(*both) + (1 - share) * (1 - accepted)
    loss = draft_logprobs.new_zeros(draft_logprobs.shape[:-1])
    if variation_share < 1:
        loss = loss + (1 - variation_share) * forward_kl(*both)
    if variation_share > 0:
        loss = loss + variation_share * total_variation(*both)
    return loss


def distillation_loss(
    draft_logits: Tensor,
    target_ids: Tensor,
    target_probs: Tensor,
    name: LossName = "kl-then-tv",
    *,
    variation_share: float = 0.0,
) -> Tensor:
    """Return the mean over positions of the loss of this name.

    draft_logits [..., V]; target_ids and target_probs [..., k]; an id is -1 where the draft does not have the token.
    """
    logprobs = at_tokens(draft_logits, target_ids)
    probs = target_probs.masked_fill(target_ids < 0, 0)
    return divergence(name, logprobs, probs, variation_share=variation_share).mean()


def reach_weights(drafted: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
    """Return [C, K] weights of a draft's tokens by the probability that the head's own draft is accepted up to them.

    A token x is drafted and accepted with probability min(q(x), p(x)), and stands in a text drawn from the target with
    probability p(x). So a text's tokens, each weighted by min(1, q(x) / p(x)), give the expectation over the
    accepted prefixes of the head's own drafts, with no forward of the target beside that over the text. A token's
    weight is the product over those before it in the draft, divided by K. No gradient goes through it.

    Args:
        drafted, target: [C, K] the probabilities q and p of the text's tokens; p is 0 where the head cannot propose
            one, and no draft gets beyond it.
        wanted: [C, K] bool; the others have weight 0, and take part in no product.
    """
    ratio = torch.where(target > 0, drafted.detach() / target.clamp(min=_LEAST), 0.0).clamp(max=1)
    kept = torch.where(wanted, ratio, 1.0)
    before = torch.cat([torch.ones_like(kept[:, :1]), kept[:, :-1]], 1).cumprod(-1)
    return before * wanted.to(before.dtype) / kept.shape[-1]


def survival_weights(acceptance: Tensor, wanted: Tensor, smoothing: float) -> Tensor:
    """Return [C, K] weights of a draft's tokens that follow acceptance (D-PACE: 2605.18810): tokens weigh most where
    the expected accepted length would gain most.

    With c_k the probability that token k is accepted if all before it were, smoothed by (1 - smoothing) c + smoothing,
    a token's weight is the sum over m >= k of the product of the first m of them. They are divided by their sum if all
    were accepted. No gradient goes through them.

    Args:
        acceptance: [C, K], by chain.
        wanted: [C, K] bool; the others have weight 0, and take part in no product or sum.
    """
    kept = wanted.to(acceptance.dtype)
    smooth = torch.where(wanted, (1 - smoothing) * acceptance.detach() + smoothing, 1.0)
    reached = smooth.cumprod(-1) * kept
    weights = reached.flip(-1).cumsum(-1).flip(-1) * kept
    count = acceptance.shape[-1]
    return weights / (count * (count + 1) / 2)
