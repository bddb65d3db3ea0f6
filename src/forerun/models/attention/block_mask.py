"""The segment of a block whose rows see each other and every position before them."""

from __future__ import annotations

import torch

from forerun.kernels.partition import tails
from forerun.models.attention.base import PackedRows
from forerun.models.attention.segment_plan import Segment
from forerun.models.attention.views import Views


def block_segment(sequence: int, first: int, rows: PackedRows, padding: int, views: Views) -> Segment:
    """One segment of all rows. A window is counted from the last of them, for all alike.

    Args:
        first: position of the first row.
        padding: packed rows after these that see the same.
    """
    last = first + rows.end - rows.start - 1
    columns = tails(last + 1)
    mask = torch.zeros(1, columns, dtype=views.dtype)
    mask[0, last + 1 :] = -torch.inf
    end = rows.end + padding
    partitions = views.partitions(mask, columns, [last] * (end - rows.start))
    return Segment(sequence, rows.start, end, None, None, partitions)
