"""The enumeration finds broken rules for drawn trees: the module's own source with one line changed."""

import inspect
from fractions import Fraction
from types import SimpleNamespace

import pytest

from forerun.verification import tree_rejection_math

from .enumeration import Distributions
from .tree_enumeration import REPLACEMENT, RULES, SHAPES, distance, draw_trees, emitted, rules


def mutated(*changes):
    """The module with some of its lines changed. changes: pairs of text that stands there once, and its replacement."""
    source = inspect.getsource(tree_rejection_math)
    for text, instead in changes:
        assert source.count(text) == 1
        source = source.replace(text, instead)
    namespace = {"__name__": tree_rejection_math.__name__}
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
    "share of the parent forgotten": ("min(self.share * ", "min(", TRAVERSAL, (True, False)),
    "share not carried into the residual": (
        "excess(self.share * draft_mass / target_mass",
        "excess(draft_mass / target_mass",
        TRAVERSAL,
        (True, False),
    ),
    "distribution not renormalised": ("draft_mass = _number(draft.sum())", "pass", BOTH, (False,)),
    "token not removed from the distribution": (
        "if not tree.replacement and child",
        "if False and child",
        BOTH,
        (False,),
    ),
    "distribution of another row": ("tree.draft(self._row)", "tree.draft(0)", BOTH, (True, False)),
    "order reversed": ("for child in children:", "for child in children[::-1]:", BOTH, (False,)),
    "bonus from the target's distribution": (
        "else self._target",
        "else self._tree.target(self._row)",
        BOTH,
        (True, False),
    ),
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
    probs = [
        (Distributions("target1", zeros=0), Distributions("draft1", zeros=0)),
        (Distributions("target1"), Distributions("draft1", zeros=0.5)),
    ]
    for name in names:
        for replacement in replacements:
            assert any(
                distance(broken[name], SHAPES[shape], *pair, replacement) > 0
                for shape in ("uneven", "three, then one")
                for pair in probs
            )


def test_mutation_itself_changes_nothing():
    same = rules(mutated(("self.share *= 0", "self.share *= 0")))
    for name in RULES:
        assert distance(same[name], SHAPES["uneven"], Distributions("target1"), Distributions("draft1"), False) == 0


@pytest.mark.parametrize("name", RULES)
def test_accepting_children_drawn_from_nothing_is_lossy(name):
    broken = rules(mutated((NOT_PASSED_OVER[0], f"                yield child, tree.one\n{NOT_PASSED_OVER[0]}")))
    target, draft = Distributions("target1", zeros=0), Distributions("draft1", zeros=0.6)
    assert distance(broken[name], SHAPES["one level"], target, draft, False, filler=0) > Fraction(1, 100)


@pytest.mark.parametrize("name", RULES)
def test_removing_tokens_drawn_with_replacement(name):
    """Lossy, unless duplicates are passed over: what stays was drawn without replacement, and is accepted less."""
    target, draft = Distributions("target1", zeros=0), Distributions("draft1", zeros=0)
    broken = rules(mutated(REMOVED_THOUGH_REPLACED, NOT_PASSED_OVER))[name]
    assert distance(broken, SHAPES["one level"], target, draft, True) > 0
    wasteful = rules(mutated(REMOVED_THOUGH_REPLACED))[name]
    assert distance(wasteful, SHAPES["one level"], target, draft, True) == 0
    trees = list(draw_trees(SHAPES["one level"], draft, True))
    accepted = [emitted(rule, trees, target, draft, True)[1] for rule in (wasteful, rules()[name])]
    assert accepted[0] < accepted[1]


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_distribution_of_other_temperature_are_lossy(name, replacement):
    class Sharpened:
        def __getitem__(self, context):
            return draft[context] ** 2 / (draft[context] ** 2).sum()

    target, draft = Distributions("target", zeros=0), Distributions("draft", zeros=0)
    assert distance(rules()[name], SHAPES["uneven"], target, draft, replacement, told=Sharpened()) > Fraction(1, 100)


@REPLACEMENT
@pytest.mark.parametrize("shape", ["chain", "uneven"])
def test_breaking_off_at_the_first_failure_is_lossy(replacement, shape):
    def broken(tree, accept):
        """The same chances, but a node also needs all those above it to succeed."""
        shares, row = {}, 0
        tree_rejection_math.traversal(tree, lambda node, accept_prob: bool(shares.update({node: accept_prob})))
        taken = 0
        while taken is not None:
            taken = next((child for child in tree.children[row] if accept(child, shares.get(child, 0))), None)
            row = row if taken is None else taken + 1
        return tree_rejection_math.traversal(tree, lambda node, accept_prob: node == row - 1)

    target, draft = Distributions("target", zeros=0), Distributions("draft", zeros=0)
    assert distance(broken, SHAPES[shape], target, draft, replacement) > Fraction(1, 100)
