"""Several drafts for one sequence as one tree, and what became of each of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.tree import ROOT, Tree
from forerun.types import Draft


@dataclass(frozen=True, slots=True)
class Merged:
    """One tree from several drafts.

    Attributes:
        draft: the tree; chosen, whatever the parts were.
        places: for each part, for each of its nodes that stayed: (index in the part, index in the tree).
    """

    draft: Draft
    places: list[list[tuple[int, int]]]


def merge(parts: Seq[tuple[str, Draft]], values: Seq[Seq[float]], budget: int) -> Merged:
    """Merge by token prefix; the most probable nodes stay.

    Distributions are dropped: a node that was drawn counts as chosen, which is exact for any tree that does not know
    the target's randomness.

    Args:
        parts: name and draft of each source.
        values: for each part the chance that each of its nodes is accepted, not rising from a node to its children.
        budget: nodes of the tree at most.
    """
    tokens = [part.ids for _, part in parts]
    above = [part.parents for _, part in parts]
    order = [
        (-value, number, node)
        for number, chances in enumerate(values)
        for node, value in enumerate(chances[: parts[number][1].num_candidates])
    ]
    tree = Tree()
    sources: list[str] = []
    merged: dict[tuple[int, int], int] = {}
    place: list[dict[int, int]] = [{ROOT: ROOT} for _ in parts]
    for _, number, node in sorted(order):
        parent = place[number].get(above[number][node])
        if parent is None:
            continue  # its parent did not stay
        token_id = tokens[number][node]
        if (parent, token_id) not in merged:
            if len(tree) == budget:
                continue
            merged[parent, token_id] = tree.add(token_id, parent)
            sources.append(parts[number][0])
        place[number][node] = merged[parent, token_id]
    draft = Draft(tree.ids, tree.parents, sources=tuple(sources))
    return Merged(draft, [sorted((node, at) for node, at in each.items() if node >= 0) for each in place])


def kept(draft: Draft, nodes: Seq[int]) -> Draft:
    """A draft's nodes that stayed, as a draft. nodes: ascending, closed under parents."""
    if list(nodes) == list(range(len(draft))):
        return draft
    part = draft.part(nodes)
    return Draft(part.token_ids, part.parents)


def agreement(draft: Draft, new_ids: Seq[int]) -> tuple[list[int], int]:
    """Where a draft, verified or not, agrees with what was committed.

    Returns:
        The nodes along the committed tokens, root to leaf; and how many of the draft's first nodes are judged by
        them: deeper ones than there are new tokens are not.
    """
    path = draft.follow(new_ids)
    judged = draft.num_candidates
    if len(path) == len(new_ids):
        # a child of the last node would have been the next one, had the step gone on
        end = path[-1] if path else ROOT
        judged = next((node for node in range(judged) if draft.parents[node] == end), judged)
    return path, judged
