"""How much to draft: what acceptance and cost have been, and what follows from them."""

from forerun.policy.acceptance import Acceptance
from forerun.policy.choice import Prospects
from forerun.policy.cost_store import StoredCosts
from forerun.policy.costs import CostModel
from forerun.policy.probes import Probes
from forerun.policy.rates import Rates, bin_centres, bin_of

__all__ = ["Acceptance", "CostModel", "Probes", "Prospects", "Rates", "StoredCosts", "bin_centres", "bin_of"]
