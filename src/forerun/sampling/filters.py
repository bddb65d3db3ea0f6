"""The options that filter a row's logits (temperature, top_k, top_p, min_p), batched over rows, as Transformers does.

Every function takes [R, V] float logits and one value per row, and what it does to a row never depends on
the other rows, to the last bit. `scale` (the temperature) comes first: the filters count on rows whose maximum is 0.

A filter is one row of `FILTERS` and one field of `SamplingParams`. The pipeline, and every drafter that has to
leave filters out or take them to another vocabulary, reads the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.sampling.draw import running_sums

_TOP_P_SIZES = (64, 1024)
"""How many of the most probable tokens are sorted in search of top_p, before all are: most rows need few."""
_BLOCK = 32
"""Logits of which one maximum is taken, in search of the largest of a row."""
_BLOCKED_SIZE = 2**14
"""Logits in a row from which that search is faster than sorting out the largest of all."""
_SPARSE = 16
"""Where top_k keeps at most one token in so many, probabilities are computed for the kept tokens alone."""


@dataclass(frozen=True, slots=True)
class Filter:
    """An option that drops improbable tokens. It never drops the most probable one.

    Attributes:
        field: the option's name in SamplingParams.
        neutral: the value of the option that keeps every token.
        keep: ([R, C] logits with maximum 0, [R] values of the option, none of them neutral) -> [R, C], the same
            logits with -inf where a token is dropped. The columns are tokens in the order of their ids, all or those
            that top_k left. It does not modify its argument.
    """

    field: str
    neutral: float
    keep: Callable[[Tensor, Seq[float]], Tensor]


def scale(logits: Tensor, temperatures: Seq[float]) -> Tensor:
    """Return (logits - max) / temperature: at most 0, and finite at the top however small the temperature."""
    smallest = torch.finfo(logits.dtype).tiny
    column = _column([max(value, smallest) for value in temperatures], logits)
    return (logits - logits.amax(-1, keepdim=True)).div_(column)


def keep_top_k(logits: Tensor, top_k: Seq[float]) -> Tensor:
    """Drop tokens below the k-th largest logit; all that equal it stay."""
    counts = [int(k) if k < logits.shape[-1] else 0 for k in top_k]
    if not any(counts):
        return logits
    index = torch.tensor(counts, dtype=torch.int64, device=logits.device)[:, None]
    lowest = _largest(logits, max(counts))[0].gather(-1, (index - 1).clamp_(min=0))
    return _drop_below(logits, lowest.masked_fill_(index == 0, -math.inf))


def keep_top_p(logits: Tensor, top_p: Seq[float]) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches top_p; of equal ones the lowest ids first."""
    smallest = torch.finfo(logits.dtype).tiny  # a smaller one would be 0, which no mass is below
    mass = _column([max(value, smallest) for value in top_p], logits)
    return _cut_nucleus(logits, logits.softmax(-1), mass, _TOP_P_SIZES)


def keep_min_p(logits: Tensor, min_p: Seq[float]) -> Tensor:
    """Drop tokens less probable than min_p times the most probable one."""
    return _drop_below(logits, _column(list(map(math.log, min_p)), logits))


FILTERS: tuple[Filter, ...] = (
    Filter("top_k", 0, keep_top_k),
    Filter("top_p", 1.0, keep_top_p),
    Filter("min_p", 0.0, keep_min_p),
)
"""Every filter, in the order in which they are applied."""


def filters_in_use(params: SamplingParams) -> bool:
    """Return whether any filter may drop a token."""
    return any(getattr(params, each.field) != each.neutral for each in FILTERS)


