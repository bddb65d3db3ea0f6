"""The native library with each instruction set, and compilers that are shell scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forerun.kernels.cpu import compiler as compile_module
from forerun.kernels.cpu.compiler import SOURCES, find_compiler, library_path
from forerun.kernels.cpu.library import Library
from kernel_cases import SETS, using

COMPILES = 'printf library > "$out"'
HAS = ["avx512", "avx2", "portable"]
"""The instruction sets of the machine, and of its sources: the best first."""
HANGS = 'printf half > "$out"; sleep 60 & echo $! > "$log.pid"; wait'


@dataclass(frozen=True)
class Machine:
    """A folder of sources, and a compiler, in a FORERUN_HOME of its own.

    Attributes:
        compiler: the script that CXX names; it writes a line to `log` each time it compiles or links.
    """

    sources: Path
    home: Path
    compiler: Path
    log: Path

    def compiler_does(self, body: str, version: str = "fake 1.0") -> None:
        """Set what the compiler does. body: shell commands that find the file to write in $out."""
        self.compiler.write_text(
            f'#!/bin/sh\nlog={self.log}\n[ "$1" = --version ] && echo "{version}" && exit\necho "$@" >> $log\n'
            f'while [ "$1" != -o ]; do shift; done\nout=$2\n{body}\n'
        )

    def compiler_fails_with(self, name: str, how: str, version: str = "fake 1.0") -> None:
        """Have the compiler do `how` where it writes the file NAME, and compile the others."""
        self.compiler_does(f'case "$out" in */{name}) {how};; *) {COMPILES};; esac', version)

    def library(self, limit: float = 30, wait: float = 30, *, every: bool = False) -> Path:
        return library_path(self.sources, self.home / "prebuilt", limit, wait, every=every)

    def made(self) -> list[str]:
        """Return what the compiler was started for since the last call: sorted names of files."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        names = [Path(words[words.index("-o") + 1]).name for words in map(str.split, lines)]
        return sorted(names)

    def files(self) -> list[str]:
        """Return the names of all files in the folder of kernels, below folders too."""
        return sorted(path.name for path in (self.home / "kernels").rglob("*"))


def compiled_program(folder: Path, text: str, *flags: str) -> Path:
    """Return the path of a C++ program that may include the library's headers, or skip the test without a compiler.

    Raises:
        CompilationError: it does not compile.
    """
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = folder / "program.cpp"
    source.write_text(text)
    made = source.with_suffix("")
    arguments = ["-std=c++17", f"-I{SOURCES}", *flags, "-o", str(made), str(source)]
    for failure in compiler.outcomes({"program": arguments}, 120).values():
        raise failure
    return made


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine whose compiler only writes the word "library", and whose processor has `HAS`."""
    made = Machine(tmp_path / "csrc", tmp_path / "home", tmp_path / "compiler", tmp_path / "calls")
    (made.sources / "below").mkdir(parents=True)
    for name in ("forerun", "processor", *HAS):
        (made.sources / f"{name}.cpp").write_text(f"int {name};\n")
    (made.sources / "below" / "b.h").write_text("int b;\n")
    made.compiler_does(COMPILES)
    made.compiler.chmod(0o755)
    monkeypatch.setenv("FORERUN_HOME", str(made.home))
    monkeypatch.setenv("CXX", str(made.compiler))
    monkeypatch.delenv("FORERUN_INSTRUCTIONS", raising=False)
    monkeypatch.setattr(compile_module, "processor_instructions", lambda path: HAS)
    return made


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that removes the compiler."""

    def go() -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
        monkeypatch.setitem(sys.modules, "ziglang", None)

    assert os.environ["PATH"]
    return go


@pytest.fixture(params=SETS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    with using(request.param) as found:
        yield found
