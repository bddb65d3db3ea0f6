"""What Linux, macOS and Windows tell of a processor and of its cores; and where they tell nothing."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from forerun.utils import machine as processor

X86 = "processor\t: 0\nmodel name\t: Some CPU: 2 GHz\nflags\t\t: fpu avx2 avx\n\nprocessor\t: 1\nmodel name\t: Other\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU architecture: 8\n"


@pytest.fixture(autouse=True)
def unread() -> Iterator[None]:
    """What was read of this machine is forgotten, before and after."""
    forget()
    yield
    forget()


def forget() -> None:
    processor._facts.cache_clear()
    processor._sysctl.cache_clear()


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


def machine(root: Path, topology: dict[int, str], capacities: dict[int, int] | None = None, intel: str = "") -> Path:
    """A tree of /sys: by processor its siblings, and its capacity; the list of performance cores."""
    for index, siblings in topology.items():
        folder = root / f"sys/devices/system/cpu/cpu{index}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology/thread_siblings_list").write_text(f"{siblings}\n")
        if capacities and index in capacities:
            (folder / "cpu_capacity").write_text(f"{capacities[index]}\n")
    if intel:
        (root / "sys/devices/cpu_core").mkdir()
        (root / "sys/devices/cpu_core/cpus").write_text(f"{intel}\n")
    return root


ALONE = {index: str(index) for index in range(8)}
I5_1240P = {index: f"{index // 2 * 2}-{index // 2 * 2 + 1}" if index < 8 else str(index) for index in range(16)}
"""Four performance cores of two processors each, and eight efficiency cores."""
RK3588 = dict.fromkeys(range(4), 414) | dict.fromkeys(range(4, 8), 1024)
SNAPDRAGON_865 = dict.fromkeys(range(4), 284) | dict.fromkeys(range(4, 7), 871) | {7: 1024}
M1 = dict.fromkeys(range(4), 459) | dict.fromkeys(range(4, 8), 1024)
GRAVITON = dict.fromkeys(range(8), 1024)


@pytest.mark.parametrize(
    ("topology", "capacities", "intel", "usable", "all_cores", "fast"),
    [
        (I5_1240P, None, "0-7", range(16), 12, 4),
        (I5_1240P, None, "0-7", range(4, 16), 10, 2),
        (I5_1240P, None, "0-7", range(8, 16), 8, 8),  # efficiency cores alone
        (I5_1240P, None, "0,2-3,9", (0, 1, 2, 9, 10), 4, 3),
        (I5_1240P, None, "all", range(16), 12, 12),  # no list
        (ALONE, RK3588, "", range(8), 8, 4),
        (ALONE, RK3588, "", range(4), 4, 4),
        (ALONE, SNAPDRAGON_865, "", range(8), 8, 4),  # the fastest of its kind is not alone
        (ALONE, M1, "", range(8), 8, 4),
        (ALONE, GRAVITON, "", range(8), 8, 8),
        (ALONE, {0: 1024}, "", range(8), 8, 8),  # of one alone
        (ALONE, None, "", range(8), 8, 8),
    ],
)
def test_performance_cores_of_linux(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    topology: dict[int, str],
    capacities: dict[int, int] | None,
    intel: str,
    usable: range,
    all_cores: int,
    fast: int,
) -> None:
    may_use(monkeypatch, *usable)
    root = machine(tmp_path, topology, capacities, intel)
    assert (processor.cores(root), processor.performance_cores(root)) == (all_cores, fast)


def test_a_quota_bounds_performance_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_use(monkeypatch, *range(16))
    root = machine(tmp_path, I5_1240P, intel="0-7")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("600000 100000\n")
    assert (processor.cores(root), processor.performance_cores(root)) == (6, 4)
    (root / "sys/fs/cgroup/cpu.max").write_text("300000 100000\n")
    assert (processor.cores(root), processor.performance_cores(root)) == (3, 3)


APPLE = """machdep.cpu.brand_string: Apple M2
hw.perflevel0.physicalcpu: 4
hw.optional.AdvSIMD: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_BF16: 0
hw.optional.arm.FEAT_I8MM: 1
"""


def test_what_macos_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sysctl"
    program.write_text(f"#!/bin/sh\necho '{APPLE}'\necho unknown oid >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(processor, "_SYSCTL", str(program))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None if logical else 8)
    assert processor.model() == "Apple M2"
    assert processor.features() == ("asimd", "asimddp", "asimdhp", "i8mm")
    assert (processor.cores(tmp_path), processor.performance_cores(tmp_path)) == (8, 4)
    monkeypatch.setattr(processor, "_SYSCTL", str(tmp_path / "none"))
    forget()
    assert (processor.cores(tmp_path), processor.performance_cores(tmp_path)) == (8, 8)
    assert processor.features() == () and processor.model()


def test_what_windows_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {r"HARDWARE\DESCRIPTION\System\CentralProcessor\0": {"ProcessorNameString": ("Some CPU @ 2 GHz  ", 1)}}
    registry = SimpleNamespace(
        HKEY_LOCAL_MACHINE=None,
        OpenKey=lambda _, name: nullcontext(keys[name]),
        QueryValueEx=lambda key, name: key[name],
    )
    kernel = SimpleNamespace(IsProcessorFeaturePresent=lambda number: number in (39, 40))
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setitem(sys.modules, "winreg", registry)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None if logical else 6)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: list(range(12)), raising=False)
    assert processor.model() == "Some CPU @ 2 GHz" and processor.features() == ("avx", "avx2")
    assert (processor.cores(tmp_path), processor.performance_cores(tmp_path)) == (6, 6)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 1])
    assert (processor.cores(tmp_path), processor.performance_cores(tmp_path)) == (2, 2)