def apply(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Apply every filter in turn, to the rows whose option is not neutral.

    Args:
        logits: [R, V] as `scale` returns them; not modified.
        params: [R] of each row's request.
    """
    for each in FILTERS:
        values = [getattr(row, each.field) for row in params]
        on = [row for row, value in enumerate(values) if value != each.neutral]
        if len(on) == len(values):
            logits = each.keep(logits, values)
        elif on:
            part = each.keep(logits[on], [values[row] for row in on])
            logits = logits.clone()
            logits[on] = part
    return logits


def log_distributions(logits: Tensor, temperatures: Seq[float], params: Seq[SamplingParams]) -> Tensor:
    """Return [R, V] log-probabilities after temperature and filters.

    Args:
        logits: [R, V]; not modified.
        temperatures: [R].
        params: [R] of each row's request.
    """
    groups: dict[int, list[int]] = {}  # rows by the number of tokens that are enough, 0 for all
    for row, each in enumerate(params):
        few = 0 < _SPARSE * each.top_k <= logits.shape[-1] and logits.device.type == "cpu"
        groups.setdefault(each.top_k if few else 0, []).append(row)
    whole = groups.pop(0, [])
    if len(whole) == len(params):
        return apply(scale(logits, temperatures), params).log_softmax(-1)
    logprobs = torch.full_like(logits, -math.inf)
    for count, rows in groups.items():
        part = logits if len(rows) == len(params) else logits[rows]
        ids, kept, tied = _of_top_k(part, [temperatures[row] for row in rows], [params[row] for row in rows], count)
        logprobs[torch.tensor(rows)[:, None], ids] = kept
        whole += [row for row, tie in zip(rows, tied, strict=True) if tie]
    if whole:
        of_all = apply(scale(logits[whole], [temperatures[row] for row in whole]), [params[row] for row in whole])
        logprobs[whole] = of_all.log_softmax(-1)
    return logprobs


def _of_top_k(
    logits: Tensor, temperatures: Seq[float], params: Seq[SamplingParams], count: int
) -> tuple[Tensor, Tensor, list[bool]]:
    """Return log-probabilities of each row's `count` most probable tokens. count: top_k of every row.

    Returns:
        [R, count] ids; [R, count] log-probabilities; [R] whether a further token equals the last of them, so that
        top_k keeps more, and the row must be computed of all.
    """
    values, ids = _largest(logits, count + 1)
    values = scale(values, temperatures)
    tied: list[bool] = (values[:, count] == values[:, count - 1]).tolist()
    ids, order = ids[:, :count].sort(-1)
    return ids, apply(values.gather(-1, order), params).log_softmax(-1), tied


def unfiltered(params: SamplingParams) -> SamplingParams:
    """Return the same options with every filter neutral."""
    neutral: dict[str, Any] = {each.field: each.neutral for each in FILTERS}
    return replace(params, **neutral)


def filters_only(params: SamplingParams) -> SamplingParams:
    """Return options with temperature and filters alone, which mean the same in any vocabulary."""
    values: dict[str, Any] = {each.field: getattr(params, each.field) for each in FILTERS}
    return type(params)(temperature=params.temperature, **values)


def one_hot_log(tokens: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Return [R, V] log-probabilities of distributions that hold one token each. tokens: [R] int64."""
    logprobs = torch.full((len(tokens), vocab_size), -math.inf, dtype=dtype, device=tokens.device)
    return logprobs.scatter_(-1, tokens[:, None], 0.0)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the [R, count] largest logits of each row, largest first, and their token ids.

    They lie in the `count` blocks with the largest maxima: were one elsewhere, each of those blocks would hold one
    that is as large.
    """
    num_rows, vocab_size = logits.shape
    width = vocab_size // _BLOCK
    if vocab_size < _BLOCKED_SIZE or 4 * count > width:
        top = logits.topk(count, dim=-1)
        return top.values, top.indices
    # A block is a column of this view, so that the maxima are taken of whole rows of it at once.
    blocks = logits[:, : width * _BLOCK].view(num_rows, _BLOCK, width)
    best = blocks.amax(1).topk(count, dim=-1, sorted=False).indices[:, None].expand(-1, _BLOCK, -1)
    ids = best + width * torch.arange(_BLOCK, device=logits.device)[:, None]
    unblocked = torch.arange(width * _BLOCK, vocab_size, device=logits.device).expand(num_rows, -1)
    ids = torch.cat([ids.flatten(1), unblocked], dim=-1)
    top = logits.gather(-1, ids).topk(count, dim=-1)
    return top.values, ids.gather(-1, top.indices)


def _drop_below(logits: Tensor, lowest: Tensor) -> Tensor:
    """Set logits below their row's `lowest` [R, 1] to -inf.

    Written without a mask, which costs three times as much: where the difference is not negative it is
    above the logit itself, which is at most 0.
    """
    limits = torch.finfo(logits.dtype)
    difference = logits - lowest.clamp(min=limits.min)
    return torch.minimum(logits, torch.threshold_(difference, -limits.tiny, -math.inf), out=difference)


def _cut_nucleus(logits: Tensor, probs: Tensor, top_p: Tensor, sizes: Seq[int]) -> Tensor:
    vocab_size = logits.shape[-1]
    count = min([*sizes[:1], vocab_size])
    top_values, top_ids = _largest(logits, count)
    accept_probs = probs.gather(-1, top_ids)
    num_kept = ((running_sums(accept_probs) - accept_probs) < top_p).sum(-1, keepdim=True)
    lowest = top_values.gather(-1, num_kept - 1)
    kept = _drop_below(logits, lowest)

    following = top_values.gather(-1, num_kept.clamp(max=count - 1))
    found = torch.cat([num_kept, following == lowest], dim=-1).tolist()
    tied = [row for row, (number, tie) in enumerate(found) if tie and number < count]
    if tied:
        kept[tied] = _drop_ties(kept[tied], lowest[tied], num_kept[tied])
    short = [row for row, (number, _) in enumerate(found) if number == count < vocab_size]
    if short:
        kept[short] = _cut_nucleus(logits[short], probs[short], top_p[short], sizes[1:])
    return kept


def _drop_ties(logits: Tensor, lowest: Tensor, num_kept: Tensor) -> Tensor:
    """Keep only the first of the logits equal to `lowest`, so that num_kept remain in all."""
    ties = logits == lowest
    num_tied = num_kept - (logits > lowest).sum(-1, keepdim=True)
    return logits.masked_fill(ties & (ties.cumsum(-1) > num_tied), -math.inf)


def _column(values: Seq[float], like: Tensor) -> Tensor:
    # A tensor even when all rows agree: division by a number may be compiled to another operation.
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
