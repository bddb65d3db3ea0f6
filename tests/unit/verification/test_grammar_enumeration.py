"""Proof by enumeration that every rule gives the target's distribution under a grammar's mask, in fractions.

Drafts are drawn from distributions that know nothing of the grammar; what is verified of them is what the engine's code
leaves; the target's distributions are what its constraint allows along each path.
"""

from collections import defaultdict
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from forerun import SamplingParams
from forerun.sampling import SequenceConstraint
from forerun.sampling.grammar import with_grammar
from forerun.types import Draft, PackedDrafts, Sequence, is_allowed
from forerun.verification.chain_rejection_math import BLOCK, TOKEN
from forerun.verification.greedy_and_seeded import match_sampled_tokens
from grammars import ANY, Automaton

from .enumeration import Distributions, total_variation
from .test_chain_rejection_math import draw_chains, emitted as emitted_on_chains
from .tree_enumeration import REPLACEMENT, RULES, SHAPES, depth, draw_trees, emitted, rules

VOCAB, END = 3, 2
AUTOMATON = Automaton({0: {0: 1, 1: 2}, 1: {0: 0, 1: 1}, 2: {0: 3}, 3: {0: 3, 1: 0}}, frozenset({1, 3}), VOCAB)


def new_sequence():
    constraint = SequenceConstraint(AUTOMATON.matcher, {END}, VOCAB)
    return Sequence(0, [0], 1, SamplingParams(grammar=ANY), constraint=constraint)


class Masked:
    """The target's distributions under the grammar. Where it is not looked at, any will do."""

    def __init__(self, probs):
        self.probs, self.sequence = probs, new_sequence()

    def __getitem__(self, context):
        (bits,) = self.sequence.constraint.allowed(self.sequence, [list(context)])
        if not isinstance(bits, np.ndarray):  # after the end, or below a refused token
            return self.probs[context]
        kept = self.probs[context] * np.array([int(is_allowed(bits, token)) for token in range(VOCAB)], dtype=object)
        return kept / kept.sum()


def verified(nodes, drawn, drop_refused=False):
    """(token, parent) of the nodes that are verified of a draft."""
    if not nodes:
        return []
    probs = torch.zeros(len(nodes) + 1, VOCAB) if drawn and not drop_refused else None
    draft = Draft([token for token, _ in nodes], [parent for _, parent in nodes], probs)
    kept = with_grammar(new_sequence(), [], draft, len(nodes))
    return list(zip(kept.ids, kept.parents))


def distributions(seed):
    return Masked(Distributions(f"target{seed}", zeros=0)), Distributions(f"draft{seed}", zeros=0.2)


def completed(distribution):
    """What is emitted up to and with an end token: the rest is cut off."""
    cut = defaultdict(Fraction)
    for tokens, accept_prob in distribution.items():
        cut[tokens[: tokens.index(END) + 1] if END in tokens else tokens] += accept_prob
    return cut


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
@pytest.mark.parametrize("shape", SHAPES)
def test_trees(name, replacement, shape):
    target, draft = distributions(len(shape))
    trees = [
        (verified(nodes, drawn=True), accept_prob)
        for nodes, accept_prob in draw_trees(SHAPES[shape], draft, replacement)
    ]
    distribution, _ = emitted(rules()[name], trees, target, draft, replacement)
    assert total_variation(completed(distribution), target, depth(SHAPES[shape]) + 1) == 0


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=["token", "block"])
def test_chains(rule):
    for seed in range(4):
        target, draft = distributions(seed)
        chains = defaultdict(Fraction)
        for chain, accept_prob in draw_chains(draft, 3):
            nodes = verified([(token, at - 1) for at, token in enumerate(chain)], drawn=True)
            chains[tuple(token for token, _ in nodes)] += accept_prob
        distribution, _ = emitted_on_chains(rule, chains.items(), target, draft)
        assert total_variation(completed(distribution), target, 4) == 0


def test_the_walk():
    """Chosen drafts, of any tokens: each row's token is drawn from the target."""
    target, _ = distributions(0)
    parents = [-1, -1, 0]
    for tokens in product(range(VOCAB), repeat=len(parents)):
        nodes = verified(list(zip(tokens, parents)), drawn=False)
        draft = Draft([token for token, _ in nodes], [parent for _, parent in nodes])
        contexts = [(), *(tuple(draft.ids[node] for node in path) for path in draft.paths())]
        distribution = defaultdict(Fraction)
        for drawn in product(range(VOCAB), repeat=len(contexts)):
            accept_prob = Fraction(1)
            for context, token in zip(contexts, drawn):
                accept_prob *= target[context][token]
            (verdict,) = match_sampled_tokens(PackedDrafts.of([draft]), list(drawn))
            distribution[(*(draft.ids[node] for node in verdict.path), verdict.next_token)] += accept_prob
        assert total_variation(completed(distribution), target, 3) == 0


@pytest.mark.parametrize("name", RULES)
def test_leaving_out_drawn_tokens_would_be_found(name):
    target, draft = distributions(0)
    trees = [
        (verified(nodes, drawn=True, drop_refused=True), accept_prob)
        for nodes, accept_prob in draw_trees(SHAPES["one level"], draft, True)
    ]
    distribution, _ = emitted(rules()[name], trees, target, draft, True)
    assert total_variation(completed(distribution), target, 2) > 0
