"""The choice of how much to draft, from measured acceptance and costs."""

from forerun.speculation.acceptance import AcceptanceStats, Rates, bin_centres, bin_of
from forerun.speculation.choose_k import AutomaticPolicy, automatic_policy
from forerun.speculation.cost_model import CostModel, Curve
from forerun.speculation.cost_store import StoredCosts
from forerun.speculation.exploration import Probes
from forerun.speculation.fixed_length import FixedLengthPolicy
from forerun.speculation.goodput import Prospects
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
    "Curve",
    "DraftOutcome",
    "DraftPlan",
    "FixedLengthPolicy",
    "FixedPolicy",
    "PolicyByRequest",
    "Probes",
    "Prospects",
    "Rates",
    "Reason",
    "SpeculationPolicy",
    "StepCost",
    "StoredCosts",
    "TrimmingPolicy",
    "automatic_policy",
    "bin_centres",
    "bin_of",
]
