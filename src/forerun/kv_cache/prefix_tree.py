"""A tree of the published pages, in which each page follows the tokens of the pages above it.

Pages that no cache holds are idle. They lie in the order in which they were last used, leaves before what is above
them: a cache that holds a page holds all pages above it, and gives pages back from the last to the first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forerun.kernels.cpu.page_layout import PAGE
from forerun.kv_cache.recurrent_state import Saved


@dataclass(slots=True, eq=False, repr=False)
class Page:
    """Memory for the keys and values of PAGE positions.

    Attributes:
        content: the numbers: as `PageLayout` says, or, of a published page of the PyTorch reference, one tensor for
            each shape. Nothing while a contiguous cache holds the page: its numbers lie in the cache.
        holders: caches that hold it.
        node: its node in the tree of published pages; None if it is not published.
        state: of a published page, the state of recurrent layers after its last position, if it was kept.
    """

    content: list[Tensor] = field(default_factory=list)
    holders: int = 0
    node: Node | None = None
    state: Saved | None = None


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A published page after those above it.

    Attributes:
        tenant: whose it is.
        key: the page's tokens; of a root, nothing.
        parent: the page before it, or the root; None for a root.
        page: None for a root.
        children: by their tokens. A look-up compares tokens, not only their hash.
    """

    tenant: str | None
    key: bytes = b""
    parent: Node | None = None
    page: Page | None = None
    children: dict[bytes, Node] = field(default_factory=dict)


class PrefixTree:
    """The published pages of one pool.

    Attributes:
        idle: those that no cache holds, the one to be evicted first in front.
        num_pages: all of them.
        roots: what a tenant's pages lie below, of tenants that have any.
    """

    def __init__(self) -> None:
        self.idle: OrderedDict[Page, None] = OrderedDict()
        self.num_pages = 0
        self.roots: dict[str | None, Node] = {}

    def longest(self, token_ids: Sequence[int], most: int, tenant: str | None) -> list[Page]:
        """Return the pages that hold the first of these tokens, `most` of them at most."""
        node = self.roots.get(tenant) or Node(tenant)
        pages: list[Page] = []
        while len(pages) < most and node.children:
            found = node.children.get(tokens_of_page(token_ids, len(pages)))
            if found is None or found.page is None:
                break
            node = found
            pages.append(found.page)
        return pages

    def add(self, parent: Node, key: bytes, page: Page) -> None:
        """Publish a page below another, or below a root."""
        if parent.page is None:
            self.roots[parent.tenant] = parent
        page.node = parent.children[key] = Node(parent.tenant, key, parent, page)
        self.num_pages += 1

    def evict(self) -> Page:
        """Remove the idle page that was not used for the longest time from the tree, and return it."""
        page, _ = self.idle.popitem(last=False)
        node = page.node
        assert node is not None
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.key]
        page.node = None
        self.num_pages -= 1
        if node.parent.page is None and not node.parent.children:
            self.roots.pop(node.tenant, None)
        return page

    def mend(self) -> None:
        """Repair the idle pages by the pages' holders, in another order where some were missing."""
        pages = self.pages()
        idle = {page for page in pages if page.holders == 0}
        for page in set(self.idle) - idle:
            del self.idle[page]
        if len(self.idle) < len(idle):
            self.idle = OrderedDict((page, None) for page in reversed(pages) if page in idle)
        self.num_pages = len(pages)

    def pages(self) -> list[Page]:
        """Return all published pages, each after those above it."""
        return [node.page for node in self.nodes() if node.page is not None]

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes of all published pages, each after those above it."""
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if node.page is not None:
                yield node


def tokens_of_page(token_ids: Sequence[int], index: int) -> bytes:
    """Return the tokens of the page of this index, as a key."""
    return array("q", token_ids[index * PAGE : (index + 1) * PAGE]).tobytes()
