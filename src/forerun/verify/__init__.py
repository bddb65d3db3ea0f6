"""The acceptance rules: which drafted tokens are kept, and which token follows them."""

from forerun.verify.acceptance_rules import VERIFIERS, check_acceptance, rule_for, verify_step
from forerun.verify.chain_rejection_math import UnsoundProbsError
from forerun.verify.walk import walk_tokens

__all__ = ["VERIFIERS", "UnsoundProbsError", "check_acceptance", "rule_for", "verify_step", "walk_tokens"]
