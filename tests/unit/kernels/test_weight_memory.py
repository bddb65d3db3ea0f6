"""Memory for packed weights, on systems with and without large pages."""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.errors import ModelLoadError
from forerun.kernels.cpu import linear as module
from forerun.kernels.cpu.linear import expert_memory, experts_in, weight_memory


class SmallPages(mmap.mmap):
    """Of a system whose kernel was made without large pages."""

    def madvise(self, *_: Any) -> None:
        raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("nbytes", [1, 100, 1 << 25, (1 << 25) + 1])
@pytest.mark.parametrize("has_large_pages", [True, False])
def test_each_has_bytes_of_its_own(nbytes: int, has_large_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_large_pages:
        monkeypatch.setattr(mmap, "mmap", SmallPages)
    monkeypatch.setattr(module, "_chunks", {})
    parts = [weight_memory(nbytes) for _ in range(3)]
    for number, part in enumerate(parts):
        assert len(part) == nbytes and part.data_ptr() % 64 == 0
        part[-1] = part[0] = number
    assert [int(part[0]) for part in parts] == [int(part[-1]) for part in parts] == [0, 1, 2]


def test_a_disk_that_is_full_is_seen_where_files_have_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS, writing to the map would end the process."""
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(module, "_chunks", {})
    with experts_in(tmp_path), expert_memory():
        assert len(weight_memory(100)) == 100
        monkeypatch.setattr(module, "_chunks", {})
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(ModelLoadError, match=r"No space left on device\. Free space there"):
            weight_memory(100)
