"""Fixed shapes of draft trees: which ranks of children get a node, from measured acceptance (Sequoia)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

from forerun.drafters.ranked_tree import Child, RankedTree, best_tree


def best_shape(rates: Seq[Seq[float]], num_nodes: int, max_depth: int, price: float = 0.0) -> RankedTree:
    """The shape with the most expected accepted tokens (Sequoia, 2402.12374).

    Args:
        rates: [depth][rank] chance that the child of this rank is the accepted one, given that its parent was
            accepted; row 0 is that of the last committed token's children, deeper nodes than there are rows have the
            last. A rank is never better than the ranks before it: where it was measured so, theirs is taken.
        num_nodes: nodes at most.
        max_depth: no node is deeper.
        price: nodes that are not accepted with a larger chance are left out.

    Returns:
        The tree in the order of its nodes' values; token_ids are ranks, levels count through `rates` row by row.
    """
    falling = [list(accumulate(row, min)) for row in rates]
    width = len(falling[0])
    children = [
        [Child(rate, rank, depth * width + rank, None) for rank, rate in enumerate(row)]
        for depth, row in enumerate(falling)
    ]
    return best_tree(None, lambda _, depth: children[min(depth, len(children) - 1)], num_nodes, max_depth, price)
