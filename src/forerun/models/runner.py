"""Packs the rows of sequences into the arrays of one forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kv_cache import SequenceCache
from forerun.models.attention.base import Layout, PackedRows, Planner, cache_of
from forerun.models.base import Rows
from forerun.utils.tree import Tree


def lay_out(batch: Sequence[Rows], planner: Planner) -> Layout:
    """Pack the rows of several sequences, and add them to their caches' scratch."""
    packed: list[PackedRows] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    hidden_output_rows: list[int] = []
    for rows in batch:
        packed.append(packed_rows(rows, len(positions)))
        positions += packed[-1].positions
        end = len(positions)
        logit_rows += range(end - rows.num_wanted, end)
        hidden_output_rows += range(end - rows.num_hidden_rows, end)
    num_new = len(positions)
    padding = max(0, planner.min_rows - num_new)
    positions += positions[-1:] * padding
    num_logits, logits_selected, hidden_selected = len(logit_rows), None, None
    if len(hidden_output_rows) != num_new:
        hidden_selected = torch.tensor(hidden_output_rows, dtype=torch.int64).to(planner.device, non_blocking=True)
    if num_logits != num_new:
        logit_rows += [num_new + padding - 1] * (planner.min_rows - num_logits)
        logits_selected = torch.tensor(logit_rows).to(planner.device, non_blocking=True)
    return Layout(
        num_rows=num_new + padding,
        num_new=num_new,
        num_positions=max(positions) + 1,
        token_ids=_token_ids(batch, padding, planner.device),
        positions=torch.tensor(positions).to(planner.device, non_blocking=True),
        logit_rows=logits_selected,
        num_logits=num_logits,
        plan=planner.plan(packed, padding),
        hidden_output_rows=hidden_selected,
        states=None if all(rows.states is None for rows in batch) else _states(batch, padding, planner.device),
    )


def packed_rows(rows: Rows, start: int) -> PackedRows:
    """Add the rows to their cache's scratch, and return them as packed from row `start` on."""
    cache = cache_of(SequenceCache, rows.cache)  # type: ignore[type-abstract]  # nothing is made of it
    n = len(rows.token_ids)
    first = len(cache.scratch_parents)
    if rows.hidden is not None:  # they go on from a middle layer, and have been fed
        first -= n
    else:
        cache.feed(range(first - 1, first - 1 + n) if rows.parents is None else rows.parents)
    parents, length = cache.scratch_parents, cache.length
    is_chain = parents == list(range(-1, len(parents) - 1))
    positions: Sequence[int] = range(length + first, length + first + n)
    if not is_chain:
        positions = [length + depth - 1 for depth in Tree(parents=parents).depths[first:]]
    return PackedRows(cache, start, start + n, first, positions, is_chain, rows.is_block)


def _token_ids(batch: Sequence[Rows], padding: int, device: torch.device) -> Tensor:
    """Return the token ids, [num_rows] int64, with the last one repeated. Tokens that lie on a device stay there,
    unread."""
    if not any(isinstance(rows.token_ids, Tensor) for rows in batch):
        tokens = [token_id for rows in batch for token_id in rows.token_ids]
        return torch.tensor(tokens + tokens[-1:] * padding).to(device, non_blocking=True)
    there = (rows.token_ids.device for rows in batch if isinstance(rows.token_ids, Tensor))
    device = next((each for each in there if each.type != "cpu"), device)
    parts = [torch.as_tensor(rows.token_ids, dtype=torch.int64).to(device, non_blocking=True) for rows in batch]
    return torch.cat([*parts, parts[-1][-1:].expand(padding)])


def _states(batch: Sequence[Rows], padding: int, device: torch.device) -> Tensor:
    """Return the states, [num_rows, S], with the last one repeated, if some rows have states.

    Raises:
        ValueError: others do not, or there is not one for each token.
    """
    parts = [rows.states for rows in batch if rows.states is not None]
    if [len(part) for part in parts] != [len(rows.token_ids) for rows in batch]:
        raise ValueError("each row of a head's forward needs a state beside its token")
    return torch.cat([*parts, parts[-1][-1:].expand(padding, -1)]).to(device, non_blocking=True)
