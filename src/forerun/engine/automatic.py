"""Which automatic budget a drafter gets."""

from __future__ import annotations

import torch

from forerun.engine.budget import AutoBudget
from forerun.engine.plan import Budget
from forerun.engine.whole import WholeBudget
from forerun.models import Model
from forerun.policy import StoredCosts
from forerun.types import Drafter


def automatic_budget(target: Model, drafter: Drafter, stored: bool = True) -> Budget:
    """K chosen by measurement.

    Args:
        stored: begin with the costs that earlier engines of this target and drafter measured on this machine, and keep
            what this one measures.
    """
    whole: int | None = getattr(drafter, "whole_draft", None)
    if whole is not None:
        return WholeBudget(whole)
    if not stored:
        return AutoBudget()
    own: Model | None = getattr(drafter, "_model", None)
    names = [f"{model.name} {model.num_parameters} {model.dtype}" for model in (target, own) if model is not None]
    return AutoBudget(StoredCosts((*names, type(drafter).__name__, str(torch.get_num_threads()))))
