"""The machine's processor, with its instruction set and its cores, and its memory, bounded by cgroups and limits, which
glibc keeps after it was freed."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "Model Name", "cpu model")
_FEATURES = ("flags", "Features")
"""On x86 and on ARM."""


def model() -> str:
    """Return the processor's name, as the system reports it."""
    facts = _facts()
    names = [facts[key] for key in _NAMES if key in facts]
    return names[0] if names else platform.processor() or "unknown processor"


def features() -> tuple[str, ...]:
    """Return the instruction sets in Linux's words ("avx2", "asimd"), sorted; empty if the system reports none."""
    facts = _facts()
    return tuple(sorted({word for key in _FEATURES for word in facts.get(key, "").split()}))


@cache
def _facts() -> dict[str, str]:
    """Read Linux's facts about the first processor; empty elsewhere."""
    facts = {}
    with suppress(OSError), _CPUINFO.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            key, separator, value = line.partition(":")
            if not separator:
                break
            facts[key.strip()] = value.strip()
    return facts


def cores(root: Path = Path("/")) -> int:
    """Return the physical cores that this process may use: those of its processors, at most what a cgroup's quota of
    their time allows, at least 1. A system that does not tell which processors are one core counts each.

    root: of the file system that is read.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    folder = root / "sys/devices/system/cpu"
    found = {_read(folder / f"cpu{index}/topology/thread_siblings_list") or str(index) for index in usable}
    return max(1, min([len(found), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Yield the whole processors of this process's cgroup and of its ancestors, as far as they have a quota."""
    for folder, _ in _cgroups(root, "cpu"):
        names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # of version 2, and of version 1
        words = " ".join(_read(folder / name) for name in names).split()
        if len(words) == 2 and all(word.isdecimal() for word in words):  # "max" or -1: none
            yield int(words[0]) // max(1, int(words[1]))


# A cgroup (of a container, a service or a job) bounds the memory of its processes together. Its file cache can be
# freed, and counts as available, as in MemAvailable of /proc/meminfo. A limit of the address space (ulimit -v) bounds
# what one process maps, whether it is written or not.

GIB = 2**30
MIB = 2**20
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("memory.max", "memory.current", "")
"""Of each version of cgroups which files hold limit and use, and how names in its statistics begin."""


def total_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory, at most what a cgroup or a limit allows; None if the system does not report it.

    root: of the file system that is read.
    """
    limits = [limit for limit, _ in _limits(root)]
    return min([*limits, *_some(_sysconf("SC_PHYS_PAGES"))], default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that are free now without swapping; None if the system does not report it.

    root: of the file system that is read.
    """
    free = _mem_available(root)
    if free is None:
        free = _sysconf("SC_AVPHYS_PAGES")
    return min([*(max(0, limit - used) for limit, used in _limits(root)), *_some(free)], default=None)


def resident_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of this process that are in memory; None if the system does not report it.

    root: of the file system that is read.
    """
    pages = _read(root / "proc/self/statm").split()[1:2]
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages and pages[0].isdecimal() else None


def _some(number: int | None) -> list[int]:
    return [] if number is None else [number]


def _sysconf(name: str) -> int | None:
    """Return the bytes of a count of pages; None if it is unknown."""
    try:
        count = os.sysconf(name)
        size = os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return count * size if count > 0 and size > 0 else None


def _mem_available(root: Path) -> int | None:
    values = dict(line.partition(":")[::2] for line in _read(root / "proc/meminfo").splitlines())
    words = values.get("MemAvailable", "").split()
    return int(words[0]) * 1024 if len(words) == 2 and words[0].isdecimal() and words[1] == "kB" else None


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of the memory of this process's cgroup and of its ancestors, and of its address space, as far
    as they have a limit."""
    for folder, is_first in _cgroups(root, "memory"):
        yield from _limit(folder, *(_V1 if is_first else _V2))
    soft = _read(root / "proc/self/limits").partition("Max address space")[2].split()[:1]
    pages = _read(root / "proc/self/statm").split()[:1]
    if all(word.isdecimal() for word in soft + pages) and soft and pages:  # "unlimited": none
        yield int(soft[0]), int(pages[0]) * os.sysconf("SC_PAGE_SIZE")


def _cgroups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's cgroup and of its ancestors, and whether they are of version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        # Inside a container the path may be that of the host; its own files lie at the mount then.
        cgroup = PurePosixPath("/", path)
        for folder in (cgroup, *cgroup.parents):
            yield mount / folder.relative_to("/"), bool(controllers)


def _limit(folder: Path, limit_file: str, use_file: str, prefix: str) -> Iterator[tuple[int, int]]:
    limit = _read(folder / limit_file).strip()
    used = _read(folder / use_file).strip()
    if limit.isdecimal() and used.isdecimal():  # "max": none
        stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
        files = [stat.get(f"{prefix}{kind}_file", "") for kind in ("inactive", "active")]
        yield int(limit), max(0, int(used) - sum(int(each) for each in files if each.isdecimal()))


def _read(path: Path) -> str:
    """Read a file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


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
