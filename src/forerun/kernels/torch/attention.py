"""Attention in plain PyTorch whose result for a row depends on that row's own path alone, to the last bit.

Products over keys are computed part by part (`kernels/partition.py`), each added to the sum of those before. Masked
keys contribute exact zeros. So a row gives the same bits computed alone, beside its draft, or beside other sequences.
What this rests on (a product's row does not depend on the number of rows from MIN_ROWS up; softmax of a row is
unchanged by -inf appended) is checked at load by `models/self_test.py`, not assumed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.partition import KV_TAIL, MIN_ROWS, AttentionShape, Partition, Span

_NARROW = 128
"""Keys up to which MKL on Intel processors computes products of at least as many rows by a kernel with other last
bits: such products are made in parts of fewer rows."""


def attend(query: Tensor, keys: Tensor, values: Tensor, partition: Partition, form: AttentionShape) -> Tensor:
    """Compute attention for rows of one sequence whose last keys lie in one block.

    Args:
        query: [n, H, D]. keys: [H_kv, columns, D]. values: [H_kv, columns, D_v]. All of one float type.

    Returns:
        [n, H_kv, H / H_kv, D_v].
    """
    heads = keys.shape[0]
    n = query.shape[0]
    group = query.shape[1] // heads
    rows = n * group
    queries = query.view(n, heads, group, -1).transpose(0, 1).reshape(heads, rows, -1)
    if rows < MIN_ROWS:
        queries = queries.repeat(1, -(-MIN_ROWS // rows), 1)
    if heads == 1:  # with several threads, a row of a batch of one matrix depends on how many rows there are
        queries, keys, values = (each.expand(2, -1, -1) for each in (queries, keys, values))
    mask = partition.mask
    spans = partition.spans
    lanes = partition.lanes
    first = spans[0][0]
    keys = keys[:, first : first + mask.shape[2]].transpose(1, 2)
    scores = _scores(queries, keys, mask, form)
    if lanes is not None:
        lanes = lanes.expand(len(queries), -1, -1)
        _bring_into_path_order(scores[..., partition.shared - first :], lanes)
    weights = torch.softmax(scores, -1) if form.sinks is None else _softmax_with_sinks(scores, form.sinks, heads, group)
    if lanes is None:
        attended = _weighted_sum(weights, values, spans)
    else:
        attended = _weighted_sum_of_paths(weights, values, spans, partition.shared, lanes)
    return attended[:heads, :rows].view(heads, n, group, -1).transpose(0, 1)


def _scores(queries: Tensor, keys: Tensor, mask: Tensor, form: AttentionShape) -> Tensor:
    """Return [H_kv, R, columns]. queries: [H_kv, R, D]; keys: [H_kv, D, columns]; mask: [1, R or 1, columns]."""
    rows = queries.shape[1]
    columns = keys.shape[2]
    if rows >= columns and columns <= _NARROW:
        parts = []
        for start in range(0, rows, columns // 2):
            part = slice(start, start + columns // 2)
            parts.append(_scores(queries[:, part], keys, mask[:, part] if mask.shape[1] > 1 else mask, form))
        return torch.cat(parts, 1)
    if form.softcap is None:
        return torch.baddbmm(mask, queries, keys, alpha=form.scale)
    return torch.bmm(queries, keys).mul_(form.scale / form.softcap).tanh_().mul_(form.softcap).add_(mask)


def _weighted_sum(weights: Tensor, values: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """Add up values by blocks of keys, then by tails. weights: [H_kv, R, keys of all spans] -> [H_kv, R, D_v]."""
    first = spans[0][0]
    total: Tensor | None = None
    for start, end in spans:
        total = _plus(total, weights[..., start - first : end - first], values[:, start:end])
    assert total is not None
    return total


def _plus(total: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    return torch.bmm(weights, values) if total is None else torch.baddbmm(total, weights, values)


def _bring_into_path_order(scores: Tensor, lanes: Tensor) -> None:
    """Reorder scores in place to each row's path, masking everything after it. scores: [H_kv, R, lanes and padding]."""
    depth = lanes.shape[-1]
    scores[..., :depth] = scores.gather(-1, lanes)
    scores[..., depth:] = -torch.inf


def _weighted_sum_of_paths(
    weights: Tensor, values: Tensor, spans: tuple[Span, ...], shared: int, lanes: Tensor
) -> Tensor:
    """Add up values as `_weighted_sum`, with weights in path order. The part of a span beyond the shared keys is
    scattered to its lanes; all other lanes get weight zero. weights are overwritten."""
    first = spans[0][0]
    lanes_start = shared // KV_TAIL * KV_TAIL
    depth = lanes.shape[-1]
    below = weights[..., shared - first :]
    path = below[..., :depth].clone()
    last = weights[..., lanes_start - first :]
    last_values = values[:, lanes_start : first + weights.shape[-1]]
    total: Tensor | None = None
    for start, end in spans:
        if end <= shared:
            total = _plus(total, weights[..., start - first : end - first], values[:, start:end])
            continue
        (below[..., :depth] if start == lanes_start else last).zero_()
        span = slice(max(0, start - shared), end - shared)
        below.scatter_(-1, lanes[..., span], path[..., span])
        total = _plus(total, last, last_values)
    assert total is not None
    return total


def _softmax_with_sinks(scores: Tensor, sinks: Tensor, heads: int, group: int) -> Tensor:
    """Apply softmax over the keys and one sink per head, whose share is dropped. The sink stands first, in a tail of
    its own, so the keys' positions in the reduction do not depend on their number."""
    before = scores.new_full((*scores.shape[:-1], KV_TAIL), -torch.inf)
    repeats = scores.shape[1] // group
    before[..., 0] = sinks.to(scores.dtype).view(heads, 1, group).expand(heads, repeats, group).reshape(heads, -1)
    return torch.softmax(torch.cat([before, scores], -1), -1)[..., KV_TAIL:]
