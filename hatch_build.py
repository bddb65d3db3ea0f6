"""With HATCH_BUILD_HOOKS_ENABLE=1 (`make wheel`): the wheel carries the native library, compiled for this platform.

With FORERUN_TARGET too, which names one of `targets.TARGETS`, for that, if CXX is Zig's compiler (`make release`).
Without, it carries the sources alone, and the library is compiled where they are used.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SRC = Path(__file__).parent / "src"
STATIC = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,--as-needed")
"""For Linux: link the used parts of the C++ library statically and hide them; GCC's own library is on every system."""
LIMIT = 3600.0
"""Seconds for Zig's compiler, which compiles its C++ library for the platform at first."""


class NativeLibrary(BuildHookInterface[Any]):
    """Compile the library and put it beside its sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sys.path.insert(0, str(SRC))
        from forerun.kernels.cpu.compiler import FACTS, INSTALL, LIBRARY, PREBUILT, compile_into, find_compiler
        from forerun.kernels.cpu.platform_tag import platform_tag
        from forerun.kernels.cpu.targets import find_target, library_name

        named = os.environ.get("FORERUN_TARGET")
        target = find_target(named) if named else None
        compiler = find_compiler()
        if compiler is None:
            raise SystemExit(f"A wheel with the native kernels needs a C++ compiler. {INSTALL}")
        self._folder = TemporaryDirectory(prefix="forerun-wheel-")
        built = Path(self._folder.name) / PREBUILT.name
        if target:
            compile_into(built, compiler, limit=LIMIT, extra=("-target", target.triple, "-g0"), target=target)
        else:
            compile_into(built, compiler, extra=STATIC if sys.platform == "linux" else ())
        library = library_name(target.system) if target else LIBRARY
        folder = PREBUILT.relative_to(SRC).as_posix()
        build_data["force_include"] |= {str(built / name): f"{folder}/{name}" for name in (library, FACTS)}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{target.tag if target else platform_tag(built / LIBRARY)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()
