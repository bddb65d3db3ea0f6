"""The library is found or compiled once; every failure has a reason, and no partial file is used."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.errors import CompilationError, NativeUnavailableError
from forerun.kernels.cpu.compiler import FACTS, FLAGS, LIBRARY, compile_into, find_compiler, library_path
from forerun.utils import machine as processor
from forerun.utils.files import locked

from .conftest import COMPILES, HANGS, Machine

PROCESS = """if True:
    import sys
    from pathlib import Path
    from forerun.kernels.cpu.compiler import library_path
    print(library_path(Path(sys.argv[1]), Path(sys.argv[2]), 30, 30))
"""
LIMIT = 30


def process(machine: Machine) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(machine.sources), str(machine.home / "prebuilt")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; finished processes that were not waited for do not count."""
    told = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False, timeout=LIMIT
    )
    return bool(told.stdout.strip()) and not told.stdout.strip().startswith("Z")


def test_it_is_compiled_once_and_kept(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    path = machine.library()
    assert path == machine.library() and path.read_bytes() == b"library" and machine.calls == 1
    assert path.is_relative_to(machine.home / "kernels") and machine.files() == sorted(
        [path.parent.name, LIBRARY, FACTS]
    )
    assert [record.message for record in caplog.records] == ["Compiling the kernels, once: this can take some minutes."]
    arguments = machine.log.read_text().split()
    assert arguments[: len(FLAGS)] == list(FLAGS) and arguments[-1] == str(machine.sources / "a.cpp")
    assert "-ffp-contract=off" in FLAGS and not {"-march=native", "-ffast-math"} & set(FLAGS)


def test_the_key_holds_what_decides(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [machine.library().parent]
    (machine.sources / "below" / "b.h").write_text("int changed;\n")
    folders.append(machine.library().parent)
    (machine.sources / "below" / "b.h").rename(machine.sources / "below" / "c.h")
    folders.append(machine.library().parent)
    machine.compiler_does(COMPILES, version="fake 1.1")
    folders.append(machine.library().parent)
    monkeypatch.setattr(processor, "features", lambda: ("avx9",))
    folders.append(machine.library().parent)
    assert len(set(folders)) == len(folders) == machine.calls
    (machine.sources / "README").write_text("not compiled")
    assert machine.library().parent == folders[-1]


def test_without_a_compiler_what_is_there_serves(machine: Machine, no_compiler: Callable[[], None]) -> None:
    path = machine.library()
    no_compiler()
    assert machine.library() == path
    (machine.sources / "a.cpp").write_text("int newer;\n")
    with pytest.raises(NativeUnavailableError, match=r"There is no C\+\+ compiler\. Install g\+\+ "):
        machine.library()


@pytest.mark.parametrize("chosen", ["no-such-compiler", "no-such-compiler -x", "'g++"])
def test_a_compiler_that_is_named_must_be_there(machine: Machine, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("CXX", chosen)
    with pytest.raises(NativeUnavailableError, match=r"CXX is .* Correct it, or unset it"):
        machine.library()


def test_a_compiler_may_be_named_with_arguments(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"/usr/bin/env '{machine.compiler}'")
    assert machine.library().exists() and machine.calls == 1


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "echo warning: x; echo 'a.cpp:3:1: error: no such thing'; exit 1",
            "exit code 1: a.cpp:3:1: error: no such thing.",
        ),
        ("echo 'a.s: No space left on device'; exit 1", "No space left on device. Free disk space in"),
        ("kill -9 $$", "was ended by signal 9. Free memory"),
        ("exit 0", "has written no library."),
    ],
)
def test_a_compiler_that_fails_is_quoted(machine: Machine, body: str, told: str) -> None:
    machine.compiler_does(body)
    with pytest.raises(NativeUnavailableError) as raised:
        machine.library()
    assert told in str(raised.value)
    assert [Path(name).suffixes for name in machine.files()] == ([] if "No space" in told else [[".failed", ".json"]])


