"""The mathematics of rejection for trees drawn from known distributions, as `chain_rejection_math` for chains.

Everything here works on numpy arrays of any number type and on tensors: the tests enumerate this very code
with fractions and prove that it is exact.

Notation: p and q are the target's and the draft's distribution at a row of the tree (row 0 is the root, row i + 1
follows node i), and x_1, x_2, ... the row's children, drawn from q in this order: with replacement each from
q, without it each from what the draws before it left of q, renormalised. A rule decides by comparisons of
probabilities with uniform numbers, one comparison per node at most; where it ends, it leaves the weights that
the recovered or bonus token is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

from forerun.errors import UnsoundProbsError
from forerun.verification.chain_rejection_math import Array, excess

Accept: TypeAlias = Callable[[int, Any], bool]
"""(node, probability) -> whether the node's comparison succeeds, with this probability."""

_NOTHING = 1e-30
"""Mass at or below which an excess is one of rounding, or is reached with a probability as small."""


@dataclass(frozen=True, slots=True)
class DrawnTree(Generic[Array]):
    """One drawn tree and the distributions at its rows.

    Attributes:
        tokens: of each node.
        children: [rows] each row's nodes in the order in which they were drawn.
        target: row -> [V] the target's distribution; computed only where it is needed.
        draft: row -> [V] the distribution the row's children were drawn from.
        replacement: siblings were drawn with replacement.
        one: 1, in the number type to calculate with.
    """

    tokens: Seq[int]
    children: Seq[Seq[int]]
    target: Callable[[int], Array]
    draft: Callable[[int], Array]
    replacement: bool
    one: Any = 1.0


class Residual(Generic[Array]):
    """The remainder of the distributions at one row while its children are offered, in draw order, and rejected.

    Attributes:
        share: the weight of the target's distribution against the draft's: of the probability meant for this row,
            the part not yet given to the children that were offered. 1 at the root.
    """

    def __init__(self, tree: DrawnTree[Array], row: int, share: Any) -> None:
        self._tree: DrawnTree[Array] = tree
        self._row = row
        self.share = share
        self._target: Array | None = None

    @property
    def weights(self) -> Array:
        """Return [V] the target's distribution, less what was meant for the rejected children; not normalised."""
        return self._tree.target(self._row) if self._target is None else self._target

    def offers(self) -> Iterator[tuple[int, Any]]:
        """Yield each child with its probability, min(1, share * p(x) / q(x)); to take the next one is to reject the
        last.

        A child that q could not draw any more, since the same token was drawn before it, is passed over, as if it were
        not there: it carries no information about the others, and no probability of accepting it would be
        right.

        Raises:
            UnsoundProbsError: q itself gives a child nothing.
        """
        tree = self._tree
        children = tree.children[self._row]
        if not children:
            return
        target, draft = tree.target(self._row), tree.draft(self._row)
        target_mass = draft_mass = tree.one
        for child in children:
            token = tree.tokens[child]
            drawn = _number(draft[token])
            if not drawn > 0:
                if draft_mass is tree.one:
                    raise UnsoundProbsError
                continue
            yield child, min(self.share * _number(target[token]) * draft_mass / (drawn * target_mass), tree.one)
            left = excess(self.share * draft_mass / target_mass, target, draft)
            mass = _number(left.sum())
            if mass > _NOTHING * draft_mass:
                beyond = mass / draft_mass
                self.share = beyond / (beyond + (1 - self.share))
                self._target, target, target_mass = left, left, mass
            elif self.share < 1:
                self.share *= 0
                return  # no later child can be accepted, nor this row itself
            if not tree.replacement and child != children[-1]:
                draft = _without(draft, token)
                draft_mass = _number(draft.sum())


def traversal(tree: DrawnTree[Array], accept: Accept) -> tuple[int, Array]:
    """Verify by traversal (2505.12398): block verification of a tree, from the leaves to the root.

    The first node in post-order whose comparison succeeds is accepted, with its path. On a chain it is
    block verification.

    Returns:
        The row where the accepted path ends, and [V] the weights of the token that follows it.
    """
    found = _traverse(tree, accept, 0, tree.one)
    assert found is not None
    return found


def _traverse(tree: DrawnTree[Array], accept: Accept, row: int, share: Any) -> tuple[int, Array] | None:
    residual = Residual(tree, row, share)
    for child, accept_prob in residual.offers():
        found = _traverse(tree, accept, child + 1, accept_prob) if accept_prob > 0 else None
        if found is not None:
            return found
    # The root's share is 1 whatever was rejected: it needs no comparison.
    return (row, residual.weights) if row == 0 or accept(row - 1, residual.share) else None


def multi_step(tree: DrawnTree[Array], accept: Accept) -> tuple[int, Array]:
    """Verify by multi-step speculative sampling, from the root down: go to the first child that is accepted.

    With replacement SpecInfer (2305.09781), without it EAGLE (2401.15077) and Sequoia (2402.12374). On a
    chain it is token-level rejection. Returns as `traversal`.
    """
    row = 0
    while True:
        residual = Residual(tree, row, tree.one)
        taken = next((child for child, accept_prob in residual.offers() if accept(child, accept_prob)), None)
        if taken is None:
            return row, residual.weights
        row = taken + 1


def _without(distribution: Array, token: int) -> Array:
    """Return a copy of the distribution with nothing for the token; not renormalised."""
    left = distribution * 1
    left[token] = 0
    return left


def _number(value: Any) -> Any:
    """Return a scalar of numpy or torch as a Python number, which keeps its precision in further arithmetic."""
    return value.item() if hasattr(value, "item") else value
