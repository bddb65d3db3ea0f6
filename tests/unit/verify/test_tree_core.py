"""Proof by enumeration that the rules for drawn trees are exact, and that broken ones are not.

As for chains: every draft that may be drawn, every outcome of every comparison and every recovered or bonus
token is followed in fractions. The broken rules are the module's own source with one line changed.
"""

import inspect
from collections import defaultdict
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from forerun.verify import tree_core
from forerun.verify.core import BLOCK, TOKEN
from forerun.verify.tree_core import DrawnTree

from .enumeration import Laws, total_variation
from .test_core import draw_chains
from .test_core import emitted as emitted_on_chains

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


class Constant(dict):
    """The same law everywhere."""

    def __init__(self, *weights):
        self.law = np.array([Fraction(weight, sum(weights)) for weight in weights], dtype=object)

    def __missing__(self, context):
        return self.law


def rules(module=tree_core):
    return {"traversal": module.traversal, "multi-step": module.multi_step}


def path_of(tokens, parents, node):
    return () if node < 0 else (*path_of(tokens, parents, parents[node]), tokens[node])


def draw_trees(shape, draft, replacement, expand_above=0, drop_below=0, filler=None, nodes=()):
    """Every (token, parent) list a drafter may propose, with its probability.

    A node is left out with all below it if its law is exhausted (or gets the token `filler` and no children).

    Args:
        nodes: (token, parent, chance) drawn so far, one per entry of shape; None for one left out.
        expand_above: nodes below this chance are kept, but get no children.
        drop_below: nodes below this chance are dropped after their token was looked at.
    """
    if len(nodes) == len(shape):
        kept = {old: new for new, old in enumerate(i for i, node in enumerate(nodes) if node)}
        yield [(node[0], kept.get(node[1], -1)) for node in nodes if node], Fraction(1)
        return

    def go_on(node, chance):
        for nodes_drawn, rest in draw_trees(
            shape, draft, replacement, expand_above, drop_below, filler, (*nodes, node)
        ):
            yield nodes_drawn, chance * rest

    parent = shape[len(nodes)]
    if parent >= 0 and (nodes[parent] is None or nodes[parent][2] < expand_above or nodes[parent][2] == 0):
        yield from go_on(None, 1)
        return
    law = draft[path_of([node and node[0] for node in nodes], shape, parent)].copy()
    if not replacement:
        law[[node[0] for node in nodes if node and node[1] == parent]] = Fraction(0)
    if not law.sum():
        yield from go_on(None if filler is None else (filler, parent, Fraction(0)), 1)
        return
    for token, weight in enumerate(law / law.sum()):
        if weight:
            yield from go_on(None if weight < drop_below else (token, parent, weight), weight)


class Script:
    """Comparisons with given outcomes, then each that can succeed does; remembers what else could have happened."""

    def __init__(self, answers):
        self.given, self.answers, self.nodes = answers, [], []
        self.chance, self.others = Fraction(1), []

    def __call__(self, node, threshold):
        assert 0 <= threshold <= 1
        assert node not in self.nodes
        place = len(self.answers)
        answer = self.given[place] if place < len(self.given) else threshold > 0
        if place >= len(self.given) and 0 < threshold < 1:
            self.others.append((*self.answers, False))
        self.nodes.append(node)
        self.answers.append(answer)
        self.chance *= threshold if answer else 1 - threshold
        return answer


def decisions(rule, tree):
    """Every outcome of a rule, with its probability."""
    scripts = [()]
    while scripts:
        script = Script(scripts.pop())
        yield rule(tree, script), script.chance
        scripts += script.others


def drawn_tree(nodes, target, draft, replacement):
    """The tree of drawn (token, parent) pairs, and each row's context."""
    tokens, parents = [node[0] for node in nodes], [node[1] for node in nodes]
    contexts = [path_of(tokens, parents, node) for node in range(-1, len(nodes))]
    children = [[i for i, parent in enumerate(parents) if parent == node] for node in range(-1, len(nodes))]

    def target_law(row):
        return target[contexts[row]]

    def draft_law(row):
        return draft[contexts[row]]

    return DrawnTree(tokens, children, target_law, draft_law, replacement, Fraction(1)), contexts


def emitted(rule, trees, target, draft, replacement):
    """Law of (accepted tokens, next token), and the expected number of accepted tokens."""
    law, accepted, total, merged = defaultdict(Fraction), Fraction(0), Fraction(0), defaultdict(Fraction)
    for nodes, chance in trees:
        merged[tuple(nodes)] += chance
    for nodes, tree_chance in merged.items():
        tree, contexts = drawn_tree(nodes, target, draft, replacement)
        for (row, weights), decision_chance in decisions(rule, tree):
            chance = tree_chance * decision_chance
            if chance:
                total += chance
                accepted += chance * len(contexts[row])
                for token, weight in enumerate(weights / weights.sum()):
                    law[(*contexts[row], token)] += chance * weight
    assert total == 1
    return law, accepted


