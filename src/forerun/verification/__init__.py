"""The acceptance rules, which decide the accepted draft tokens and the token that follows them."""

from forerun.verification.acceptance_rules import VERIFIERS, check_acceptance, rule_for, verify_step
from forerun.verification.chain_rejection_math import UnsoundProbsError
from forerun.verification.greedy_and_seeded import match_sampled_tokens

__all__ = ["VERIFIERS", "UnsoundProbsError", "check_acceptance", "match_sampled_tokens", "rule_for", "verify_step"]
