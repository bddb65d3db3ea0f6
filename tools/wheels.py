"""Check the native libraries in wheels (make release): what they export and need, without loading them.

python -m tools.wheels dist/*.whl
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from zipfile import ZipFile

import lief

from forerun.kernels.cpu.compiler import PREBUILT, SOURCES
from forerun.kernels.cpu.header import Header
from forerun.kernels.cpu.targets import TARGETS, Target, library_name

MAX_BYTES = 60 << 20
GLIBC = (2, 28)
"""The newest of which a library may need symbols."""
_SYSTEM_LIBRARIES = {
    "Linux": r"(libc|libm|libpthread|libdl|librt|ld-linux-[\w-]+)\.so\.\d",
    "Darwin": r"/usr/lib/libSystem\.B\.dylib",
    "Windows": r"(?i)(kernel32|ntdll|msvcrt|ucrtbase|api-ms-win-crt-[\w-]+)\.dll",
}
"""By system, what is everywhere on it; of C++, nothing."""


def faults_of_library(content: bytes, target: Target) -> list[str]:
    """Return what hinders a library from being loaded on a platform."""
    binary = lief.parse(content)
    if isinstance(binary, lief.MachO.Binary):
        own = lief.MachO.LoadCommand.TYPE.ID_DYLIB
        needed = [str(each.name) for each in binary.libraries if each.command != own]
    elif isinstance(binary, lief.ELF.Binary | lief.PE.Binary):
        needed = [str(each) for each in binary.libraries]
    else:
        return ["it is no library"]
    exported = {str(function.name).removeprefix("_") for function in binary.exported_functions}
    lacking = sorted({*Header.read(SOURCES / "forerun.h").functions} - exported)
    strange = [name for name in needed if not re.fullmatch(_SYSTEM_LIBRARIES[target.system], name)]
    faults = [f"it lacks {', '.join(lacking)}"] * bool(lacking) + [f"it needs {', '.join(strange)}"] * bool(strange)
    if isinstance(binary, lief.ELF.Binary):
        symbols = [str(each.name) for lib in binary.symbols_version_requirement for each in lib.get_auxiliary_symbols()]
        numbers = [re.match(r"GLIBC_(\d+)\.(\d+)", each) for each in symbols]
        versions = [(int(each[1]), int(each[2])) for each in numbers if each]
        if (newest := max(versions, default=GLIBC)) > GLIBC:
            faults.append(f"it needs glibc {newest[0]}.{newest[1]}")
    return faults


def faults_of_wheel(path: Path) -> list[str]:
    """Return what is wrong with a wheel for a platform; nothing of one for any."""
    size = path.stat().st_size
    faults = [f"{size} bytes are more than {MAX_BYTES}"] * (size >= MAX_BYTES)
    if path.stem.endswith("-any"):
        return faults
    targets = [target for target in TARGETS if path.stem.endswith(f"-py3-none-{target.tag}")]
    if not targets:
        return [*faults, "its tag is of no target"]
    with ZipFile(path) as archive:
        folder = "/".join(PREBUILT.parts[-4:])
        content = archive.read(f"{folder}/{library_name(targets[0].system)}")
    return faults + faults_of_library(content, targets[0])


def main(names: list[str]) -> None:
    """Print a line for each wheel. Raises SystemExit if one has a fault."""
    found = {name: faults_of_wheel(Path(name)) for name in names}
    for name, faults in found.items():
        print(f"{name}: {'; '.join(faults) or 'sound'}")
    if any(found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
