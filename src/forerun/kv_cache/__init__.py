"""Keys and values of committed tokens, in pages of a pool: written, committed, rolled back, shared and freed."""

from forerun.kv_cache.page_pool import PagePool
from forerun.kv_cache.paged import PagedCache
from forerun.kv_cache.sequence_cache import SequenceCache, Unpaged

__all__ = ["PagePool", "PagedCache", "SequenceCache", "Unpaged"]
