"""Segments of a chain, and its causal mask."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from forerun.kernels.partition import KV_BLOCK, tails
from forerun.models.attention.segment_plan import Segment
from forerun.models.attention.views import Views, repeat_last


def chain_segments(sequence: int, first: int, start: int, n: int, padding: int, views: Views) -> list[Segment]:
    """Segments of n rows of a chain from position `first` on, the first of which is packed row `start`.

    A chain is cut where it crosses into another block of keys: what a row adds up, and in which order, then depends
    on its position alone.

    Args:
        padding: packed rows after these that attend as the last one does; nobody reads what they compute.
    """
    segments = []
    done = 0
    while done < n:
        block, offset = divmod(first + done, KV_BLOCK)
        take = min(n - done, KV_BLOCK - offset)
        more = padding if done + take == n else 0
        columns = tails(offset + take)
        mask = _causal(views.dtype)[offset : offset + take, :columns]
        if take > 1:
            mask = repeat_last(mask, more)
        positions = range(first + done, first + done + take)
        partitions = views.partitions(mask, block * KV_BLOCK + columns, [*positions, *[positions[-1]] * more])
        segments.append(Segment(sequence, start + done, start + done + take + more, None, None, partitions))
        done += take
    return segments


@cache
def _causal(dtype: torch.dtype) -> Tensor:
    """[KV_BLOCK, KV_BLOCK]: row i sees the first i + 1 keys of a block."""
    return torch.full((KV_BLOCK, KV_BLOCK), -torch.inf, dtype=dtype).triu_(1)
