"""Keys and values of the committed tokens: reserve, commit a path, roll back, free."""

from forerun.cache.sequence_cache import SequenceCache

__all__ = ["SequenceCache"]
