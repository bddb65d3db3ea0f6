"""Proof by enumeration that the rules for drawn chains are exact, and that broken ones are not.

The functions of `forerun.verification.chain_rejection_math` run on fractions: every draft, every outcome of every
comparison and every recovered or bonus token is followed, and the distribution of what is emitted, completed by the
target's own, is compared with the target's. No number is rounded anywhere.
"""

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from forerun.verification.chain_rejection_math import BLOCK, TOKEN, excess, unit_carry, up_to_first_failure

from .enumeration import Distributions, total_variation

RULES = {"token": TOKEN, "block": BLOCK}


class Sharpened:
    """The same distributions at half the temperature."""

    def __init__(self, probs):
        self.probs = probs

    def __getitem__(self, context):
        squares = self.probs[context] ** 2
        return squares / squares.sum()


def draw_chains(draft, length, stop_below=Fraction(0), drop=False, chain=()):
    """Every chain a drafter may propose, with its probability.

    It stops after a token less probable than stop_below, which it keeps or drops.
    """
    if len(chain) == length:
        yield chain, Fraction(1)
        return
    for token, accept_prob in enumerate(draft[chain]):
        if accept_prob and accept_prob < stop_below:
            yield (chain if drop else (*chain, token)), accept_prob
        elif accept_prob:
            for rest, rest_chance in draw_chains(draft, length, stop_below, drop, (*chain, token)):
                yield rest, accept_prob * rest_chance


def weigh(rule, chain, target, draft):
    """The rule's chances for one chain, and the weights of the token after each accepted length."""
    contexts = [chain[:i] for i in range(len(chain) + 1)]
    p = np.stack([target[context] for context in contexts])
    q = np.stack([draft[context] for context in contexts])
    ratios = [p[i][x] / q[i][x] for i, x in enumerate(chain)]
    carries = rule.carry(ratios)
    left = excess(np.array(carries, dtype=object)[:, None], p, q)
    accept_probs = rule.acceptance(ratios, carries, list(left.sum(-1)))
    left[-1] = p[-1]
    return [Fraction(accept_prob) for accept_prob in accept_probs], left


def emitted(rule, chains, target, draft, wrong_residual=False):
    """Distribution of (accepted tokens, next token), and the expected number of accepted tokens."""
    distribution, accepted = defaultdict(Fraction), Fraction(0)
    for chain, chain_chance in chains:
        accept_probs, left = weigh(rule, chain, target, draft)
        if wrong_residual:
            left = weigh(replace(rule, carry=unit_carry), chain, target, draft)[1]
        for outcome in product((False, True), repeat=len(chain)):
            accept_prob = chain_chance
            for success, threshold in zip(outcome, accept_probs):
                accept_prob *= threshold if success else 1 - threshold
            if not accept_prob:
                continue
            length = rule.length(outcome)
            accepted += accept_prob * length
            weights = left[length] if left[length].sum() else target[chain[:length]]
            for token, weight in enumerate(weights):
                distribution[(*chain[:length], token)] += accept_prob * weight / weights.sum()
    return distribution, accepted


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_rule_is_exact(name, length, seed):
    target, draft = Distributions(f"target{seed}"), Distributions(f"draft{seed}")
    distribution, _ = emitted(RULES[name], draw_chains(draft, length), target, draft)
    assert total_variation(distribution, target, length + 1) == 0


@pytest.mark.parametrize("name", RULES)
def test_rule_is_exact_where_the_distribution_are_equal_or_disjoint(name):
    class Constant(dict):
        def __missing__(self, context):
            return self["distribution"]

    def constant(*weights):
        return Constant(distribution=np.array([Fraction(weight, sum(weights)) for weight in weights], dtype=object))

    for target, draft in [
        (constant(1, 2, 3), constant(1, 2, 3)),
        (constant(1, 0, 0), constant(0, 1, 1)),
        (constant(0, 1, 0), constant(0, 1, 0)),
        (constant(0, 3, 1), constant(2, 1, 0)),
    ]:
        distribution, accepted = emitted(RULES[name], draw_chains(draft, 3), target, draft)
        assert total_variation(distribution, target, 4) == 0
        if np.array_equal(target["distribution"], draft["distribution"]):
            assert accepted == 3


@pytest.mark.parametrize("name", RULES)
def test_stopping_at_a_token_is_exact_if_the_token_is_verified(name):
    target, draft = Distributions("target", zeros=0), Distributions("draft", zeros=0)
    kept = draw_chains(draft, 3, stop_below=Fraction(3, 10))
    dropped = draw_chains(draft, 3, stop_below=Fraction(3, 10), drop=True)
    assert total_variation(emitted(RULES[name], kept, target, draft)[0], target, 4) == 0
    assert total_variation(emitted(RULES[name], dropped, target, draft)[0], target, 4) > Fraction(1, 100)


@pytest.mark.parametrize("name", RULES)
def test_distribution_of_another_temperature_is_lossy(name):
    target, draft = Distributions("target", zeros=0), Distributions("draft", zeros=0)
    distribution, _ = emitted(RULES[name], draw_chains(draft, 3), target, Sharpened(draft))
    assert total_variation(distribution, target, 4) > Fraction(1, 100)


def test_stopping_at_the_first_failure_breaks_block():
    target, draft = Distributions("target", zeros=0), Distributions("draft", zeros=0)
    broken = replace(BLOCK, length=up_to_first_failure)
    assert total_variation(emitted(broken, draw_chains(draft, 3), target, draft)[0], target, 4) > Fraction(1, 100)


def test_residual_without_the_carry_breaks_block():
    target, draft = Distributions("target", zeros=0), Distributions("draft", zeros=0)
    distribution, _ = emitted(BLOCK, draw_chains(draft, 3), target, draft, wrong_residual=True)
    assert total_variation(distribution, target, 4) > 0


def test_expected_accepted_tokens():
    class Constant(dict):
        def __missing__(self, context):
            return self["distribution"]

    target = Constant(distribution=np.array([Fraction(1, 3), Fraction(2, 3), Fraction(0)], dtype=object))
    draft = Constant(distribution=np.array([Fraction(2, 3), Fraction(1, 3), Fraction(0)], dtype=object))
    assert emitted(TOKEN, draw_chains(draft, 2), target, draft)[1] == Fraction(10, 9)
    assert emitted(BLOCK, draw_chains(draft, 2), target, draft)[1] == Fraction(11, 9)


@pytest.mark.parametrize("mass", [Fraction(0), Fraction(1, 100), Fraction(2, 3)])
def test_a_chance_of_block_grows_with_the_carry_up_to_certainty(mass):
    """Also where nothing is in excess: the first of two tokens is accepted for sure if it may be at all."""
    carries = [Fraction(i, 12) for i in range(13)]
    accept_probs = [BLOCK.acceptance([carry, 1], [1, carry, carry], [1, mass, 1])[0] for carry in carries]
    assert accept_probs == sorted(accept_probs)
    assert all(0 <= accept_prob <= 1 for accept_prob in accept_probs)
    assert accept_probs[-1] == 1 and accept_probs[0] == mass / (mass + 1)


@pytest.mark.parametrize("seed", range(6))
def test_block_accepts_no_fewer_tokens_than_token_level_rejection(seed):
    target, draft = Distributions(f"target{seed}"), Distributions(f"draft{seed}")
    token = emitted(TOKEN, draw_chains(draft, 3), target, draft)[1]
    block = emitted(BLOCK, draw_chains(draft, 3), target, draft)[1]
    assert block >= token
