"""The platform tag of a wheel with the native library, from the oldest systems that can load it."""

from __future__ import annotations

import platform
import re
import subprocess
import sysconfig
from pathlib import Path

from forerun.errors import NativeUnavailableError

_OLDEST = (2, 17)
"""Version of glibc below which no tag is given: older pips do not know other names for it."""
_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
"""Of glibc, as are those that begin with ld-linux."""
_GCC_LIBRARY = "libgcc_s.so.1"
_OLDEST_GCC = (4, 8)
"""Version of its symbols that every system of _OLDEST has."""


def platform_tag(library: Path) -> str:
    """Return the tag after `py3-none-`. On Linux it follows PEP 600, from the glibc symbol versions of the library.

    Raises:
        NativeUnavailableError: it needs a library beside those, or objdump cannot read it.
    """
    if platform.system() != "Linux":
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    try:
        done = subprocess.run(
            ["objdump", "-p", library], capture_output=True, text=True, timeout=60, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError) as failure:
        raise NativeUnavailableError(f"objdump cannot read {library}: {failure}.", "Install binutils.") from None
    major, minor = needed_glibc(done.stdout)
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def needed_glibc(headers: str) -> tuple[int, int]:
    """Return the newest glibc version of which the library needs a symbol, at least _OLDEST.

    Args:
        headers: what `objdump -p` prints of it.

    Raises:
        NativeUnavailableError: it needs a library beside glibc and GCC's own, or a newer one of the latter.
    """
    needed = re.findall(r"^\s*NEEDED\s+(\S+)", headers, flags=re.MULTILINE)
    others = [name for name in needed if name not in _LIBRARIES and not name.startswith("ld-linux")]
    if others == [_GCC_LIBRARY] and max(_versions("GCC", headers), default=_OLDEST_GCC) <= _OLDEST_GCC:
        others = []
    if others:
        raise NativeUnavailableError(f"The library needs {', '.join(others)}, beside glibc.", "Link it statically.")
    return max([_OLDEST, *_versions("GLIBC", headers)])


def _versions(name: str, headers: str) -> list[tuple[int, int]]:
    """Return the versions of the symbols that the library needs: `NAME_2.34` is (2, 34)."""
    found = re.findall(rf"\b{name}_(\d+)\.(\d+)", headers)
    return [(int(major), int(minor)) for major, minor in found]
