"""Whether a pool's counts agree with its pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from forerun.kv_cache.page_pool import PagePool
from forerun.kv_cache.prefix_tree import Page, PrefixTree


def check_integrity(pool: Any, caches: Iterable[Any] = ()) -> None:
    """Count everything in a pool, and compare. caches: all that may hold pages now."""
    if not isinstance(pool, PagePool):  # a fake one, which counts in its own way
        pool.check_integrity(caches)
        return
    with pool._lock:
        pool._collect()
        named = {id(cache) for cache in caches}
        unnamed = [cache for cache in pool._caches if cache.held and id(cache) not in named]
        held = [cache.held for cache in pool._caches]
        _check_counts(pool.num_pages, pool.num_taken, pool._tree, pool._free, held, len(unnamed))


def _check_counts(
    num_pages: int | None,
    num_taken: int,
    tree: PrefixTree,
    free: Sequence[Page],
    held: Sequence[Sequence[Page]],
    num_unnamed: int,
) -> None:
    published = tree.pages()
    holders = Counter(page for pages in held for page in pages)
    taken = {*published, *holders}
    idle = {page for page in published if not holders[page]}
    order = {page: index for index, page in enumerate(tree.idle)}
    faults = {
        f"{num_unnamed} caches hold pages and ought to have been freed": num_unnamed > 0,
        f"{num_taken} pages are said to be taken, and {len(taken)} are": num_taken != len(taken),
        f"more than the {num_pages} pages of the bound are there": num_pages is not None
        and len(taken) + len(free) > max(num_pages, len(taken)),
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
        "an idle page is to be evicted before one below it": any(
            order[node.page] < order[below.page]
            for node in tree.nodes()
            for below in node.children.values()
            if node.page in order and below.page in order
        ),
    }
    found = [fault for fault, is_so in faults.items() if is_so]
    assert not found, "; ".join(found)
