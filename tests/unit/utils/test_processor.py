"""What Linux tells of a processor, on x86 and on ARM, and of its cores; and where it tells nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.utils import machine as processor

X86 = "processor\t: 0\nmodel name\t: Some CPU: 2 GHz\nflags\t\t: fpu avx2 avx\n\nprocessor\t: 1\nmodel name\t: Other\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU architecture: 8\n"


@pytest.fixture(autouse=True)
def unread() -> Iterator[None]:
    """What was read of this machine is forgotten, before and after."""
    processor._facts.cache_clear()
    yield
    processor._facts.cache_clear()


@pytest.mark.parametrize(
    ("text", "model", "features"),
    [(X86, "Some CPU: 2 GHz", ("avx", "avx2", "fpu")), (ARM, None, ("asimd", "fp")), (None, None, ())],
)
def test_what_the_system_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, model: str | None, features: tuple[str, ...]
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(processor, "_CPUINFO", file)
    assert processor.features() == features
    assert processor.model() == model if model else processor.model()


def may_use(patch: pytest.MonkeyPatch, *processors: int) -> None:
    patch.setattr(os, "sched_getaffinity", lambda pid: set(processors), raising=False)


@pytest.mark.parametrize(
    ("usable", "count"),
    [((0, 1, 4, 5), 2), ((1, 5), 1), ((0, 5), 2), ((0, 8, 9), 3), (range(10), 6), ((3,), 1)],
)
def test_processors_of_one_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: tuple[int, ...], count: int
) -> None:
    """Four cores of two processors each, 0 and 4 to 3 and 7; 8 and 9 are efficiency cores."""
    for index in range(10):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{index}/topology"
        folder.mkdir(parents=True)
        siblings = f"{index % 4},{index % 4 + 4}" if index < 8 else str(index)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    may_use(monkeypatch, *usable)
    assert processor.cores(tmp_path) == count


V1, V2 = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",)


@pytest.mark.parametrize(
    ("cgroup", "folder", "names", "text", "count"),
    [
        ("0::/system/job", "system/job", V2, "250000 100000", 2),
        ("0::/system/job", "system", V2, "300000 100000", 3),  # of the one above
        ("0::/of/the/host", "", V2, "50000 100000", 1),  # half a processor
        ("0::/job", "job", V2, "max 100000", 8),
        ("0::/job", "job", V2, "1600000 100000", 8),
        ("0::/job", "job", V2, "nonsense", 8),
        ("4:cpu,cpuacct:/job\n0::/", "cpu/job", V1, "500000 100000", 5),
        ("4:cpu:/job", "cpu/job", V1, "-1 100000", 8),
        ("4:cpuset:/job", "cpu/job", V1, "100000 100000", 8),  # of another cgroup
    ],
)
def test_a_quota_bounds_the_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    folder: str,
    names: tuple[str, ...],
    text: str,
    count: int,
) -> None:
    """The system does not tell which processors are one core: each counts."""
    may_use(monkeypatch, *range(8))
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    for name, words in zip(names, [text] if names == V2 else text.split(), strict=True):
        (group / name).write_text(f"{words}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    assert processor.cores(tmp_path) == count


def test_a_system_without_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for known, count in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda known=known: known)
        assert processor.cores(tmp_path) == count
