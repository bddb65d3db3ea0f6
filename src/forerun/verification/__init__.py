"""The acceptance rules, which decide the accepted draft tokens and the token that follows them."""

from typing import TYPE_CHECKING

from forerun.errors import UnsoundProbsError
from forerun.utils.deferred import exporting
from forerun.verification.greedy_and_seeded import match_sampled_tokens

if TYPE_CHECKING:
    from forerun.verification.acceptance_rules import VERIFIERS, check_acceptance, rule_for, verify_step

__all__ = ["VERIFIERS", "UnsoundProbsError", "check_acceptance", "match_sampled_tokens", "rule_for", "verify_step"]

# Greedy requests need none of them.
_DEFERRED = ("VERIFIERS", "check_acceptance", "rule_for", "verify_step")
__getattr__ = exporting(__name__, dict.fromkeys(_DEFERRED, "forerun.verification.acceptance_rules"))
