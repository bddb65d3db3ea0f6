"""How much to draft: acceptance and costs as they are measured, and the budget of each step that follows from them."""

from forerun.speculation.acceptance import Acceptance, Rates, bin_centres, bin_of
from forerun.speculation.automatic import AutoBudget, automatic_budget
from forerun.speculation.cost_model import CostModel, Curve
from forerun.speculation.cost_store import StoredCosts
from forerun.speculation.exploration import Probes
from forerun.speculation.fixed_length import WholeBudget
from forerun.speculation.goodput import Prospects
from forerun.speculation.policy import Budget, BudgetByRequest, FixedBudget, Outcome, Plan, Reason, StepCost

__all__ = [
    "Acceptance",
    "AutoBudget",
    "Budget",
    "BudgetByRequest",
    "CostModel",
    "Curve",
    "FixedBudget",
    "Outcome",
    "Plan",
    "Probes",
    "Prospects",
    "Rates",
    "Reason",
    "StepCost",
    "StoredCosts",
    "WholeBudget",
    "automatic_budget",
    "bin_centres",
    "bin_of",
]