@pytest.mark.parametrize("body", ["echo 'a.cpp: error: x'; exit 1", "kill -9 $$", "exit 0", HANGS])
def test_a_compiler_that_failed_is_not_tried_again_until_it_is_said(machine: Machine, body: str) -> None:
    def failure(limit: float = LIMIT) -> str:
        with pytest.raises(CompilationError) as raised:
            machine.library(limit=limit)
        return str(raised.value)

    machine.compiler_does(body)
    told = failure(0.3 if body == HANGS else LIMIT)
    (file,) = (machine.home / "kernels").iterdir()
    assert told.endswith(f"This compiler is not tried again until {file} is removed.")
    machine.compiler_does(COMPILES)  # it would succeed
    assert failure() == failure() == told
    machine.compiler_does(COMPILES, version="fake 1.1")  # another compiler
    assert machine.library().exists()
    machine.compiler_does(COMPILES)
    assert failure() == told
    file.unlink()
    assert machine.library().exists() and not file.exists()


def test_what_has_no_room_or_no_compiler_is_looked_at_each_time(machine: Machine) -> None:
    machine.compiler_does("echo 'a.s: No space left on device'; exit 1")
    for calls in (1, 2):
        with pytest.raises(NativeUnavailableError, match="Free disk space"):
            machine.library()
        assert machine.calls == calls
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX")
        patch.setenv("PATH", "/nothing")
        with pytest.raises(NativeUnavailableError, match="no C"):
            machine.library()
    machine.compiler_does(COMPILES)
    assert machine.library().exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"reason": 1, "remedy": 2}'])
def test_a_note_of_a_failure_that_is_damaged_says_nothing(machine: Machine, content: bytes) -> None:
    machine.compiler_does("exit 1")
    with pytest.raises(CompilationError):
        machine.library()
    (file,) = (machine.home / "kernels").iterdir()
    file.write_bytes(content)
    machine.compiler_does(COMPILES)
    assert machine.library().exists()


def test_a_compiler_that_is_no_program(machine: Machine) -> None:
    machine.compiler.write_bytes(b"\x7fELF")
    with pytest.raises(NativeUnavailableError, match="cannot be run: Exec format error"):
        machine.library()
    machine.compiler.write_text("#!/bin/sh\necho nothing; exit 3\n")
    with pytest.raises(NativeUnavailableError, match="--version ended with exit code 3: nothing"):
        machine.library()


