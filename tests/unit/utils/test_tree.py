"""The rooted tree of tokens: paths, parts, and what is followed, shared and taken first."""

from __future__ import annotations

import pytest

from forerun.utils.tree import ROOT, Tree

#       root: 5, 6    below 5: 7, 8    below 6: 9    below 8: 3
TREE = ([5, 6, 7, 8, 9, 3], [-1, -1, 0, 0, 1, 3])


def test_what_a_tree_says_of_its_nodes() -> None:
    tree = Tree(*TREE)
    assert tree.depths == [1, 1, 2, 2, 2, 3] and tree.depth == 3 and Tree().depth == 0
    assert tree.children() == [[0, 1], [2, 3], [4], [], [5], [], []]
    assert tree.paths() == [tree.path_to(node) for node in range(6)] == [[0], [1], [0, 2], [0, 3], [1, 4], [0, 3, 5]]
    assert tree.path_to(ROOT) == []
    assert not tree.is_chain and tree.part([0, 3, 5]).is_chain and Tree().is_chain


@pytest.mark.parametrize(
    ("token_ids", "path"), [([], []), ([5, 8, 3, 1], [0, 3, 5]), ([6, 8], [1]), ([6, 9], [1, 4]), ([7], [])]
)
def test_following_tokens(token_ids: list[int], path: list[int]) -> None:
    assert Tree(*TREE).follow(token_ids) == path


def test_the_first_path() -> None:
    assert Tree(*TREE).first_path() == [0, 2]
    assert Tree([1, 2, 3, 4], [-1, 0, 0, 1]).first_path() == [0, 1, 3]
    assert Tree().first_path() == []


def test_a_graft_shares_the_beginning() -> None:
    tree = Tree()
    for path in ([1, 2, 3], [1, 2, 4], [1], [5, 2], []):
        tree.graft(path)
    assert (tree.ids, tree.parents) == ([1, 2, 3, 4, 5, 2], [-1, 0, 1, 1, -1, 4])
    tree.graft([1, 2, 9, 8, 7], 8)
    assert (tree.ids[6:], tree.parents[6:]) == ([9, 8], [1, 6])
    tree.graft([6], 8)
    assert len(tree) == 8


def test_a_part_keeps_the_order_given() -> None:
    part = Tree(*TREE).part([1, 0, 3])
    assert (part.ids, part.parents) == ([6, 5, 8], [-1, -1, 1])
