"""The effect of a grammar on drafts: tokens that it forces are proposed, tokens that it refuses are not verified.

Exactness does not depend on either. The decision on a drawn draft depends on the sequence's tokens alone, or
concerns nodes below one that the grammar refuses, which no rule accepts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.types import Draft, Sequence
from forerun.utils.tree import ROOT, Tree

SOURCE = "grammar"
"""The source of forced tokens, in statistics."""
_DRAFTER = "drafter"
"""Of the drafter's tokens beside them, where the drafter gives no name."""


def forced_tokens(sequences: Seq[Sequence], num_draft_tokens: Seq[int]) -> list[list[int]]:
    """Return [B] the tokens that each sequence's grammar forces, at most `num_draft_tokens` and those that fit."""
    return [
        [] if sequence.constraint is None or k == 0 else sequence.constraint.forced(sequence, min(k, sequence.room))
        for sequence, k in zip(sequences, num_draft_tokens, strict=True)
    ]


def with_grammar(sequence: Sequence, forced: Seq[int], draft: Draft, num_draft_tokens: int) -> Draft:
    """Combine the forced tokens with the drafter's that the grammar accepts.

    A draft that was drawn, or whose rows the drafter uses beside their acceptance, is not merged. A
    drawn draft is taken; otherwise, the longer of forced tokens and draft.

    Args:
        forced: tokens, at most `num_draft_tokens`.
        draft: the drafter's; empty if it was not called.
    """
    chain = Draft(list(forced), list(range(-1, len(forced) - 1)), sources=(SOURCE,) * len(forced))
    if not len(draft):
        return chain
    if draft.hidden is not None or draft.num_candidates < len(draft):
        depth = max(draft.depths[: draft.num_candidates], default=0)
        return chain if draft.probs is None and len(forced) > depth else draft
    draft = _viable(sequence, draft)
    if draft.probs is not None or not forced:
        return draft
    tree = Tree()
    tree.graft(forced, num_draft_tokens)
    sources = [SOURCE] * len(tree)
    merged = {ROOT: ROOT}
    children = {key: node for node, key in enumerate(zip(tree.parents, tree.ids, strict=True))}
    for node, (token_id, parent) in enumerate(zip(draft.ids, draft.parents, strict=True)):
        above = merged.get(parent)
        if above is None:
            continue
        found = children.get((above, token_id))
        if found is None:
            if len(tree) == num_draft_tokens:
                continue
            found = children[above, token_id] = tree.add(token_id, above)
            sources.append(draft.sources[node] if draft.sources else _DRAFTER)
        merged[node] = found
    return Draft(tree.ids, tree.parents, sources=tuple(sources))


def _viable(sequence: Sequence, draft: Draft) -> Draft:
    """Return the draft without nodes that the grammar refuses. Of a drawn draft they stay, without those below: their
    draw was looked at."""
    constraint = sequence.constraint
    assert constraint is not None
    viable = constraint.viable(sequence, draft)
    if all(viable):
        return draft
    if draft.probs is None:
        nodes = [node for node, possible in enumerate(viable) if possible]
    else:
        nodes = [node for node, parent in enumerate(draft.parents) if parent == ROOT or viable[parent]]
    return draft.part(nodes)
