"""Several drafts for one sequence as one tree, and what became of each of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

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
    """Merge by token prefix; of the nodes the most valuable stay.

    Laws are dropped: a node that was drawn counts as chosen, which is exact for any tree that does not know the
    target's randomness.

    Args:
        parts: name and draft of each source.
        values: for each part the expected worth of its nodes, not rising from a node to its children.
        budget: nodes of the tree at most.
    """
    tokens = [part.token_ids.tolist() for _, part in parts]
    above = [part.parents.tolist() for _, part in parts]
    order = [
        (-value, number, node)
        for number, own in enumerate(values)
        for node, value in enumerate(own[: parts[number][1].num_candidates])
    ]
    token_ids: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    known: dict[tuple[int, int], int] = {}
    place: list[dict[int, int]] = [{-1: -1} for _ in parts]
    for _, number, node in sorted(order):
        parent = place[number].get(above[number][node])
        if parent is None:
            continue  # its parent did not stay
        key = parent, tokens[number][node]
        if key not in known:
            if len(token_ids) == budget:
                continue
            known[key] = len(token_ids)
            token_ids.append(key[1])
            parents.append(parent)
            sources.append(parts[number][0])
        place[number][node] = known[key]
    tree = Draft(
        torch.tensor(token_ids, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64), sources=tuple(sources)
    )
    return Merged(tree, [sorted((node, at) for node, at in own.items() if node >= 0) for own in place])


def kept(draft: Draft, nodes: Seq[int]) -> Draft:
    """A draft's nodes that stayed, as a draft of its own. nodes: ascending, closed under parents."""
    if list(nodes) == list(range(len(draft))):
        return draft
    index = {-1: -1} | {node: i for i, node in enumerate(nodes)}
    parents = [index[parent] for parent in draft.parents[list(nodes)].tolist()]
    return Draft(draft.token_ids[list(nodes)], torch.tensor(parents, dtype=torch.int64))


def agreement(draft: Draft, new_ids: Seq[int]) -> tuple[list[int], int]:
    """Where a draft, verified or not, agrees with what was committed.

    Returns:
        The nodes along the committed tokens, root to leaf; and how many of the draft's first nodes are judged by
        them: deeper ones than there are new tokens are not.
    """
    path: list[int] = []
    depths: list[int] = []
    judged = 0
    for node, (token_id, parent) in enumerate(zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True)):
        depth = depths[parent] + 1 if parent >= 0 else 0
        depths.append(depth)
        on_path = parent == (path[-1] if path else -1)
        if on_path and depth < len(new_ids) and token_id == new_ids[depth]:
            path.append(node)
        elif on_path and depth >= len(new_ids) and node < draft.num_candidates:
            break  # it would have been the next one, had the step gone on
        judged = node + 1
    return path, min(judged, draft.num_candidates)
