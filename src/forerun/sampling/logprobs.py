"""The log-probabilities that the `logprobs` options report: those of the model, before any processing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, and the most probable tokens beside it.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability.
        top: (token id, logprob) of the most probable tokens, best first; ties to the lowest id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, token_ids: Tensor | list[int], num_top: int) -> list[TokenLogprob]:
    """Report the log-probabilities of a batch of rows.

    Args:
        logits: [R, V] the model's raw logits.
        token_ids: [R] the token that each row chose.
        num_top: how many of the most probable tokens to list; 0 lists none.
    """
    logprobs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    chosen = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    values = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    if num_top == 0:
        return [TokenLogprob(token, value) for token, value in zip(chosen.tolist(), values, strict=True)]
    top_ids = _top_ids(logprobs, min(num_top, logits.shape[-1]))
    top_values = logprobs.gather(-1, top_ids)
    return [
        TokenLogprob(token, value, tuple(zip(ids, tops, strict=True)))
        for token, value, ids, tops in zip(chosen.tolist(), values, top_ids.tolist(), top_values.tolist(), strict=True)
    ]


def _top_ids(logprobs: Tensor, count: int) -> Tensor:
    """Return [R, count] ids, by falling float32 value and rising id.

    `topk` leaves the order of equal values open, and bfloat16 models have many. So rank by one integer:
    the value's bits made monotone, then the complement of the id.
    """
    bits = (logprobs.float() + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 ranks as 0.0
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    return ((monotone << 32) | (0xFFFFFFFF - ids)).topk(count, dim=-1).indices
