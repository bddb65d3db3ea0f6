"""Memory for packed weights."""

from __future__ import annotations

import mmap
from typing import NoReturn

import pytest

from forerun.kernels import weight_memory


class WithoutLargePages(mmap.mmap):
    """Memory of a kernel that was built without transparent large pages."""

    def madvise(self, *_: int) -> NoReturn:
        raise OSError(22, "Invalid argument")


def test_memory_is_had_where_there_are_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", WithoutLargePages)
    memory = weight_memory.weight_memory(1 << 26)
    memory[-1] = 7
    assert len(memory) == 1 << 26
    assert int(memory[-1]) == 7
