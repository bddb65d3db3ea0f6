"""The best tree within a budget, from chances that were measured, and the measuring.

Sequoia (2402.12374) finds the tree of a given size with the most expected accepted tokens by dynamic programming;
taking the node with the largest product of chances along its path, again and again, gives the same tree, and any first
part of it is the best tree of that smaller size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from forerun.speculation import Rates
from forerun.types import Verdict
from forerun.utils.tree import ROOT, Tree

Key = TypeVar("Key")


class Child(NamedTuple, Generic[Key]):
    """A token that may stand below a node.

    Attributes:
        chance: that it is accepted if its parent is.
        token_id: the token.
        level: of the rates, where its trial will be counted.
        key: what its children are found by.
    """

    chance: float
    token_id: int
    level: int
    key: Key


@dataclass(slots=True, eq=False)
class RankedTree(Tree):
    """A tree whose nodes' acceptance is estimated and measured.

    Attributes:
        levels: [n] level of each node in the rates, where its trial is counted.
        chances: [n] estimated chance that the node and all above it are accepted.
    """

    levels: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def add(self, token_id: int, parent: int, level: int = 0, chance: float = 0.0) -> int:
        """Append a node below `parent`; its index."""
        self.levels.append(level)
        self.chances.append(chance)
        return Tree.add(self, token_id, parent)

    def chance(self, node: int) -> float:
        """Of a node or ROOT, which is certain."""
        return self.chances[node] if node >= 0 else 1.0

    def ranked(self, nodes: Iterable[int]) -> list[int]:
        """Nodes by falling chance; of equal ones the order stays.

        Parents that come before their children stay before them, since no child's chance is above its parent's.
        """
        chances = self.chances
        return sorted(nodes, key=lambda node: -chances[node])

    def part(self, nodes: Iterable[int]) -> RankedTree:
        """These nodes alone. nodes: parents before their children."""
        chosen = list(nodes)
        part = Tree.part(self, chosen)
        levels, chances = self.levels, self.chances
        return RankedTree(
            part.token_ids, part.parents, [levels[node] for node in chosen], [chances[node] for node in chosen]
        )

    def observe(self, rates: Rates, verdict: Verdict) -> None:
        """Count the trials: the children of the last committed token and of every accepted node.

        A trial succeeds if the node holds the token that was committed there. Where the output was cut at an accepted
        token, that one is next_token and not on the path.
        """
        ids, path = self.ids, verdict.path
        committed = dict(zip([ROOT, *path], [*(ids[node] for node in path), verdict.next_token], strict=True))
        for node, parent in enumerate(self.parents):
            if parent in committed:
                rates.observe(self.levels[node], ids[node] == committed[parent])

    def observe_tokens(self, rates: Rates, token_ids: Seq[int]) -> None:
        """`observe` from the tokens committed after the root, whoever proposed them; none say nothing."""
        if token_ids:
            path = self.follow(token_ids[:-1])
            self.observe(rates, Verdict(path, token_ids[len(path)]))


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

    push(ROOT, 1, 1.0, children(root, 0), 0)
    while heap and len(tree) < budget:
        chance, _, parent, depth, above, siblings, place = heapq.heappop(heap)
        child = siblings[place]
        node = tree.add(child.token_id, parent, child.level, -chance)
        push(parent, depth, above, siblings, place + 1)
        if depth < max_depth:
            push(node, depth + 1, -chance, children(child.key, depth), 0)
    return tree
