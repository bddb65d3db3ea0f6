"""The attention of blocks at many anchors, as training computes it: to the rows of their document that drafting would
have there, and to each other. Not in bfloat16, as an EAGLE head's."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.heads.block_config import BlockConfig
from forerun.train.heads.rows import HeadRows, Segment

Keys = tuple[Tensor, Tensor]
"""Keys and values."""


def attended(config: BlockConfig, rows: HeadRows, query: Tensor, own: Keys, context: Keys) -> Tensor:
    """[A, slots, heads * head_dim].

    Args:
        query: [A, slots, heads, head_dim].
        own: [A, slots, kv heads, head_dim] each. context: [R, kv heads, head_dim] each.
    """
    return torch.cat([_of_document(config, rows, query, own, context, segment) for segment in rows.segments])


def _of_document(
    config: BlockConfig, rows: HeadRows, query: Tensor, own: Keys, context: Keys, segment: Segment
) -> Tensor:
    """Of one document's blocks, [a, slots, heads * head_dim]."""
    here = slice(segment.first_active, segment.last_active)
    key, value = (part[here] for part in own)
    group, width = config.num_heads // config.num_kv_heads, config.head_dim
    count, slots = key.shape[:2]
    # [kv heads, group, a, slots, head_dim]
    q = query[here].view(count, slots, config.num_kv_heads, group, width).permute(2, 3, 0, 1, 4)
    before, after = (part[segment.first : segment.last].transpose(0, 1) for part in context)
    scores = torch.einsum("hgasd,hrd->hgasr", q, before) * width**-0.5
    scores = scores + hidden_rows(config, rows, segment, slots, query)
    inside = torch.einsum("hgasd,athd->hgast", q, key) * width**-0.5
    weights = torch.softmax(torch.cat([scores, inside], -1), -1)
    mixed = torch.einsum("hgasr,hrd->hgasd", weights[..., : before.shape[1]], after)
    mixed = mixed + torch.einsum("hgast,athd->hgasd", weights[..., before.shape[1] :], value)
    return mixed.permute(2, 3, 0, 1, 4).reshape(count, slots, -1)


def hidden_rows(config: BlockConfig, rows: HeadRows, segment: Segment, slots: int, like: Tensor) -> Tensor:
    """[a, 1, r], 0 where the slots of a block attend to a row of the context, and minus infinity elsewhere."""
    last = rows.active[segment.first_active : segment.last_active, None] - segment.first
    columns = torch.arange(segment.last - segment.first, device=last.device)
    hidden = columns > last
    if config.sliding_window is not None:  # counted from the last slot
        hidden |= last + slots - columns >= config.sliding_window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=last.device).masked_fill_(hidden, -torch.inf)[:, None]
