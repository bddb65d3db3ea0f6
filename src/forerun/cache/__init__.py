"""Keys and values of the committed tokens: reserve, write, commit a path, roll back, free."""

from forerun.cache.contiguous_cache import ContiguousCache
from forerun.cache.page_allocator import PageAllocator
from forerun.cache.paged_cache import PagedCache
from forerun.cache.sequence_cache import SequenceCache

__all__ = ["ContiguousCache", "PageAllocator", "PagedCache", "SequenceCache"]
