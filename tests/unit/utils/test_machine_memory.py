"""The memory that the machine has: what the system says, or a cgroup if that is less."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from forerun.errors import DeviceMemoryError, ModelLoadError, NotEnoughMemoryError
from forerun.utils.device import device_error
from forerun.utils.foreign_errors import as_load_errors
from forerun.utils.machine import available_memory, total_memory

MIB = 2**20


def write(root: Path, **files: object) -> Path:
    """Files by path, with __ for a slash and - for a dot in between."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 3000 MiB available."""
    return write(tmp_path, proc__meminfo=f"MemTotal: 8000000 kB\nMemAvailable:   {3000 * 1024} kB\nBuffers: 1 kB")


def group(folder: Path, names: tuple[str, str], limit: object, used: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (folder / name).write_text(f"{value}\n")


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def test_without_cgroups_it_is_what_the_system_says(root: Path) -> None:
    assert available_memory(root) == 3000 * MIB
    assert total_memory(root) == 8000000 * 1024


def test_a_cgroup_of_version_2_bounds_it(root: Path) -> None:
    write(root, proc__self__cgroup="0::/system/job")
    mount = root / "sys/fs/cgroup"
    group(mount / "system/job", V2, "max", 10 * MIB)
    assert available_memory(root) == 3000 * MIB
    group(mount / "system", V2, 500 * MIB, 400 * MIB, f"anon 7\ninactive_file {60 * MIB}\nactive_file {40 * MIB}")
    assert available_memory(root) == 200 * MIB and total_memory(root) == 500 * MIB
    group(mount / "system/job", V2, 50 * MIB, 60 * MIB)
    assert available_memory(root) == 0 and total_memory(root) == 50 * MIB


def test_a_cgroup_of_version_1_bounds_it(root: Path) -> None:
    write(root, proc__self__cgroup="11:cpu,cpuacct:/x\n4:memory:/of/the/host\n1:name=systemd:/x\n0::/")
    group(root / "sys/fs/cgroup/memory", V1, 900 * MIB, 300 * MIB, f"total_inactive_file {100 * MIB}")
    assert available_memory(root) == 700 * MIB and total_memory(root) == 900 * MIB


def test_a_limit_of_the_address_space_bounds_it(root: Path) -> None:
    limits = "Limit                     Soft Limit  Hard Limit  Units\nMax address space         {} unlimited  bytes"
    page = os.sysconf("SC_PAGE_SIZE")
    write(root, proc__self__statm=f"{100 * MIB // page} 5 5 5 0 5 0", proc__self__limits=limits.format(800 * MIB))
    assert available_memory(root) == 700 * MIB and total_memory(root) == 800 * MIB
    write(root, proc__self__limits=limits.format("unlimited"))
    assert available_memory(root) == 3000 * MIB


def test_a_limit_above_the_machine_s_memory_changes_nothing(root: Path) -> None:
    write(root, proc__self__cgroup="4:memory:/")
    group(root / "sys/fs/cgroup/memory", V1, 2**63 - 4096, 5)
    assert available_memory(root) == 3000 * MIB


@pytest.mark.parametrize("text", ["", "0", "0::", "nonsense\n:::\n0::/a/../b", "MemAvailable: many kB"])
def test_damaged_files_say_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, proc__meminfo=text, proc__self__cgroup=text)
    group(tmp_path / "sys/fs/cgroup", V2, "-3", 5)
    assert available_memory(tmp_path) is None or available_memory(tmp_path) > 0  # type: ignore[operator]


def test_a_system_without_files_about_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS and Windows."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * MIB, available=3 * MIB))
    assert available_memory(tmp_path) == 3 * MIB and total_memory(tmp_path) == 8 * MIB


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("no such call")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    assert available_memory(tmp_path) is None and total_memory(tmp_path) is None


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
)
def test_memory_that_the_system_refuses_is_not_the_file_s_fault(failure: Exception) -> None:
    said = r"^it: the system gives no more memory \(.*ulimit -v"
    with pytest.raises(NotEnoughMemoryError, match=said), as_load_errors("it", "Download it anew."):
        raise failure
    own = device_error(failure, torch.device("cpu"))
    assert isinstance(own, DeviceMemoryError)
    with pytest.raises(ModelLoadError, match=r"it: damaged\. Download"), as_load_errors("it", "Download it anew."):
        raise OSError("damaged")