def test_no_room_for_temporary_files(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("forerun.kernels.cpu.compiler.TemporaryDirectory", fail)
    with pytest.raises(NativeUnavailableError, match=r"Temporary files .* No space left on device\. Free disk space"):
        machine.library()


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(machine: Machine) -> None:
    machine.compiler_does(HANGS)
    with pytest.raises(NativeUnavailableError, match=r"took longer than 0\.5 seconds, and was ended\. Try again"):
        machine.library(limit=0.5)
    assert [Path(name).suffixes for name in machine.files()] == [[".failed", ".json"]]
    child = int(Path(f"{machine.log}.pid").read_text())
    until(lambda: not is_alive(child))


def test_a_process_that_is_killed_leaves_nothing_that_is_used(machine: Machine) -> None:
    machine.compiler_does(HANGS)
    killed, pid = process(machine), Path(f"{machine.log}.pid")
    with killed:
        until(lambda: pid.exists() and bool(pid.read_text().strip()))
        assert LIBRARY in machine.files()  # half of it
        killed.kill()
    os.killpg(os.getpgid(int(pid.read_text())), signal.SIGKILL)
    machine.compiler_does(COMPILES)
    path = machine.library(wait=0)
    assert path.read_bytes() == b"library" and machine.files() == sorted([path.parent.name, LIBRARY, FACTS])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_ended_ends_the_compiler_and_leaves_no_folder(
    machine: Machine, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    machine.compiler_does(HANGS)
    ended, pid = process(machine), Path(f"{machine.log}.pid")
    with ended:
        until(lambda: pid.exists() and bool(pid.read_text().strip()))
        assert LIBRARY in machine.files() and [*scratch.iterdir()]
        ended.send_signal(number)
        assert ended.wait(LIMIT) == -number
    until(lambda: not is_alive(int(pid.read_text())))
    assert [Path(name).suffix for name in machine.files()] == [".lock"] and not [*scratch.iterdir()]


def test_two_processes_compile_once(machine: Machine) -> None:
    machine.compiler_does(f"sleep 0.3; {COMPILES}")
    processes = [process(machine) for _ in range(2)]
    told = [each.communicate(timeout=LIMIT)[0].strip() for each in processes]
    assert told == [str(machine.library())] * 2 and machine.calls == 1


def test_nobody_waits_for_ever(machine: Machine) -> None:
    folder = machine.library().parent
    (folder / LIBRARY).unlink()
    with (
        locked(folder, ValueError, wait=False),
        pytest.raises(NativeUnavailableError, match="in use by another process"),
    ):
        machine.library(wait=0.1)
    assert machine.library().exists()


@pytest.mark.parametrize("damage", [LIBRARY, FACTS])
@pytest.mark.parametrize("content", [b"", b"librar", b"library2", None])
def test_a_damaged_library_is_compiled_anew(machine: Machine, damage: str, content: bytes | None) -> None:
    path = machine.library()
    if content is None:
        (path.parent / damage).unlink()
    else:
        (path.parent / damage).write_bytes(content)
    assert machine.library() == path and path.read_bytes() == b"library" and machine.calls == 2


def test_a_home_that_cannot_be_written(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(NativeUnavailableError, match=r"cannot be locked: Not a directory.* FORERUN_HOME"):
        machine.library()
    monkeypatch.setenv("FORERUN_HOME", "")
    monkeypatch.setattr("forerun.kernels.cpu.compiler.home", lambda: None)
    with pytest.raises(NativeUnavailableError, match=r"no home folder .* Set the variable FORERUN_HOME"):
        machine.library()
    assert machine.calls == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full_or_read_only(machine: Machine, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    path, replace = machine.library(), Path.replace

    def fail(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp" and self.is_dir():
            raise OSError(code, os.strerror(code))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    assert machine.library() == path  # what is there is used
    (machine.sources / "a.cpp").write_text("int newer;\n")
    with pytest.raises(NativeUnavailableError, match=rf"{os.strerror(code)}.* FORERUN_HOME"):
        machine.library()
    assert machine.files() == sorted([path.parent.name, LIBRARY, FACTS])


def test_a_prebuilt_library_needs_no_compiler(machine: Machine, no_compiler: Callable[[], None]) -> None:
    compiler, prebuilt = find_compiler(), machine.home / "prebuilt"
    assert compiler is not None
    compile_into(prebuilt, compiler, machine.sources, LIMIT, ("-static-libstdc++",))
    assert "-static-libstdc++" in machine.log.read_text()
    no_compiler()
    assert machine.library() == prebuilt / LIBRARY
    (prebuilt / LIBRARY).write_bytes(b"cut")
    with pytest.raises(NativeUnavailableError, match="no C"):
        machine.library()
    (prebuilt / LIBRARY).write_bytes(b"library")
    (machine.sources / "a.cpp").write_text("int newer;\n")  # of an editable installation
    with pytest.raises(NativeUnavailableError, match="no C"):
        machine.library()


def test_sources_that_are_not_there(machine: Machine) -> None:
    with pytest.raises(NativeUnavailableError, match="sources of the kernels are not in"):
        library_path(machine.sources / "below")
    (machine.sources / "a.cpp").unlink()
    (machine.sources / "a.cpp").symlink_to("nowhere")
    with pytest.raises(NativeUnavailableError, match="sources of the kernels cannot be read"):
        machine.library()
