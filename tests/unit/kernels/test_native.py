"""The library is loaded once, as the environment variables select, and a warning says why it is unavailable."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.config import INSTRUCTIONS
from forerun.errors import ConfigError, NativeUnavailableError
from forerun.kernels import cpu as module
from forerun.kernels.cpu import compiler as compile_module
from forerun.kernels.cpu.compiler import choose_instructions
from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.platform_tag import needed_glibc, platform_tag

from .conftest import Machine

GONE = NativeUnavailableError("Why.", "What to do.")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the module to the state of a new process, without variables."""
    monkeypatch.setattr(module, "_loaded", None)
    monkeypatch.setattr(module, "_warned", False)
    for name in ("FORERUN_KERNELS", "FORERUN_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)


def answers(monkeypatch: pytest.MonkeyPatch, answer: object) -> list[Path]:
    """Put doubles in place of compiling and loading; returns the paths that were loaded, as they are loaded."""
    opened: list[Path] = []

    def path() -> Path:
        if isinstance(answer, Exception):
            raise answer
        return Path("library")

    def load(each: Path) -> Any:
        opened.append(each)
        return answer

    monkeypatch.setattr(compile_module, "library_path", path)
    monkeypatch.setattr(Library, "open", load)
    return opened


@pytest.mark.usefixtures("fresh")
def test_threads_load_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library, found = object(), []
    opened = answers(monkeypatch, library)
    threads = [threading.Thread(target=lambda: found.append(module.native()), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [library] * 8 and len(opened) == 1


@pytest.mark.usefixtures("fresh")
def test_one_line_says_what_is_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answers(monkeypatch, GONE)
    assert module.native() is module.native() is None
    [record] = caplog.records
    assert record.message == f"There are no native kernels. Why. {module.LOST} What to do."


@pytest.mark.usefixtures("fresh")
def test_the_user_decides(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    opened = answers(monkeypatch, object())
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    assert module.native() is None and not opened
    monkeypatch.setenv("FORERUN_KERNELS", "native")
    assert module.native() is not None
    monkeypatch.setenv("FORERUN_KERNELS", "fast")
    with pytest.raises(
        ConfigError, match="FORERUN_KERNELS is 'fast', but must be one of auto, native, triton, reference"
    ):
        module.native()
    monkeypatch.setattr(module, "_loaded", GONE)
    monkeypatch.setenv("FORERUN_KERNELS", "native")
    with pytest.raises(ConfigError, match=r"FORERUN_KERNELS is native, but .* Why\. What to do\."):
        module.native()
    assert not caplog.records


@pytest.mark.parametrize("best", INSTRUCTIONS)
@pytest.mark.parametrize("chosen", INSTRUCTIONS)
def test_an_instruction_set_that_is_forced(monkeypatch: pytest.MonkeyPatch, best: str, chosen: str) -> None:
    monkeypatch.setenv("FORERUN_INSTRUCTIONS", chosen)
    present = INSTRUCTIONS[INSTRUCTIONS.index(best) :]
    if chosen in present:
        assert choose_instructions(present) == [chosen]
    else:
        has = ", ".join(present)
        with pytest.raises(ConfigError, match=f"FORERUN_INSTRUCTIONS is '{chosen}', but this processor has only {has}"):
            choose_instructions(present)


def test_the_best_instruction_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_INSTRUCTIONS", "")
    assert choose_instructions(["avx512", "avx2", "portable"]) == ["avx512", "avx2", "portable"]
    monkeypatch.setenv("FORERUN_INSTRUCTIONS", "mmx")
    with pytest.raises(
        ConfigError,
        match="must be one of neoni8mm, neondotprod, neon, amx, avx512bf16, avx512, avxvnni, avx2, portable",
    ):
        choose_instructions(["portable"])


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "library").write_bytes(b"library")
    with pytest.raises(NativeUnavailableError, match=r"library cannot be loaded: .* Remove it"):
        Library.open(tmp_path / "library")


def test_a_folder_where_nothing_may_be_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library").write_bytes(b"library")
    told = SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)
    monkeypatch.setattr(os, "statvfs", lambda path: told if path == tmp_path / "library" else None)
    with pytest.raises(NativeUnavailableError, match=r"\(noexec\)\. Let the variable FORERUN_HOME name") as raised:
        Library.open(tmp_path / "library")
    assert "Remove" not in str(raised.value)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_a_library_of_another_interface(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    (machine.sources / "forerun.cpp").write_text('extern "C" { int forerun_abi() { return -1; } }\n')
    path = machine.library()
    with pytest.raises(NativeUnavailableError, match="has the interface -1, not "):
        Library.open(path)
    assert platform_tag(path).endswith(("_x86_64", "_aarch64", "_arm64"))


def test_the_library_of_these_sources(native_library: Library) -> None:
    assert native_library.instructions in native_library.supported
    assert native_library is module.native()


HEADERS = """
Dynamic Section:
  NEEDED               libm.so.6
  NEEDED               libc.so.6
  SONAME               libforerun.so

Version References:
  required from libm.so.6:
    0x09691a75 0x00 03 GLIBC_2.2.5
  required from libc.so.6:
    0x069691b4 0x00 02 GLIBC_{version}
"""


@pytest.mark.parametrize(("version", "expected"), [("2.34", (2, 34)), ("2.4", (2, 17)), ("2.9", (2, 17))])
def test_a_wheel_names_the_oldest_system_it_runs_on(version: str, expected: tuple[int, int]) -> None:
    assert needed_glibc(HEADERS.format(version=version)) == expected


def test_gcc_has_a_library_on_every_system() -> None:
    headers = "  NEEDED   libgcc_s.so.1\n" + HEADERS.format(version="2.34")
    assert needed_glibc(f"{headers}\n0x00 05 GCC_3.0\n0x00 06 GCC_4.2.0") == (2, 34)
    with pytest.raises(NativeUnavailableError, match=r"needs libgcc_s\.so\.1, beside glibc"):
        needed_glibc(f"{headers}\n0x00 05 GCC_12.0.0")


def test_a_wheel_needs_nothing_beside_the_c_library() -> None:
    with pytest.raises(NativeUnavailableError, match=r"needs libstdc\+\+\.so\.6, beside glibc"):
        needed_glibc("  NEEDED   libstdc++.so.6\n" + HEADERS)