def depth(shape):
    return max((len(path_of(shape, shape, node)) for node in range(len(shape))), default=0)


def distance(rule, shape, target, draft, replacement, vocab_size=3, told=None, **options):
    """How far what the rule emits is from the target. told: the laws it is told of, if not those drawn from."""
    trees = draw_trees(shape, draft, replacement, **options)
    law, _ = emitted(rule, trees, target, told or draft, replacement)
    return total_variation(law, target, depth(shape) + 1, vocab_size)


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_rule_is_exact(name, replacement, shape, seed):
    target, draft = Laws(f"target{seed}"), Laws(f"draft{seed}", zeros=0.2)
    assert distance(rules()[name], SHAPES[shape], target, draft, replacement) == 0


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [2, 3])
def test_rule_is_exact_where_laws_hold_few_tokens(name, replacement, shape, vocab_size):
    """Fewer tokens than children are drawn: without replacement the law is exhausted, with it there are duplicates."""
    for seed in range(3):
        target = Laws(f"target{seed}", zeros=0.4, vocab_size=vocab_size)
        draft = Laws(f"draft{seed}", zeros=0.6, vocab_size=vocab_size)
        assert distance(rules()[name], SHAPES[shape], target, draft, replacement, vocab_size) == 0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("filler", [0, 1, 2])
def test_children_drawn_from_nothing_are_passed_over(name, filler):
    """A drafter that fills up its tree after a law was exhausted: those nodes were chosen, not drawn."""
    for seed in range(3):
        target, draft = Laws(f"target{seed}", zeros=0), Laws(f"draft{seed}", zeros=0.6)
        assert distance(rules()[name], SHAPES["uneven"], target, draft, False, filler=filler) == 0
        assert distance(rules()[name], SHAPES["one level"], target, draft, False, filler=filler) == 0


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_rule_is_exact_where_the_laws_are_equal_or_disjoint(name, replacement):
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
    target, draft = Laws("target", zeros=0), Laws("draft", zeros=0)
    assert distance(rules()[name], SHAPES[shape], target, draft, replacement, expand_above=Fraction(1, 3)) == 0
    assert distance(rules()[name], SHAPES[shape], target, draft, replacement, drop_below=Fraction(1, 3)) > Fraction(
        1, 100
    )


@pytest.mark.parametrize(("name", "of_chains"), [("traversal", BLOCK), ("multi-step", TOKEN)])
@REPLACEMENT
@pytest.mark.parametrize("seed", range(4))
def test_on_chains_it_is_the_rule_for_chains(name, of_chains, replacement, seed):
    target, draft = Laws(f"target{seed}"), Laws(f"draft{seed}")
    own = emitted(rules()[name], draw_trees(SHAPES["chain"], draft, replacement), target, draft, replacement)
    other = emitted_on_chains(of_chains, draw_chains(draft, 3), target, draft)
    assert own[1] == other[1]
    assert {key: mass for key, mass in own[0].items() if mass} == {key: m for key, m in other[0].items() if m}


def mutated(*changes):
    """The module with some of its lines changed. changes: pairs of text that stands there once, and its replacement."""
    source = inspect.getsource(tree_core)
    for text, instead in changes:
        assert source.count(text) == 1
        source = source.replace(text, instead)
    namespace = {"__name__": tree_core.__name__}
    exec(compile(source, "mutant", "exec"), namespace)
    return SimpleNamespace(**namespace)


REMOVED_THOUGH_REPLACED = ("if not tree.replacement and child", "if child")
NOT_PASSED_OVER = ("                continue\n", "                drawn = tree.one\n")


