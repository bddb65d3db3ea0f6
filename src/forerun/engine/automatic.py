"""Which automatic budget a drafter gets."""

from __future__ import annotations

import torch

from forerun.drafters import Drafter
from forerun.engine.budget import AutoBudget
from forerun.engine.plan import Budget
from forerun.engine.whole import WholeBudget
from forerun.models import LanguageModel, identity
from forerun.policy import StoredCosts


def automatic_budget(target: LanguageModel, drafter: Drafter, stored: bool = True) -> Budget:
    """K chosen by measurement.

    Args:
        stored: begin with the costs that earlier engines of this target and drafter measured on this machine, and keep
            what this one measures.
    """
    traits = drafter.traits
    if traits.whole_draft is not None:
        return WholeBudget(traits.whole_draft)
    if not stored:
        return AutoBudget()
    return AutoBudget(StoredCosts((identity(target), *traits.cost_key, str(torch.get_num_threads()))))
