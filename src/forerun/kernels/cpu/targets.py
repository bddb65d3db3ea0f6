"""The platforms for which wheels carry the native library, and Zig's compiler, which makes it for each of them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forerun.errors import ConfigError

_LIBRARIES = {"Darwin": "libforerun.dylib", "Windows": "forerun.dll"}


def library_name(system: str) -> str:
    """Return the name of the library's file. system: as Python's `platform` names it."""
    return _LIBRARIES.get(system, "libforerun.so")


@dataclass(frozen=True, slots=True)
class Target:
    """A platform.

    Attributes:
        system, machine: as Python's `platform` names them there.
        triple: as Zig names it, with the oldest system that is to run the library. With a triple, Zig compiles for any
            processor of the architecture; without, for this machine's alone.
        tag: of its wheels, `py3-none-TAG`.
    """

    system: str
    machine: str
    triple: str
    tag: str

    @property
    def name(self) -> str:
        """Return the name that FORERUN_TARGET has for it."""
        return f"{self.system}-{self.machine}".lower()


TARGETS = (
    Target("Linux", "x86_64", "x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    Target("Linux", "aarch64", "aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    Target("Darwin", "arm64", "aarch64-macos.11.0", "macosx_11_0_arm64"),
    Target("Windows", "AMD64", "x86_64-windows-gnu", "win_amd64"),
)
"""Those for which torch has wheels: none for macOS on x86-64."""


def find_target(name: str) -> Target:
    """Return the target of that name, as linux-x86_64. Raises ConfigError."""
    for target in TARGETS:
        if target.name == name:
            return target
    names = ", ".join(target.name for target in TARGETS)
    raise ConfigError(f"FORERUN_TARGET is {name!r}, but wheels are made for {names}. Give one of these, or unset it.")


def zig_commands() -> list[list[str]]:
    """Return how the installed package `ziglang` compiles C++ for this machine, if it is there: one command or none."""
    here = (platform.system(), platform.machine())
    found = find_spec("ziglang")
    if found is None or found.origin is None:
        return []
    zig = str(Path(found.origin).parent / "zig")
    return [[zig, "c++", "-target", each.triple] for each in TARGETS if (each.system, each.machine) == here]
