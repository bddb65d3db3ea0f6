"""The machine's processor, with its instruction set and its cores, and its memory, bounded by cgroups and limits, which
glibc keeps after it was freed. Linux tells them in files; of macOS and Windows psutil and their own calls do."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from forerun.utils.deferred import DeferredModule

if TYPE_CHECKING:
    import winreg

    import psutil
else:
    winreg = DeferredModule("winreg")
    psutil = DeferredModule(
        "psutil"
    )  # what Linux tells in files is asked for without it, and so --help, which it slows

_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "Model Name", "cpu model")
_FEATURES = ("flags", "Features")
"""On x86 and on ARM."""
_SYSCTL = "/usr/sbin/sysctl"
_APPLE_NAME = "machdep.cpu.brand_string"
_APPLE_PERFORMANCE_CORES = "hw.perflevel0.physicalcpu"
_APPLE_FEATURES = {
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
}
_WINDOWS_PROCESSOR = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
_WINDOWS_FEATURES = {19: "asimd", 39: "avx", 40: "avx2", 41: "avx512f", 43: "asimddp"}
"""By the numbers of IsProcessorFeaturePresent."""


def model() -> str:
    """Return the processor's name, as the system reports it."""
    facts = _facts()
    names = [facts[key] for key in _NAMES if key in facts]
    return names[0] if names else platform.processor() or "unknown processor"


def features() -> tuple[str, ...]:
    """Return the instruction sets in Linux's words ("avx2", "asimd"), sorted, of those that matter here on macOS and
    Windows; empty if the system reports none."""
    facts = _facts()
    return tuple(sorted({word for key in _FEATURES for word in facts.get(key, "").split()}))


@cache
def _facts() -> dict[str, str]:
    """Read the system's facts about the first processor, by Linux's names; empty if it tells none."""
    if sys.platform == "darwin":
        return _apple_facts()
    if sys.platform == "win32":
        return _windows_facts()
    facts = {}
    with suppress(OSError), _CPUINFO.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            key, separator, value = line.partition(":")
            if not separator:
                break
            facts[key.strip()] = value.strip()
    return facts


def _apple_facts() -> dict[str, str]:
    told = _sysctl()
    names = {_NAMES[0]: told[_APPLE_NAME]} if _APPLE_NAME in told else {}
    return names | {_FEATURES[1]: " ".join(word for name, word in _APPLE_FEATURES.items() if told.get(name) == "1")}


@cache
def _sysctl() -> dict[str, str]:
    """Return what macOS tells of the processor, by name; empty elsewhere."""
    command = [_SYSCTL, _APPLE_NAME, _APPLE_PERFORMANCE_CORES, *_APPLE_FEATURES]
    try:  # it tells what it knows, and ends with an error for each name that it does not
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = (line.partition(":") for line in done.stdout.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _windows_facts() -> dict[str, str]:
    facts = dict[str, str]()
    if sys.platform == "win32":
        has = ctypes.windll.kernel32.IsProcessorFeaturePresent
        facts[_FEATURES[0]] = " ".join(word for number, word in _WINDOWS_FEATURES.items() if has(number))
        with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _WINDOWS_PROCESSOR) as key:
            facts[_NAMES[0]] = str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    return facts


def cores(root: Path = Path("/")) -> int:
    """Return the physical cores that this process may use: those of its processors, at most what a cgroup's quota of
    their time allows, at least 1. A system that does not tell which processors are one core counts each.

    root: of the file system that is read.
    """
    return _bounded(_num_cores(_usable(), root), root)


def performance_cores(root: Path = Path("/")) -> int:
    """Return how many of the `cores` compute as fast as the fastest, at least 1: a step ends with its last thread, so
    that efficiency cores beside them would hold it up. All, where the system does not tell them apart.

    root: of the file system that is read.
    """
    if sys.platform == "darwin":
        told = _sysctl().get(_APPLE_PERFORMANCE_CORES, "")
        return min(cores(root), int(told)) if told.isdecimal() and int(told) else cores(root)
    usable = _usable()
    return _bounded(_num_cores(_fast(usable, root) or usable, root), root)


