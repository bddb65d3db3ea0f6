"""A rooted tree of tokens, as lists: drafters grow it, the target computes it in one forward, verifiers judge it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

ROOT = -1
"""Parent of the first tokens: what has been committed."""


@dataclass(slots=True, eq=False)
class Tree:
    """Tokens that may follow the committed ones. A chain is a tree of width one.

    Attributes:
        token_ids: [n], a list, or an int64 tensor on a device that has not been read yet.
        parents: [n], each below its own index; ROOT stands for the last committed token.
    """

    token_ids: Seq[int] | Tensor = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def ids(self) -> list[int]:
        """Return token_ids as a list. A tensor is read from its device at the first call, which waits for it."""
        if not isinstance(self.token_ids, list):
            self.token_ids = self.token_ids.tolist() if isinstance(self.token_ids, Tensor) else list(self.token_ids)
        return self.token_ids

    @property
    def depths(self) -> list[int]:
        """Return [n] depths, 1 for the children of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return depths

    @property
    def depth(self) -> int:
        """Return the depth of the deepest node; 0 for the empty tree."""
        return max(self.depths, default=0)

    @property
    def is_chain(self) -> bool:
        """Return whether every node's parent is the node before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def children(self) -> list[list[int]]:
        """Return [n + 1] the children of each row in order; row 0 is the root, row i + 1 stands for node i."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return children

    def add(self, token_id: int, parent: int) -> int:
        """Append a node below `parent`, and return its index."""
        self.ids.append(token_id)
        self.parents.append(parent)
        return len(self.parents) - 1

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from below the root to `node`; none for ROOT."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def paths(self) -> list[list[int]]:
        """Return [n] `path_to` every node."""
        paths: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            paths.append([*paths[parent], node] if parent >= 0 else [node])
        return paths

    def follow(self, token_ids: Seq[int]) -> list[int]:
        """Return the nodes, root to leaf, that hold these tokens one after the other, as far as there are any.

        Of siblings that hold the same token the first one is taken.
        """
        path: list[int] = []
        at = ROOT
        for node, (token_id, parent) in enumerate(zip(self.ids, self.parents, strict=True)):
            if parent == at and len(path) < len(token_ids) and token_id == token_ids[len(path)]:
                path.append(node)
                at = node
        return path

    def graft(self, token_ids: Seq[int], max_nodes: int | None = None) -> None:
        """Add a path from the root, sharing the beginning that is there already.

        max_nodes: of the whole tree; what would exceed it is left out.
        """
        path = self.follow(token_ids)
        node = path[-1] if path else ROOT
        for token_id in token_ids[len(path) :]:
            if len(self) == max_nodes:
                return
            node = self.add(token_id, node)

    def first_path(self) -> list[int]:
        """Return the nodes of the path that takes the first child everywhere."""
        path: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (path[-1] if path else ROOT):
                path.append(node)
        return path

    def part(self, nodes: Iterable[int]) -> Tree:
        """Return the tree of these nodes alone. nodes: parents before their children."""
        chosen = list(nodes)
        new_index = {ROOT: ROOT} | {node: i for i, node in enumerate(chosen)}
        ids = self.ids
        return Tree([ids[node] for node in chosen], [new_index[self.parents[node]] for node in chosen])
