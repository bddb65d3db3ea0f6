"""Proof by enumeration that the rules for drawn trees are exact, and how many tokens they accept.

As for chains: every draft that may be drawn, every outcome of every comparison and every recovered or bonus
token is followed in fractions. No number is rounded anywhere.
"""

from fractions import Fraction

import numpy as np
import pytest

from forerun.verification import tree_rejection_math
from forerun.verification.chain_rejection_math import BLOCK, TOKEN

from .enumeration import Distributions
from .test_chain_rejection_math import draw_chains, emitted as emitted_on_chains
from .tree_enumeration import REPLACEMENT, RULES, SHAPES, distance, draw_trees, emitted, rules


class Constant(dict):
    """The same distribution everywhere."""

    def __init__(self, *weights):
        self.distribution = np.array([Fraction(weight, sum(weights)) for weight in weights], dtype=object)

    def __missing__(self, context):
        return self.distribution


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_rule_is_exact(name, replacement, shape, seed):
    target, draft = Distributions(f"target{seed}"), Distributions(f"draft{seed}", zeros=0.2)
    assert distance(rules()[name], SHAPES[shape], target, draft, replacement) == 0


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [2, 3])
def test_rule_is_exact_where_distributions_hold_few_tokens(name, replacement, shape, vocab_size):
    """Fewer tokens than children: without replacement the distribution is exhausted, with it there are duplicates."""
    for seed in range(3):
        target = Distributions(f"target{seed}", zeros=0.4, vocab_size=vocab_size)
        draft = Distributions(f"draft{seed}", zeros=0.6, vocab_size=vocab_size)
        assert distance(rules()[name], SHAPES[shape], target, draft, replacement, vocab_size) == 0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("filler", [0, 1, 2])
def test_children_drawn_from_nothing_are_passed_over(name, filler):
    """A drafter that fills up its tree after a distribution was exhausted: those nodes were chosen, not drawn."""
    for seed in range(3):
        target, draft = Distributions(f"target{seed}", zeros=0), Distributions(f"draft{seed}", zeros=0.6)
        assert distance(rules()[name], SHAPES["uneven"], target, draft, False, filler=filler) == 0
        assert distance(rules()[name], SHAPES["one level"], target, draft, False, filler=filler) == 0


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_rule_is_exact_where_the_distribution_are_equal_or_disjoint(name, replacement):
    for target, draft in [
        (Constant(1, 2, 3), Constant(1, 2, 3)),
        (Constant(1, 0, 0), Constant(0, 1, 1)),
        (Constant(0, 1, 0), Constant(0, 1, 0)),
        (Constant(0, 3, 1), Constant(2, 1, 0)),
    ]:
        for shape in ("binary", "one level", "chain"):
            assert distance(rules()[name], SHAPES[shape], target, draft, replacement) == 0
    trees = draw_trees(SHAPES["binary"], Constant(1, 2, 3), replacement)
    assert emitted(rules()[name], trees, Constant(1, 2, 3), Constant(1, 2, 3), replacement)[1] == 2


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
@pytest.mark.parametrize("shape", ["binary", "depth first", "three, then one"])
def test_trees_that_grow_where_they_look_promising(name, replacement, shape):
    """Which nodes get children may depend on what was drawn; a node that was looked at must stay."""
    target, draft = Distributions("target", zeros=0), Distributions("draft", zeros=0)
    assert distance(rules()[name], SHAPES[shape], target, draft, replacement, expand_above=Fraction(1, 3)) == 0
    assert distance(rules()[name], SHAPES[shape], target, draft, replacement, drop_below=Fraction(1, 3)) > Fraction(
        1, 100
    )


@pytest.mark.parametrize(("name", "of_chains"), [("traversal", BLOCK), ("multi-step", TOKEN)])
@REPLACEMENT
@pytest.mark.parametrize("seed", range(4))
def test_on_chains_it_is_the_rule_for_chains(name, of_chains, replacement, seed):
    target, draft = Distributions(f"target{seed}"), Distributions(f"draft{seed}")
    own = emitted(rules()[name], draw_trees(SHAPES["chain"], draft, replacement), target, draft, replacement)
    other = emitted_on_chains(of_chains, draw_chains(draft, 3), target, draft)
    assert own[1] == other[1]
    assert {key: mass for key, mass in own[0].items() if mass} == {key: m for key, m in other[0].items() if m}


def test_expected_accepted_tokens():
    """Two children at each of two levels, distributions at random: each step to the better rule pays."""
    totals = np.zeros(3, dtype=int).astype(object)
    for seed in range(4):
        target, draft = Distributions(f"target{seed}", zeros=0), Distributions(f"draft{seed}", zeros=0)
        totals += [
            emitted(rules()[name], draw_trees(SHAPES["binary"], draft, replacement), target, draft, replacement)[1]
            for name, replacement in [("multi-step", True), ("multi-step", False), ("traversal", False)]
        ]
    assert totals[0] < totals[1] < totals[2]


@pytest.mark.sampled(3)
@REPLACEMENT
@pytest.mark.parametrize("shape", ["uneven", "three, then one", "chain"])
def test_traversal_accepts_no_fewer_tokens_than_multi_step(replacement, shape):
    for seed in range(3):
        target, draft = Distributions(f"target{seed}"), Distributions(f"draft{seed}")
        trees = list(draw_trees(SHAPES[shape], draft, replacement))
        multi_step = emitted(tree_rejection_math.multi_step, trees, target, draft, replacement)[1]
        assert emitted(tree_rejection_math.traversal, trees, target, draft, replacement)[1] >= multi_step
