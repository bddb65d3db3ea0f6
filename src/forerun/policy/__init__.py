"""How much to draft: what acceptance and cost have been, and what follows from them."""

from forerun.policy.rates import Rates, bin_centres, bin_of

__all__ = ["Rates", "bin_centres", "bin_of"]