TRAVERSAL, MULTI_STEP, BOTH = ("traversal",), ("multi-step",), RULES
MUTANTS = {
    "residual not updated": ("self._target, target, target_mass = left, left, mass", "pass", BOTH, (True, False)),
    "residual updated for the bonus alone": (
        "self._target, target, target_mass = left, left, mass",
        "self._target = left",
        BOTH,
        (True, False),
    ),
    "residual not normalised": ("left, left, mass", "left, left, tree.one", BOTH, (True, False)),
    "share not updated": ("self.share = beyond / (beyond + (1 - self.share))", "pass", TRAVERSAL, (True, False)),
    "share of the parent forgotten": ("min(tree.one, self.share * ", "min(tree.one, ", TRAVERSAL, (True, False)),
    "share not carried into the residual": (
        "excess(self.share * draft_mass / target_mass",
        "excess(draft_mass / target_mass",
        TRAVERSAL,
        (True, False),
    ),
    "law not renormalised": ("draft_mass = _number(draft.sum())", "pass", BOTH, (False,)),
    "token not removed from the law": ("if not tree.replacement and child", "if False and child", BOTH, (False,)),
    "law of another row": ("tree.draft(self._row)", "tree.draft(0)", BOTH, (True, False)),
    "order reversed": ("for child in children:", "for child in children[::-1]:", BOTH, (False,)),
    "bonus from the target's law": ("else self._target", "else self._tree.target(self._row)", BOTH, (True, False)),
    "bonus from the root": ("return (row, residual.weights)", "return (row, tree.target(0))", TRAVERSAL, (True, False)),
    "bonus from the root, level by level": (
        "return row, residual.weights",
        "return row, tree.target(0)",
        MULTI_STEP,
        (True, False),
    ),
    "a row with nothing left stands": ("self.share *= 0", "self.share *= 1", TRAVERSAL, (True, False)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_broken_rules_are_lossy(mutant):
    line, instead, names, replacements = MUTANTS[mutant]
    broken = rules(mutated((line, instead)))
    laws = [(Laws("target1", zeros=0), Laws("draft1", zeros=0)), (Laws("target1"), Laws("draft1", zeros=0.5))]
    for name in names:
        for replacement in replacements:
            assert any(
                distance(broken[name], SHAPES[shape], *pair, replacement) > 0
                for shape in ("uneven", "three, then one")
                for pair in laws
            )


def test_mutation_itself_changes_nothing():
    same = rules(mutated(("self.share *= 0", "self.share *= 0")))
    for name in RULES:
        assert distance(same[name], SHAPES["uneven"], Laws("target1"), Laws("draft1"), False) == 0


@pytest.mark.parametrize("name", RULES)
def test_accepting_children_drawn_from_nothing_is_lossy(name):
    broken = rules(mutated((NOT_PASSED_OVER[0], f"                yield child, tree.one\n{NOT_PASSED_OVER[0]}")))
    target, draft = Laws("target1", zeros=0), Laws("draft1", zeros=0.6)
    assert distance(broken[name], SHAPES["one level"], target, draft, False, filler=0) > Fraction(1, 100)


@pytest.mark.parametrize("name", RULES)
def test_removing_tokens_drawn_with_replacement(name):
    """Lossy, unless duplicates are passed over: what stays was drawn without replacement, and is accepted less."""
    target, draft = Laws("target1", zeros=0), Laws("draft1", zeros=0)
    broken = rules(mutated(REMOVED_THOUGH_REPLACED, NOT_PASSED_OVER))[name]
    assert distance(broken, SHAPES["one level"], target, draft, True) > 0
    wasteful = rules(mutated(REMOVED_THOUGH_REPLACED))[name]
    assert distance(wasteful, SHAPES["one level"], target, draft, True) == 0
    trees = list(draw_trees(SHAPES["one level"], draft, True))
    accepted = [emitted(rule, trees, target, draft, True)[1] for rule in (wasteful, rules()[name])]
    assert accepted[0] < accepted[1]


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_laws_of_other_temperature_are_lossy(name, replacement):
    class Sharpened:
        def __getitem__(self, context):
            return draft[context] ** 2 / (draft[context] ** 2).sum()

    target, draft = Laws("target", zeros=0), Laws("draft", zeros=0)
    assert distance(rules()[name], SHAPES["uneven"], target, draft, replacement, told=Sharpened()) > Fraction(1, 100)


@REPLACEMENT
@pytest.mark.parametrize("shape", ["chain", "uneven"])
def test_breaking_off_at_the_first_failure_is_lossy(replacement, shape):
    def broken(tree, accept):
        """The same chances, but a node also needs all those above it to succeed."""
        shares, row = {}, 0
        tree_core.traversal(tree, lambda node, chance: bool(shares.update({node: chance})))
        taken = 0
        while taken is not None:
            taken = next((child for child in tree.children[row] if accept(child, shares.get(child, 0))), None)
            row = row if taken is None else taken + 1
        return tree_core.traversal(tree, lambda node, chance: node == row - 1)

    target, draft = Laws("target", zeros=0), Laws("draft", zeros=0)
    assert distance(broken, SHAPES[shape], target, draft, replacement) > Fraction(1, 100)


def test_expected_accepted_tokens():
    """Two children at each of two levels, laws at random: each step to the better rule pays."""
    totals = np.zeros(3, dtype=int).astype(object)
    for seed in range(4):
        target, draft = Laws(f"target{seed}", zeros=0), Laws(f"draft{seed}", zeros=0)
        totals += [
            emitted(rules()[name], draw_trees(SHAPES["binary"], draft, replacement), target, draft, replacement)[1]
            for name, replacement in [("multi-step", True), ("multi-step", False), ("traversal", False)]
        ]
    assert totals[0] < totals[1] < totals[2]


@REPLACEMENT
@pytest.mark.parametrize("shape", ["uneven", "three, then one", "chain"])
def test_traversal_accepts_no_fewer_tokens_than_multi_step(replacement, shape):
    for seed in range(3):
        target, draft = Laws(f"target{seed}"), Laws(f"draft{seed}")
        trees = list(draw_trees(SHAPES[shape], draft, replacement))
        multi_step = emitted(tree_core.multi_step, trees, target, draft, replacement)[1]
        assert emitted(tree_core.traversal, trees, target, draft, replacement)[1] >= multi_step
