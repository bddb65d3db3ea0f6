"""Attention whose result for a row depends on the row's own path alone, to the last bit.

Every reduction over keys is cut in a way fixed by the row's position: whole blocks of KV_BLOCK keys, then the block
the row stands in, KV_TAIL keys at a time, each product added to the sum of those before. Masked keys contribute exact
zeros. So a row gives
the same bits computed alone, beside its draft, or beside strangers. What this rests on (a product's row does not
depend on the number of rows from MIN_ROWS up; softmax of a row is unchanged by -inf appended) is checked at load by
`models/exactness.py`, not assumed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.config import KV_TAIL, MIN_ROWS
from forerun.models.rows import Layout
from forerun.models.segments import Segment, Span

_NARROW = 128
"""Keys up to which MKL on Intel processors computes products of at least as many rows by a kernel with other last
bits: such products are made in parts of fewer rows."""


def attend(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    dtype: torch.dtype,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the new keys and values, and attend with every row to its own path.

    Args:
        layer: index of the layer in the caches.
        query: [T, H, D]. key: [T, H_kv, D]. value: [T, H_kv, D_v]. All in the caches' dtype.
        dtype: of the result.
        scale: factor of the scores.
        window: a row at position p sees positions above p - window.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H] extra logit per head that takes probability and gives nothing.

    Returns:
        [T, H * D_v].
    """
    for cache, row, start, end in layout.writes:
        cache.write(layer, row, key[start:end].transpose(0, 1), value[start:end].transpose(0, 1))
    out = torch.empty(len(query), query.shape[1] * value.shape[2], dtype=dtype)
    for s in layout.segments:
        rows = None if s.paths is None else s.paths.rows
        own = query[s.start : s.end] if rows is None else query[rows]
        mixed = _attend_segment(layer, own, s, scale, window, softcap, sinks)
        if rows is None:
            out[s.start : s.end].view(mixed.shape).copy_(mixed)
        else:
            out.view(-1, *mixed.shape[1:])[rows] = mixed.to(dtype)
    return out


def _attend_segment(
    layer: int,
    query: Tensor,
    segment: Segment,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query: [n, H, D] -> [n, H_kv, H / H_kv, D_v]."""
    keys, values, paths = segment.cache.keys[layer], segment.cache.values[layer], segment.paths
    if paths is not None and paths.slots is not None:
        keys, values = keys[:, paths.slots], values[:, paths.slots]
    heads = keys.shape[0]
    n, group = query.shape[0], query.shape[1] // heads
    rows = n * group
    queries = query.view(n, heads, group, -1).transpose(0, 1).reshape(heads, rows, -1)
    if rows < MIN_ROWS:
        queries = queries.repeat(1, -(-MIN_ROWS // rows), 1)
    if heads == 1:  # with several threads, a row of a batch of one matrix depends on how many rows there are
        queries, keys, values = (each.expand(2, -1, -1) for each in (queries, keys, values))
    mask, spans = segment.prepared(group, window)
    first = spans[0][0]
    keys = keys[:, first : first + mask.shape[2]].transpose(1, 2)
    scores = _scores(queries, keys, mask, scale, softcap)
    if paths is not None:
        lanes = segment.prepared_lanes(group).expand(len(queries), -1, -1)
        _bring_into_path_order(scores[..., paths.shared - first :], lanes)
    weights = torch.softmax(scores, -1) if sinks is None else _softmax_with_sinks(scores, sinks, heads, group)
    if paths is None:
        mixed = _weighted_sum(weights, values, spans)
    else:
        mixed = _weighted_sum_of_paths(weights, values, spans, paths.shared, lanes)
    return mixed[:heads, :rows].view(heads, n, group, -1).transpose(0, 1)


def _scores(queries: Tensor, keys: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[H_kv, R, columns]. queries: [H_kv, R, D]; keys: [H_kv, D, columns]; mask: [1, R or 1, columns]."""
    rows, columns = queries.shape[1], keys.shape[2]
    if rows >= columns and columns <= _NARROW:
        parts = []
        for start in range(0, rows, columns // 2):
            part = slice(start, start + columns // 2)
            parts.append(_scores(queries[:, part], keys, mask[:, part] if len(mask[0]) > 1 else mask, scale, softcap))
        return torch.cat(parts, 1)
    if softcap is None:
        return torch.baddbmm(mask, queries, keys, alpha=scale)
    return torch.bmm(queries, keys).mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)


def _weighted_sum(weights: Tensor, values: Tensor, spans: list[Span]) -> Tensor:
    """weights: [H_kv, R, keys of all spans] -> [H_kv, R, D_v], in blocks of keys, then in tails."""
    first = spans[0][0]
    total: Tensor | None = None
    for start, end in spans:
        total = _plus(total, weights[..., start - first : end - first], values[:, start:end])
    assert total is not None
    return total


def _plus(total: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    return torch.bmm(weights, values) if total is None else torch.baddbmm(total, weights, values)


def _bring_into_path_order(scores: Tensor, lanes: Tensor) -> None:
    """scores: [H_kv, R, lanes and padding], in place: each row's path first, in order, and nothing after it."""
    depth = lanes.shape[-1]
    scores[..., :depth] = scores.gather(-1, lanes)
    scores[..., depth:] = -torch.inf


def _weighted_sum_of_paths(weights: Tensor, values: Tensor, spans: list[Span], shared: int, lanes: Tensor) -> Tensor:
    """As _weighted_sum, weights in path order. What of a span lies beyond the shared keys is brought to its lanes, and
    whatever else is there gets weight zero. weights are overwritten."""
    first, lanes_start = spans[0][0], shared // KV_TAIL * KV_TAIL
    depth = lanes.shape[-1]
    below = weights[..., shared - first :]
    path = below[..., :depth].clone()
    last, last_values = weights[..., lanes_start - first :], values[:, lanes_start : first + weights.shape[-1]]
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
    """Softmax over the keys and one sink per head, whose share is dropped. The sink stands first, in a lane of its
    own, so that the keys' places in the reduction do not depend on how many there are."""
    lanes = scores.new_full((*scores.shape[:-1], KV_TAIL), -torch.inf)
    repeats = scores.shape[1] // group
    lanes[..., 0] = sinks.to(scores.dtype).view(heads, 1, group).expand(heads, repeats, group).reshape(heads, -1)
    return torch.softmax(torch.cat([lanes, scores], -1), -1)[..., KV_TAIL:]
