"""Where the blocks of a training step are anchored: at random places, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads.rows import HeadRows


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
