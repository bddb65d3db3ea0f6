"""How much to draft: what acceptance and cost have been, and what follows from them."""

from forerun.policy.acceptance import Acceptance
from forerun.policy.choice import Prospects
from forerun.policy.costs import CostModel
from forerun.policy.probes import Probes
from forerun.policy.rates import Rates, bin_centres, bin_of

__all__ = ["Acceptance", "CostModel", "Probes", "Prospects", "Rates", "bin_centres", "bin_of"]
