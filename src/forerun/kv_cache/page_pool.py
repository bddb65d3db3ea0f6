"""The pages of one model's caches: their bound, their holders, and the published ones (`types.Pool`)."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import Protocol
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from forerun.errors import ConfigError, OutOfPagesError
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kv_cache.prefix_tree import Node, Page, PrefixTree, tokens_of_page
from forerun.kv_cache.recurrent_state import Saved


class Holder(Protocol):
    """A cache that takes its pages from a pool.

    Attributes:
        held: its pages in order. The pool alone lengthens and shortens the list.
    """

    held: list[Page]


class PagePool:
    """A pool of pages on demand, up to a bound. Safe to use from any thread.

    A page is allocated when it is first needed. Without a bound, idle pages are taken before new ones are allocated.

    Args:
        page_nbytes: bytes of a page.
        new_page: allocates the memory of a page, of zeros; None: pages have none of their own (see `Page.content`).

    Attributes:
        num_pages: the bound; None without one.
        num_taken: pages that caches hold, or that are published.
        page_nbytes: bytes of a page.
        most_states: published pages that keep the state of recurrent layers after them; the one that was used least
            recently loses it first.
    """

    def __init__(self, page_nbytes: int, new_page: Callable[[], Tensor] | None = None) -> None:
        self.page_nbytes = page_nbytes
        self.num_pages: int | None = None
        self.num_taken = 0
        self._new_page = new_page
        self._tree = PrefixTree()
        self._free: list[Page] = []
        self.most_states = 16
        self._with_state: OrderedDict[Page, None] = OrderedDict()
        self._caches: WeakSet[Holder] = WeakSet()
        self._abandoned: deque[list[Page]] = deque()  # pages of caches that were forgotten and not freed
        self._lock = RLock()

    @property
    def num_published(self) -> int:
        """Return the number of pages that can be adopted."""
        return self._tree.num_pages

    @property
    def num_available(self) -> int:
        """Return the number of pages that can be taken, see `types.Pool.num_available`."""
        if self.num_pages is None:
            return sys.maxsize
        if self._abandoned:
            self._collect()
        return max(0, self.num_pages - self.num_taken + len(self._tree.idle))

    def limit(self, num_pages: int | None) -> None:
        """Set the bound, see `types.Pool.limit`."""
        self._collect()
        if num_pages is not None and num_pages < 1:
            raise ConfigError(f"a pool of {num_pages} pages is requested, but it must have at least one.")
        with self._lock:
            self.num_pages = num_pages
            while num_pages is not None and self.num_taken > num_pages and self._tree.idle:
                self._set_free(self._tree.evict())
            if num_pages is not None:
                del self._free[max(0, num_pages - self.num_taken) :]

    def forget(self) -> bool:
        """Drop the published pages that no cache holds, see `types.Pool.forget`."""
        with self._lock:
            self._collect()
            while self._tree.idle:
                self._set_free(self._tree.evict())
            return self._tree.num_pages == 0

    def register(self, cache: Holder) -> None:
        """Register a cache that may take pages. If it is forgotten before it is freed, it gives them back then."""
        with self._lock:
            # not at once: a garbage collector may come in the middle of anything, the pool's work included
            finalize(cache, self._abandoned.append, cache.held).atexit = False
            self._caches.add(cache)

    @torch.inference_mode(False)
    def take(self, pages: list[Page], count: int) -> None:
        """Append `count` pages of zeros. Torch lets anyone write to them, taken within inference mode or not.

        Raises:
            OutOfPagesError: there are not as many. Nothing was changed.
        """
        with self._lock:
            if count > self.num_available:
                self.recount()
                if count > self.num_available:
                    raise OutOfPagesError(count, self.num_available, self.num_pages or 0)
            for _ in range(count):
                page = self._next()
                page.holders = 1
                pages.append(page)

    def share(self, pages: list[Page], held: Sequence[Page]) -> None:
        """Append these pages, which some cache holds already."""
        with self._lock:
            for page in held:
                page.holders += 1
                pages.append(page)

    def adopt(
        self, pages: list[Page], token_ids: Sequence[int], most: int, tenant: str | None, *, with_state: bool = False
    ) -> None:
        """Append the published pages that hold the first of these tokens, `most` of them at most.

        with_state: the last of them is to have the state of recurrent layers.
        """
        with self._lock:
            found = self._tree.longest(token_ids, most, tenant)
            while with_state and found and found[-1].state is None:
                found.pop()
            for page in found:
                self._add_holder(page)
                pages.append(page)
            if with_state and found:
                self._with_state.move_to_end(found[-1])

    def published(
        self, token_ids: Sequence[int], most: int, tenant: str | None
    ) -> list[tuple[Page, Node | None, Saved | None]]:
        """Return the published pages that hold the first of these tokens, `most` of them at most, with their nodes and
        states. Nobody holds them for the caller: a page is what it was as long as its node is the one returned."""
        with self._lock:
            return [(page, page.node, page.state) for page in self._tree.longest(token_ids, most, tenant)]

    def keep_states(self, pages: Sequence[Page], states: Mapping[int, Saved]) -> None:
        """Keep states of recurrent layers with published pages. states: by the positions before them."""
        with self._lock:
            for length, state in states.items():
                index = length // PAGE - 1
                if length % PAGE or not 0 <= index < len(pages) or pages[index].node is None:
                    continue
                pages[index].state = state
                self._with_state[pages[index]] = None
                self._with_state.move_to_end(pages[index])
            while len(self._with_state) > self.most_states:
                page, _ = self._with_state.popitem(last=False)
                page.state = None

    def publish(self, pages: list[Page], first: int, end: int, token_ids: Sequence[int], tenant: str | None) -> int:
        """Publish pages[first:end], after those before them, which are published.

        If another cache has published the same tokens, its page replaces this one in the list.

        Returns:
            How many pages from the start of the list are published now: fewer than `end` where some of them are
            published as another tenant's, or held by others too where another cache has published the same tokens.
        """
        with self._lock:
            parent = pages[first - 1].node if first else self._tree.roots.get(tenant) or Node(tenant)
            for index in range(first, end):
                page = pages[index]
                key = tokens_of_page(token_ids, index)
                if parent is None or parent.tenant != tenant:
                    return index
                found = parent.children.get(key)
                # another tenant's, or a fork's too: dropped here, it would still precede those below it
                if page.node is not found and (page.node is not None or page.holders > 1):
                    return index
                if found is None:
                    self._tree.add(parent, key, page)
                elif found.page is not None and found.page is not page:
                    self._add_holder(found.page)
                    pages[index] = found.page
                    self._drop_holder(page)
                parent = pages[index].node
            return end

    def give_back(self, pages: list[Page], keep: int = 0) -> None:
        """Take all but the first `keep` pages off the list: their holder reads and writes them no more."""
        with self._lock:
            while len(pages) > keep:
                self._drop_holder(pages.pop())

    def exchange(self, pages: list[Page], index: int, taken: list[Page]) -> None:
        """Replace the page at `index` by the one page of `taken`."""
        with self._lock:
            page = pages[index]
            pages[index] = taken.pop()
            self._drop_holder(page)

    def recount(self) -> None:
        """Count again what the caches hold, see `types.Pool.recount`. A page that neither a cache nor the tree has is
        dropped."""
        with self._lock:
            self._collect()
            published = self._tree.pages()
            held = [page for cache in self._caches for page in cache.held]
            for page in (*published, *held):
                page.holders = 0
            for page in held:
                page.holders += 1
            self._tree.mend()
            self.num_taken = len({*published, *held})

    def _collect(self) -> None:
        """Take back the pages of caches that were forgotten."""
        while self._abandoned:
            self.give_back(self._abandoned.popleft())

    def _next(self) -> Page:
        """Return a page that is not taken."""
        if self._free:
            page = self._free.pop()
        elif self._tree.idle and (self.num_pages is None or self.num_taken >= self.num_pages):
            page = self._tree.evict()
            self._forget_state(page)
            self.num_taken -= 1
        else:
            page = Page() if self._new_page is None else Page([self._new_page()])
            self.num_taken += 1
            return page
        self.num_taken += 1
        if self._new_page is None:
            page.content.clear()
        for numbers in page.content:
            numbers.zero_()  # a sequence that failed may have left NaN there
        return page

    def _add_holder(self, page: Page) -> None:
        page.holders += 1
        self._tree.idle.pop(page, None)

    def _drop_holder(self, page: Page) -> None:
        page.holders -= 1
        if page.holders == 0:
            if page.node is None:
                self._set_free(page)
            else:
                self._tree.idle[page] = None

    def _forget_state(self, page: Page) -> None:
        self._with_state.pop(page, None)
        page.state = None

    def _set_free(self, page: Page) -> None:
        self._forget_state(page)
        self.num_taken -= 1
        if self._new_page is None:
            page.content.clear()
        if self.num_pages is None or len(self._free) < self.num_pages - self.num_taken:
            self._free.append(page)
