"""The choice of how much to draft, from measured acceptance and costs."""

from forerun.speculation.acceptance import AcceptanceStats, Rates, bin_centres, bin_of
from forerun.speculation.choose_k import AutomaticPolicy, DraftChooser, drafter_costs
from forerun.speculation.cost_model import CostModel, LearnedCurve, StoredCosts
from forerun.speculation.policy import (
    DraftOutcome,
    DraftPlan,
    FixedPolicy,
    PolicyByRequest,
    Reason,
    SpeculationPolicy,
    StepCost,
)
from forerun.speculation.trimming import TrimmingPolicy

__all__ = [
    "AcceptanceStats",
    "AutomaticPolicy",
    "CostModel",
    "DraftChooser",
    "DraftOutcome",
    "DraftPlan",
    "FixedPolicy",
    "LearnedCurve",
    "PolicyByRequest",
    "Rates",
    "Reason",
    "SpeculationPolicy",
    "StepCost",
    "StoredCosts",
    "TrimmingPolicy",
    "bin_centres",
    "bin_of",
    "drafter_costs",
]
