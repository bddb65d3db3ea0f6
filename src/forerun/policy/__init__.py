"""How much to draft: acceptance and costs as they are measured, and the budget of each step that follows from them."""

from forerun.policy.acceptance import Acceptance
from forerun.policy.automatic_k import AutoBudget, automatic_budget
from forerun.policy.budget import Budget, FixedBudget, Outcome, Plan, Reason, StepCost
from forerun.policy.by_request import BudgetByRequest
from forerun.policy.cost_store import StoredCosts
from forerun.policy.costs import CostModel
from forerun.policy.curve import Curve
from forerun.policy.goodput import Prospects
from forerun.policy.probes import Probes
from forerun.policy.rates import Rates, bin_centres, bin_of
from forerun.policy.whole_drafts import WholeBudget

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
