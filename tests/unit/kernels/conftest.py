"""The native library with each instruction set, and compilers that are shell scripts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forerun.config import INSTRUCTIONS
from forerun.kernels.cpu.compiler import library_path
from forerun.kernels.cpu.library import Library
from kernel_cases import using

COMPILES = 'printf library > "$out"'
HANGS = 'printf half > "$out"; sleep 60 & echo $! > "$log.pid"; wait'


@dataclass(frozen=True)
class Machine:
    """A folder of sources, and a compiler, in a FORERUN_HOME of its own.

    Attributes:
        compiler: the script that CXX names; it writes a line to `log` each time it compiles.
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

    def library(self, limit: float = 30, wait: float = 30) -> Path:
        return library_path(self.sources, self.home / "prebuilt", limit, wait)

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def files(self) -> list[str]:
        """Return the names of all files in the folder of kernels, below folders too."""
        return sorted(path.name for path in (self.home / "kernels").rglob("*"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine whose compiler only writes the word "library"."""
    made = Machine(tmp_path / "csrc", tmp_path / "home", tmp_path / "compiler", tmp_path / "calls")
    (made.sources / "below").mkdir(parents=True)
    (made.sources / "a.cpp").write_text("int a;\n")
    (made.sources / "below" / "b.h").write_text("int b;\n")
    made.compiler_does(COMPILES)
    made.compiler.chmod(0o755)
    monkeypatch.setenv("FORERUN_HOME", str(made.home))
    monkeypatch.setenv("CXX", str(made.compiler))
    return made


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that removes the compiler."""

    def go() -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))

    assert os.environ["PATH"]
    return go


@pytest.fixture(params=INSTRUCTIONS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    with using(request.param) as found:
        yield found
