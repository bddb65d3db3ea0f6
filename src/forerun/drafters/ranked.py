"""The best tree within a budget, from chances that were measured, and the measuring.

Sequoia (2402.12374) finds the tree of a given size with the most expected accepted tokens by dynamic programming;
taking the node with the largest product of chances along its path, again and again, gives the same tree, and any first
part of it is the best tree of that smaller size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from forerun.policy import Rates
from forerun.tree import Tree
from forerun.types import Verdict

Key = TypeVar("Key")


class Child(NamedTuple, Generic[Key]):
    """A token that may stand below a node.

    Attributes:
        chance: that it is accepted if its parent is.
        token_id: the token.
        level: of the rates, where its trial will be counted.
        key: what its own children are found by.
    """

    chance: float
    token_id: int
    level: int
    key: Key


@dataclass(slots=True, eq=False)
class RankedTree(Tree):
    """A tree in the order of its nodes' values.

    Attributes:
        levels: of each node, in the rates.
    """

    levels: list[int] = field(default_factory=list)

    def observe(self, rates: Rates, verdict: Verdict) -> None:
        """Count the trials: the children of the last committed token and of every accepted node."""
        reached, ids = {-1, *verdict.path}, self.ids
        for node, parent in enumerate(self.parents):
            if parent in reached:
                # where the output was cut at an accepted token, that one is next_token and not on the path
                rates.observe(self.levels[node], node in reached or ids[node] == verdict.next_token)


def best_tree(
    root: Key, children: Callable[[Key, int], Seq[Child[Key]]], budget: int, max_depth: int, price: float = 0.0
) -> RankedTree:
    """The tree of at most `budget` nodes with the largest sum of chances that a node and all above it are accepted.

    Args:
        root: key of the last committed token.
        children: of a key whose node has this depth (the root's is 0), by falling chance.
        max_depth: no node is deeper.
        price: nodes whose chance is not above it are left out.
    """
    tree = RankedTree()
    if max_depth <= 0:
        return tree
    # (-chance of the path, tie-break, parent, depth, chance of the parent's path, siblings, place among them)
    heap: list[tuple[float, int, int, int, float, Seq[Child[Key]], int]] = []
    pushed = 0

    def push(parent: int, depth: int, above: float, siblings: Seq[Child[Key]], place: int) -> None:
        nonlocal pushed
        if place < len(siblings) and (chance := above * siblings[place].chance) > price:
            pushed += 1
            heapq.heappush(heap, (-chance, pushed, parent, depth, above, siblings, place))

    push(-1, 1, 1.0, children(root, 0), 0)
    while heap and len(tree) < budget:
        chance, _, parent, depth, above, siblings, place = heapq.heappop(heap)
        child = siblings[place]
        node = tree.add(child.token_id, parent)
        tree.levels.append(child.level)
        push(parent, depth, above, siblings, place + 1)
        if depth < max_depth:
            push(node, depth + 1, -chance, children(child.key, depth), 0)
    return tree
