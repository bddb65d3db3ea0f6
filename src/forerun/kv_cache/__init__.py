"""Keys and values of the committed tokens: pages of a pool, reserve, write, commit a path, roll back, share, free."""

from forerun.kv_cache.contiguous import ContiguousCache, bytes_per_page
from forerun.kv_cache.paged import PagedCache
from forerun.kv_cache.pool import PagePool
from forerun.kv_cache.sequence_cache import SequenceCache, Unpaged

__all__ = ["ContiguousCache", "PagePool", "PagedCache", "SequenceCache", "Unpaged", "bytes_per_page"]
