"""Whether a pool's account of its pages adds up: everything counted from the caches and the tree, and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from forerun.cache.prefix_tree import Page, PrefixTree
from forerun.errors import PoolIntegrityError


class Account(Protocol):
    """What a pool says of itself."""

    @property
    def num_pages(self) -> int | None: ...

    @property
    def num_taken(self) -> int: ...


def check_counts(
    pool: Account, tree: PrefixTree, free: Sequence[Page], held: Sequence[Sequence[Page]], num_unnamed: int
) -> None:
    """Raises PoolIntegrityError, which names what does not add up.

    Args:
        free: pages given back.
        held: of each cache that is alive.
        num_unnamed: of these, caches with pages that ought to have none.
    """
    published = tree.pages()
    holders = Counter(page for pages in held for page in pages)
    taken = {*published, *holders}
    idle = {page for page in published if not holders[page]}
    faults = {
        f"{num_unnamed} caches hold pages and ought to have been freed": num_unnamed > 0,
        f"{pool.num_taken} pages are said to be taken, and {len(taken)} are": pool.num_taken != len(taken),
        f"more than the {pool.num_pages} pages of the bound are there": pool.num_pages is not None
        and len(taken) + len(free) > max(pool.num_pages, len(taken)),
        "a page is free and taken": not taken.isdisjoint(free),
        "a page is free twice": len(set(free)) != len(free),
        "a cache holds a page twice": any(len(set(pages)) != len(pages) for pages in held),
        "a page is published twice": len(set(published)) != len(published),
        "the number of published pages is wrong": tree.num_pages != len(published),
        "a page has another number of holders than it says": any(page.holders != holders[page] for page in taken),
        "a free page has holders": any(page.holders or page.node for page in free),
        "the idle pages are not those that are published and not held": set(tree.idle) != idle,
        "a page lies elsewhere than its node says": any(
            node.page is None or node.page.node is not node for node in tree.nodes()
        ),
        "a page is held without the one before it": any(
            below.page is not None and node.page is not None and holders[below.page] > holders[node.page]
            for node in tree.nodes()
            for below in node.children.values()
        ),
        "an idle page is to be evicted before one below it": _is_out_of_order(tree),
    }
    found = [fault for fault, is_so in faults.items() if is_so]
    if found:
        raise PoolIntegrityError(f"The pool of pages is out of order: {'; '.join(found)}. This is a bug of forerun's.")


def _is_out_of_order(tree: PrefixTree) -> bool:
    place = {page: index for index, page in enumerate(tree.idle)}
    return any(
        place[node.page] < place[below.page]
        for node in tree.nodes()
        for below in node.children.values()
        if node.page in place and below.page in place
    )
