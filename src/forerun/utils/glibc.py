"""Functions of the C library that allocates memory, where it is glibc."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def glibc_function(name: str) -> Callable[..., int] | None:
    """Return a function of glibc, of whole numbers; None with another C library."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, TypeError, AttributeError):
        return None
    return found


def return_freed_memory() -> None:
    """Return memory that was freed to the system: glibc keeps blocks of up to 32 MB once one has been freed, and what
    lies between others for good. Blocks for milliseconds."""
    trim = glibc_function("malloc_trim")
    if trim is not None:
        trim(0)
