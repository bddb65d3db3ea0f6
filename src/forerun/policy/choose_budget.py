"""Which automatic budget a drafter gets."""

from __future__ import annotations

import torch

from forerun.policy.automatic_k import AutoBudget
from forerun.policy.budget import Budget
from forerun.policy.cost_store import StoredCosts
from forerun.policy.whole_drafts import WholeBudget


def automatic_budget(*, whole_draft: int | None, cost_key: tuple[str, ...] | None) -> Budget:
    """K chosen by measurement.

    Args:
        whole_draft: nodes of the drafter's drafts, where they come whole or not at all; None for every other drafter.
        cost_key: all that costs depend on besides machine and threads (models, their number format, the drafter):
            the budget begins with the costs that earlier engines of the same key measured, and keeps what it
            measures. None begins with nothing and keeps nothing.
    """
    if whole_draft is not None:
        return WholeBudget(whole_draft)
    if cost_key is None:
        return AutoBudget()
    return AutoBudget(StoredCosts((*cost_key, str(torch.get_num_threads()))))
