"""Whether the draft model's pool has room: a draft that finds none is left out, and no request fails for it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.drafters.model.draft_cache import DraftState
from forerun.types import Pool


def affordable(pool: Pool | None, states: Seq[DraftState], budgets: Seq[int], num_rows: Seq[int]) -> list[int]:
    """The budgets, 0 where there is no room for the tokens that are to be fed and so many rows of a draft.

    To be asked before anything is drawn: to drop a draft for what it is would change the output's distribution.
    """
    if pool is None or pool.num_pages is None:
        return list(budgets)
    available = pool.num_available
    kept = []
    for state, budget, rows in zip(states, budgets, num_rows, strict=True):
        wanted = state.cache.pages_wanted(len(state.sequence.token_ids) + rows) if budget > 0 else 0
        fits = wanted <= available
        kept.append(budget if fits else 0)
        available -= wanted if fits else 0
    return kept


def has_room(pool: Pool | None, state: DraftState, num_rows: int, reserved: list[int]) -> bool:
    """Whether there is room for so many rows of a sequence, beside the pages reserved for others, which it joins."""
    if pool is None or pool.num_pages is None:
        return True
    wanted = state.cache.pages_wanted(state.cache.length + num_rows)
    fits = sum(reserved) + wanted <= pool.num_available
    reserved.append(wanted if fits else 0)
    return fits
