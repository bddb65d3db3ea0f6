"""Drawing one token from each of a batch of distributions, the same for a row whatever the other rows are, and the
log-probabilities that requests are told."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from forerun.kernels.cpu import loaded, paced_threads


def running_sums(values: Tensor) -> Tensor:
    """Return [R, C] float64 sums of each row up to every column. values: [R, C]."""
    if values.device.type == "cpu":
        return values.cumsum(-1, dtype=torch.float64)
    return sums_in_pairs(values)


def sums_in_pairs(values: Tensor) -> Tensor:
    """Return running sums, computed for each row beside a copy of it.

    On CUDA devices PyTorch sums a single row by another kernel than several (cub's scan, whose order is not the same at
    every run), and several with as many threads for each as their number leaves it. Two have always the same.
    """
    sums = torch.empty_like(values, dtype=torch.float64)
    for row, out in zip(values, sums, strict=True):
        out.copy_(row.expand(2, -1).cumsum(-1, dtype=torch.float64)[0])
    return sums


_CHUNK = 2**15
"""Weights whose cumulative sums are held at once: fresh pages for larger ones cost more than the sums."""


@paced_threads()
def draw_tokens(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inversion of the cumulative weights.

    Args:
        weights: [R, V] on any device, not negative, not necessarily summing to one; each row has a positive entry.
        uniforms: [R] float64 in [0, 1), on any device.

    Returns:
        [R] int64 on the device of the weights. A token of weight 0 is never drawn: u * total < total also after
        rounding, and the first index whose cumulative weight exceeds it has a cumulative weight above its
        predecessor's.
    """
    num_rows, vocab_size = weights.shape
    uniforms = uniforms.to(weights.device)
    at_once = max(1, _CHUNK // vocab_size)
    if num_rows <= at_once:
        return _invert(weights, uniforms)
    return torch.cat(
        [_invert(weights[i : i + at_once], uniforms[i : i + at_once]) for i in range(0, num_rows, at_once)]
    )


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    # float64: in float32 the rounding of the sum would swallow the least probable tokens.
    cumulative = running_sums(weights)
    if len(cumulative) == 1 and cumulative.device.type == "cpu":  # a sixth of the time of torch's
        sums = cumulative.numpy()[0]
        return torch.from_numpy(sums.searchsorted(sums[-1] * uniforms.numpy(), side="right"))
    return torch.searchsorted(cumulative, cumulative[:, -1:] * uniforms[:, None], right=True)[:, 0]


def row_argmax(values: Tensor) -> Tensor:
    """Return [R] int64, the first index of each row's maximum; for a row with NaN, of the first NaN. values: [R, V]."""
    if values.device.type != "cpu" or values.dtype == torch.bfloat16:
        return values.argmax(-1)
    return torch.from_numpy(values.numpy().argmax(-1))  # a tenth of the time of torch's


def row_top(values: Tensor, count: int) -> Tensor:
    """Return [R, count] int64, the indices of each row's largest values, the largest first. values: [R, V]."""
    rows, width = values.shape
    if count == 1:
        return row_argmax(values)[:, None]
    library = loaded() if values.device.type == "cpu" and values.dtype == torch.float32 else None
    if library is None or not values.is_contiguous():
        return values.topk(count).indices
    found = torch.empty(rows, count, dtype=torch.int64)  # a tenth of the time of torch's
    library.topk(values.data_ptr(), rows, width, count, found.data_ptr())
    return found


def non_finite_rows(logits: Tensor, argmax: Seq[int] | None = None) -> list[int]:
    """Return the rows from which no distribution can be made: some logit is NaN or +inf, or all are -inf.

    The row's maximum is NaN where any logit is.

    Args:
        logits: [R, V].
        argmax: [R] what `row_argmax` gave of them; None to look for the maximum.
    """
    highest: list[float]
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        highest = logits.amax(-1).tolist()
    elif argmax is None:
        highest = logits.numpy().max(-1).tolist()
    else:
        array = logits.numpy()
        highest = [array[row, token] for row, token in enumerate(argmax)]
    return [] if all(map(isfinite, highest)) else [row for row, value in enumerate(highest) if not isfinite(value)]


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