def _usable() -> Collection[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    if sys.platform == "win32":
        return psutil.Process().cpu_affinity() or [0]
    return range(os.cpu_count() or 1)


def _num_cores(processors: Collection[int], root: Path) -> int:
    if sys.platform in ("darwin", "win32"):
        return min(len(processors), psutil.cpu_count(logical=False) or len(processors))
    folder = root / _PROCESSORS
    return len({_read(folder / f"cpu{index}/topology/thread_siblings_list") or str(index) for index in processors})


_PROCESSORS = "sys/devices/system/cpu"
_INTEL_PERFORMANCE_CORES = "sys/devices/cpu_core/cpus"
"""On hybrids alone; those of efficiency cores stand in cpu_atom."""


def _fast(processors: Collection[int], root: Path) -> list[int]:
    """Return the processors of performance cores; empty if Linux does not tell them apart.

    Of the capacities that it tells of ARM's (the fastest has 1024), efficiency cores have less than half of the most,
    and the kinds of performance cores, of which there may be one above the others, more.
    """
    if ranges := _ranges(_read(root / _INTEL_PERFORMANCE_CORES)):
        return [index for index in processors if any(index in each for each in ranges)]
    texts = {index: _read(root / _PROCESSORS / f"cpu{index}/cpu_capacity").strip() for index in processors}
    if not all(text.isdecimal() for text in texts.values()):
        return []
    capacities = {index: int(text) for index, text in texts.items()}
    most = max(capacities.values(), default=0)
    return [index for index, capacity in capacities.items() if 2 * capacity >= most]


def _ranges(text: str) -> list[range]:
    """Read Linux's list of processors ("0-7,12"); empty if it is none."""
    ends = [part.partition("-")[::2] for part in text.strip().split(",")]
    if not all(first.isdecimal() and (last or first).isdecimal() for first, last in ends):
        return []
    return [range(int(first), int(last or first) + 1) for first, last in ends]


def _bounded(count: int, root: Path) -> int:
    """Return a number of cores, at most what quotas allow, at least 1."""
    return max(1, min([count, *_quotas(root)]))


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
    return min([*limits, *(_meminfo(root, "MemTotal") or _of_system("total"))], default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that are free now without swapping; None if the system does not report it.

    root: of the file system that is read.
    """
    free = _meminfo(root, "MemAvailable") or _of_system("available")
    return min([*(max(0, limit - used) for limit, used in _limits(root)), *free], default=None)


def resident_memory() -> int:
    """Return the bytes of this process that are in memory."""
    return int(psutil.Process().memory_info().rss)


def _of_system(field: str) -> list[int]:
    """Return a number of bytes that the system tells of the whole machine; empty if it does not."""
    try:
        return [int(getattr(psutil.virtual_memory(), field))]
    except (OSError, RuntimeError, ValueError, NotImplementedError):  # it reads files that a sandbox may lack
        return []


def _meminfo(root: Path, name: str) -> list[int]:
    """Return a number of bytes that Linux tells; empty if it does not."""
    values = dict(line.partition(":")[::2] for line in _read(root / "proc/meminfo").splitlines())
    words = values.get(name, "").split()
    return [int(words[0]) * 1024] if len(words) == 2 and words[0].isdecimal() and words[1] == "kB" else []


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of the memory of this process's cgroup and of its ancestors, and of its address space, as far
    as they have a limit."""
    for folder, is_first in _cgroups(root, "memory"):
        yield from _limit(folder, *(_V1 if is_first else _V2))
    soft = _read(root / "proc/self/limits").partition("Max address space")[2].split()[:1]
    pages = _read(root / "proc/self/statm").split()[:1]
    if all(word.isdecimal() for word in soft + pages) and soft and pages:  # "unlimited": none
        yield int(soft[0]), int(pages[0]) * mmap.PAGESIZE


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
