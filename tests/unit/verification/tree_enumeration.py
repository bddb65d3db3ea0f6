"""Enumeration of drawn trees: every draft that may be drawn, and every outcome of a rule for it, in fractions."""

from collections import defaultdict
from fractions import Fraction

import pytest

from forerun.verification import tree_rejection_math
from forerun.verification.tree_rejection_math import DrawnTree

from .enumeration import total_variation

RULES = ("traversal", "multi-step")
SHAPES = {
    "binary": (-1, -1, 0, 0, 1, 1),
    "depth first": (-1, 0, 0, -1, 3, 3),
    "uneven": (-1, 0, -1, 2, 2, 0),
    "one level": (-1, -1, -1),
    "three, then one": (-1, -1, -1, 0, 1),
    "chain": (-1, 0, 1),
    "below the second": (-1, -1, 1, 1, 3),
    "empty": (),
}
REPLACEMENT = pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])


def rules(module=tree_rejection_math):
    return {"traversal": module.traversal, "multi-step": module.multi_step}


def path_of(tokens, parents, node):
    return () if node < 0 else (*path_of(tokens, parents, parents[node]), tokens[node])


def draw_trees(shape, draft, replacement, expand_above=0, drop_below=0, filler=None, nodes=()):
    """Every (token, parent) list a drafter may propose, with its probability.

    A node is left out with all below it if its distribution is exhausted (or gets the token `filler` and no children).

    Args:
        nodes: (token, parent, chance) drawn so far, one per entry of shape; None for one left out.
        expand_above: nodes below this chance are kept, but get no children.
        drop_below: nodes below this chance are dropped after their token was looked at.
    """
    if len(nodes) == len(shape):
        kept = {old: new for new, old in enumerate(i for i, node in enumerate(nodes) if node)}
        yield [(node[0], kept.get(node[1], -1)) for node in nodes if node], Fraction(1)
        return

    def go_on(node, accept_prob):
        for nodes_drawn, rest in draw_trees(
            shape, draft, replacement, expand_above, drop_below, filler, (*nodes, node)
        ):
            yield nodes_drawn, accept_prob * rest

    parent = shape[len(nodes)]
    if parent >= 0 and (nodes[parent] is None or nodes[parent][2] < expand_above or nodes[parent][2] == 0):
        yield from go_on(None, 1)
        return
    distribution = draft[path_of([node and node[0] for node in nodes], shape, parent)].copy()
    if not replacement:
        distribution[[node[0] for node in nodes if node and node[1] == parent]] = Fraction(0)
    if not distribution.sum():
        yield from go_on(None if filler is None else (filler, parent, Fraction(0)), 1)
        return
    for token, weight in enumerate(distribution / distribution.sum()):
        if weight:
            yield from go_on(None if weight < drop_below else (token, parent, weight), weight)


class Script:
    """Comparisons with given outcomes, then each that can succeed does; remembers what else could have happened."""

    def __init__(self, answers):
        self.given, self.answers, self.nodes = answers, [], []
        self.accept_prob, self.others = Fraction(1), []

    def __call__(self, node, threshold):
        assert 0 <= threshold <= 1
        assert node not in self.nodes
        place = len(self.answers)
        answer = self.given[place] if place < len(self.given) else threshold > 0
        if place >= len(self.given) and 0 < threshold < 1:
            self.others.append((*self.answers, False))
        self.nodes.append(node)
        self.answers.append(answer)
        self.accept_prob *= threshold if answer else 1 - threshold
        return answer


def decisions(rule, tree):
    """Every outcome of a rule, with its probability."""
    scripts = [()]
    while scripts:
        script = Script(scripts.pop())
        yield rule(tree, script), script.accept_prob
        scripts += script.others


def drawn_tree(nodes, target, draft, replacement):
    """The tree of drawn (token, parent) pairs, and each row's context."""
    tokens, parents = [node[0] for node in nodes], [node[1] for node in nodes]
    contexts = [path_of(tokens, parents, node) for node in range(-1, len(nodes))]
    children = [[i for i, parent in enumerate(parents) if parent == node] for node in range(-1, len(nodes))]

    def target_distribution(row):
        return target[contexts[row]]

    def draft_distribution(row):
        return draft[contexts[row]]

    return DrawnTree(tokens, children, target_distribution, draft_distribution, replacement, Fraction(1)), contexts


def emitted(rule, trees, target, draft, replacement):
    """Distribution of (accepted tokens, next token), and the expected number of accepted tokens."""
    distribution, accepted, total, merged = defaultdict(Fraction), Fraction(0), Fraction(0), defaultdict(Fraction)
    for nodes, accept_prob in trees:
        merged[tuple(nodes)] += accept_prob
    for nodes, tree_chance in merged.items():
        tree, contexts = drawn_tree(nodes, target, draft, replacement)
        for (row, weights), decision_chance in decisions(rule, tree):
            accept_prob = tree_chance * decision_chance
            if accept_prob:
                total += accept_prob
                accepted += accept_prob * len(contexts[row])
                for token, weight in enumerate(weights / weights.sum()):
                    distribution[(*contexts[row], token)] += accept_prob * weight
    assert total == 1
    return distribution, accepted


def depth(shape):
    return max((len(path_of(shape, shape, node)) for node in range(len(shape))), default=0)


def distance(rule, shape, target, draft, replacement, vocab_size=3, told=None, **options):
    """How far what the rule emits is from the target. told: the distributions it is told of, if not those used."""
    trees = draw_trees(shape, draft, replacement, **options)
    distribution, _ = emitted(rule, trees, target, told or draft, replacement)
    return total_variation(distribution, target, depth(shape) + 1, vocab_size)
