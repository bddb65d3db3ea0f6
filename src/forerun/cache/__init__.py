"""Keys and values of the committed tokens: pages of a pool, reserve, write, commit a path, roll back, share, free."""

from forerun.cache.contiguous_cache import ContiguousCache, bytes_per_page
from forerun.cache.page_pool import PagePool
from forerun.cache.paged_cache import PagedCache
from forerun.cache.sequence_cache import SequenceCache
from forerun.cache.unpaged import Unpaged

__all__ = ["ContiguousCache", "PagePool", "PagedCache", "SequenceCache", "Unpaged", "bytes_per_page"]
