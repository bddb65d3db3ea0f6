"""Memory for packed weights, in pages of two megabytes where the system has them.

A step reads every weight once. In pages of four kilobytes the processor looks up an address for each of them, and in a
virtual machine each look-up is two.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_CHUNK = 1 << 25
"""Bytes that are mapped together. What is not written takes no memory."""
_ALIGNMENT = 64
"""Bytes: a line of the processor's cache."""

_lock = threading.Lock()
_chunk = torch.empty(0, dtype=torch.uint8)
_used = 0


def weight_memory(nbytes: int) -> Tensor:
    """[nbytes] uint8, not set, which begins at a line of the cache. A chunk of memory goes back to the system when all
    tensors in it are gone."""
    global _chunk, _used
    with _lock:
        start = -(-_used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > len(_chunk):
            chunk = _mapped(max(_CHUNK, nbytes))
            if nbytes >= _CHUNK:
                return chunk[:nbytes]
            _chunk, start = chunk, 0
        _used = start + nbytes
        return _chunk[start:_used]


def _mapped(nbytes: int) -> Tensor:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without such pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
