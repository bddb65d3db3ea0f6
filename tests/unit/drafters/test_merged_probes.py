"""Probes of a merged draft's parts: computed for their own drafter alone, never proposed, never judged."""

from __future__ import annotations

from doubles import parents_of, tokens_of, tree_draft
from forerun.drafters.hybrid.members import agreement, merge
from forerun.types import Draft


def test_probes_are_left_out_of_a_merged_tree() -> None:
    probed = tree_draft([1, 2, 8, 9], [-1, 0, 1, -1], num_candidates=2)
    other = tree_draft([1, 3], [-1, 0])
    merged = merge([("a", probed), ("b", other)], [[0.9, 0.8, 0.99, 0.99], [0.7, 0.6]], 8)
    assert tokens_of(merged.draft) == [1, 2, 3]
    assert parents_of(merged.draft) == [-1, 0, 0]
    assert merged.draft.num_candidates == 3
    assert merged.draft.sources == ("a", "a", "b")
    assert merged.kept_nodes == [[(0, 0), (1, 1)], [(0, 0), (1, 2)]]


def test_a_part_of_probes_alone_adds_nothing() -> None:
    window = tree_draft([7, 8], [-1, 0], num_candidates=0)
    merged = merge([("window", window), ("b", Draft.chain([1, 2]))], [[0.9, 0.9], [0.5, 0.4]], 8)
    assert tokens_of(merged.draft) == [1, 2] and merged.kept_nodes == [[], [(0, 0), (1, 1)]]
    assert len(merge([("window", window)], [[0.9, 0.9]], 8).draft) == 0


def test_probes_are_not_judged() -> None:
    """Check that a probe that agrees with committed tokens does not count for the draft's candidates."""
    probed = tree_draft([1, 2, 3], [-1, 0, 1], num_candidates=1)
    assert agreement(probed, [1, 2, 3, 4])[1] == 1
    assert agreement(probed, [5, 6])[1] == 1
    window = tree_draft([1, 2], [-1, 0], num_candidates=0)
    assert agreement(window, [1, 2])[1] == 0
