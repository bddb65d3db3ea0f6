"""The best tree of a given size by measured acceptance probabilities, and their measurement.

Sequoia (2402.12374) finds the tree of a given size with the most expected accepted tokens by dynamic programming;
taking the node with the largest product of probabilities along its path, again and again, gives the same tree, and any
first part of it is the best tree of that smaller size.
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
    """A token that may follow a node.

    Attributes:
        accept_prob: that it is accepted if its parent is.
        token_id: the token.
        level: of the rates, where its trial will be counted.
        key: what its children are found by.
    """

    accept_prob: float
    token_id: int
    level: int
    key: Key


@dataclass(slots=True, eq=False)
class RankedTree(Tree):
    """A tree whose nodes' acceptance is estimated and measured.

    Attributes:
        levels: [n] level of each node in the rates, where its trial is counted; -1: it is not.
        accept_probs: [n] estimated probability that the node and all above it are accepted.
    """

    levels: list[int] = field(default_factory=list)
    accept_probs: list[float] = field(default_factory=list)

    def add(self, token_id: int, parent: int, level: int = 0, accept_prob: float = 0.0) -> int:
        """Append a node below `parent`; its index."""
        self.levels.append(level)
        self.accept_probs.append(accept_prob)
        return Tree.add(self, token_id, parent)

    def accept_prob(self, node: int) -> float:
        """Return the probability of a node, or 1 for ROOT."""
        return self.accept_probs[node] if node >= 0 else 1.0

    def ranked(self, nodes: Iterable[int]) -> list[int]:
        """Return nodes by falling probability; equal ones keep their order.

        Parents that come before their children stay before them, since no child's probability is above its parent's.
        """
        accept_probs = self.accept_probs
        return sorted(nodes, key=lambda node: -accept_probs[node])

    def part(self, nodes: Iterable[int]) -> RankedTree:
        """Return these nodes alone. nodes: parents before their children."""
        chosen = list(nodes)
        part = Tree.part(self, chosen)
        levels = self.levels
        accept_probs = self.accept_probs
        return RankedTree(
            part.token_ids, part.parents, [levels[node] for node in chosen], [accept_probs[node] for node in chosen]
        )

    def observe(self, rates: Rates, verdict: Verdict) -> None:
        """Count the trials: the children of the last committed token and of every accepted node.

        A trial succeeds if the node holds the token that was committed there. Where the output was cut at an accepted
        token, that one is next_token and not on the path.
        """
        ids = self.ids
        path = verdict.path
        committed = dict(zip([ROOT, *path], [*(ids[node] for node in path), verdict.next_token], strict=True))
        for node, parent in enumerate(self.parents):
            if parent in committed and self.levels[node] >= 0:
                rates.observe(self.levels[node], ids[node] == committed[parent])

    def observe_tokens(self, rates: Rates, token_ids: Seq[int]) -> None:
        """Count the trials by the tokens committed after the root, whoever proposed them; an empty list changes
        nothing."""
        if token_ids:
            path = self.follow(token_ids[:-1])
            self.observe(rates, Verdict(path, token_ids[len(path)]))


def best_tree(
    root: Key,
    children: Callable[[Key, int], Seq[Child[Key]]],
    max_nodes: int,
    max_depth: int,
    min_acceptance_prob: float = 0.0,
) -> RankedTree:
    """Return the tree of at most `max_nodes` nodes with the most expected accepted tokens.

    Args:
        root: key of the last committed token.
        children: of a key whose node has this depth (the root's is 0), by falling probability.
        max_depth: no node is deeper.
        min_acceptance_prob: nodes whose probability is not above it are left out.
    """
    tree = RankedTree()
    if max_depth <= 0:
        return tree
    # (-probability of the path, tie-break, parent, depth, probability of the parent's path, siblings, index among them)
    heap: list[tuple[float, int, int, int, float, Seq[Child[Key]], int]] = []
    pushed = 0

    def push(parent: int, depth: int, above: float, siblings: Seq[Child[Key]], index: int) -> None:
        nonlocal pushed
        if index < len(siblings) and (accept_prob := above * siblings[index].accept_prob) > min_acceptance_prob:
            pushed += 1
            heapq.heappush(heap, (-accept_prob, pushed, parent, depth, above, siblings, index))

    push(ROOT, 1, 1.0, children(root, 0), 0)
    while heap and len(tree) < max_nodes:
        accept_prob, _, parent, depth, above, siblings, index = heapq.heappop(heap)
        child = siblings[index]
        node = tree.add(child.token_id, parent, child.level, -accept_prob)
        push(parent, depth, above, siblings, index + 1)
        if depth < max_depth:
            push(node, depth + 1, -accept_prob, children(child.key, depth), 0)
    return tree
