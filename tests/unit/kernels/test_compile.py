"""The library is found or compiled once; every failure has a reason, and no partial file is used."""

from __future__ import annotations

import errno
import inspect
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.config import INSTRUCTIONS
from forerun.errors import CompilationError, ConfigError, NativeUnavailableError
from forerun.kernels.cpu import compiler as compile_module
from forerun.kernels.cpu.compiler import (
    FACTS,
    FLAGS,
    LIBRARY,
    PROCESSOR,
    TIME_LIMIT,
    compile_into,
    find_compiler,
    kept_failure,
    library_path,
)
from forerun.kernels.cpu.targets import TARGETS, find_target
from forerun.utils import machine as processor
from forerun.utils.files import locked

from .conftest import COMPILES, HANGS, HAS, Machine

PROCESS = f"""if True:
    import sys
    from pathlib import Path
    from forerun.kernels.cpu import compiler
    compiler.processor_instructions = lambda path: {HAS}
    print(compiler.library_path(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), 30))
"""
LIMIT = 30
ADDED = ["avx2.o", LIBRARY]
"""What is made when an instruction set is added."""
FIRST = ["avx512.o", "forerun.o", LIBRARY, PROCESSOR, "processor.o"]
"""What is made when there is nothing yet."""


def process(machine: Machine, limit: float = LIMIT) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(machine.sources), str(machine.home / "prebuilt"), str(limit)]
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


def test_the_set_that_runs_is_compiled_once_and_kept(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    path = machine.library()
    lines = [line.split() for line in machine.log.read_text().splitlines()]
    assert machine.made() == FIRST
    assert path == machine.library() and path.read_bytes() == b"library" and machine.made() == []
    assert path.is_relative_to(machine.home / "kernels")
    assert machine.files() == sorted([path.parent.name, FACTS, *FIRST])
    told = "Compiling the kernels for avx512, once: this can take a minute."
    assert [record.message for record in caplog.records] == [told]
    assert all(line[: len(FLAGS)] == list(FLAGS) for line in lines)
    assert lines[0][-1] == str(machine.sources / "processor.cpp")
    assert [Path(name).name for name in lines[-1][-3:]] == ["forerun.o", "processor.o", "avx512.o"]
    assert "-ffp-contract=off" in FLAGS and not {"-march=native", "-ffast-math"} & set(FLAGS)


def test_another_set_is_added_without_compiling_what_is_there(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = machine.library()
    first = path.stat().st_ino
    machine.made()
    monkeypatch.setenv("FORERUN_INSTRUCTIONS", "avx2")
    with path.open("rb"):  # as a process that has it loaded
        assert machine.library() == path and path.stat().st_ino != first
    linked = machine.log.read_text().splitlines()[-1].split()[-4:]
    assert [Path(name).name for name in linked] == ["forerun.o", "processor.o", "avx512.o", "avx2.o"]
    assert machine.made() == ADDED
    monkeypatch.delenv("FORERUN_INSTRUCTIONS")
    assert machine.library() == path and machine.made() == []
    assert machine.library(every=True) == path and machine.made() == [LIBRARY, "portable.o"]
    assert machine.library(every=True) == path and machine.made() == []
    assert machine.files() == sorted([path.parent.name, FACTS, "avx2.o", "portable.o", *FIRST])


def test_a_set_alone_is_compiled_where_it_is_asked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_INSTRUCTIONS", "portable")
    machine.library()
    assert machine.made() == ["forerun.o", LIBRARY, PROCESSOR, "portable.o", "processor.o"]


def test_a_set_that_the_processor_lacks_is_not_compiled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("amx", "avxvnni"):
        monkeypatch.setenv("FORERUN_INSTRUCTIONS", name)
        with pytest.raises(ConfigError, match=f"is '{name}', but this processor has only avx512, avx2, portable. Give"):
            machine.library()
    assert machine.made() == [PROCESSOR, "processor.o"]


ERROR = "echo 'avx512.cpp:1:1: error: x'; exit 1"


def test_a_set_that_fails_is_replaced_by_the_next_best(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.compiler_fails_with("avx512.o", ERROR)
    path = machine.library()
    assert machine.made() == sorted([*FIRST, "avx2.o"])
    machine.compiler_does(COMPILES)  # it would succeed
    assert machine.library() == path and machine.made() == []
    told = [record.message for record in caplog.records if "could not" in record.message]
    assert len(told) == 2 and told[0] == told[1]
    assert told[0].startswith("The kernels for avx512 could not be compiled: ")
    assert "error: x. The kernels for avx2 run instead. Free memory" in told[0]
    assert told[0].endswith("failed.json is removed.")
    failure = kept_failure(path, "avx512")
    assert failure is not None and failure.reason in told[0] and kept_failure(path, "avx2") is None
    Path(str(failure).split()[-3]).unlink()
    caplog.clear()
    assert machine.library() == path and machine.made() == ["avx512.o", LIBRARY]
    assert len(caplog.records) == 1 and kept_failure(path, "avx512") is None


def test_a_set_that_fails_takes_none_away(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    path = machine.library()
    machine.made()
    machine.compiler_fails_with("avx2.o", ERROR)
    with pytest.raises(CompilationError, match="The kernels for avx2 could not be compiled"):
        machine.library(every=True)
    assert machine.made() == ["avx2.o", LIBRARY, "portable.o"]
    monkeypatch.setenv("FORERUN_INSTRUCTIONS", "avx2")
    with pytest.raises(CompilationError, match="The kernels for avx2 could not be compiled"):
        machine.library()
    for name in ("avx512", "portable"):
        monkeypatch.setenv("FORERUN_INSTRUCTIONS", name)
        assert machine.library() == path
    assert machine.made() == []


@pytest.mark.parametrize("there", [True, False])
def test_a_set_that_cannot_be_added_for_another_reason(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, there: bool
) -> None:
    if there:
        monkeypatch.setenv("FORERUN_INSTRUCTIONS", "avx2")
        machine.library()
        monkeypatch.delenv("FORERUN_INSTRUCTIONS")
        caplog.clear()
    machine.compiler_does("echo 'x.s: No space left on device'; exit 1")
    if there:
        assert machine.library().exists()
        assert "No space left on device. The kernels for avx2 run instead. Free disk" in caplog.records[-1].message
    else:
        with pytest.raises(NativeUnavailableError, match="No space left"):
            machine.library()


def test_what_took_too_long_is_tried_again_once_with_more_time(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_INSTRUCTIONS", "portable")
    path = machine.library()
    machine.made()
    monkeypatch.delenv("FORERUN_INSTRUCTIONS")
    machine.compiler_fails_with("avx512.o", HANGS)
    instead = "The kernels for portable run instead."
    caplog.clear()
    assert machine.library(limit=1) == path and machine.made() == ["avx512.o"]  # and nothing for avx2
    failure = kept_failure(path, "avx512")
    assert failure is not None and failure.remedy.endswith("The next start gives it 2 seconds.")
    assert caplog.messages[0].endswith("once: this can take a minute.")
    assert f"1 seconds, and was ended. {instead} Try again" in caplog.messages[1]
    caplog.clear()
    assert machine.library(limit=1) == path and machine.made() == ["avx2.o", "avx512.o", LIBRARY]
    assert caplog.messages[0].endswith(" It took too long before: now it may take 2 seconds.")
    failure = kept_failure(path, "avx512")
    assert failure is not None and f"{machine.compiler} took longer than 2 seconds, and was ended" in failure.reason
    (file,) = (machine.home / "kernels").glob("*.json")
    assert failure.remedy.endswith(f"This compiler is not tried again until {file} is removed.")
    for _ in range(2):
        assert machine.library(limit=1) == path and machine.made() == []
        assert f"2 seconds, and was ended. {instead.replace('portable', 'avx2')}" in caplog.messages[-1]
    file.unlink()
    machine.compiler_does(COMPILES)
    assert machine.library(limit=1) == path and machine.made() == ["avx512.o", LIBRARY]


def test_what_took_too_long_may_succeed_at_the_next_start(machine: Machine) -> None:
    machine.compiler_fails_with("avx512.o", HANGS)
    with pytest.raises(CompilationError, match=r"The next start gives it 0\.8 seconds"):
        machine.library(limit=0.4)
    machine.compiler_does(COMPILES)
    path = machine.library()
    assert kept_failure(path, "avx512") is None and not [name for name in machine.files() if "failed" in name]


@pytest.mark.parametrize("hangs", ["*", "*/avx512.o|*/avx2.o|*/portable.o", f"*/{LIBRARY}"])
def test_a_compiler_that_always_hangs_is_given_up(machine: Machine, hangs: str) -> None:
    machine.compiler_does(f'case "$out" in {hangs}) {HANGS};; *) {COMPILES};; esac')
    for _ in range(2 * len(HAS)):
        with pytest.raises(CompilationError, match="took longer than"):
            machine.library(limit=0.2)
    machine.made()
    with pytest.raises(CompilationError, match=r"took longer than .* is not tried again until"):
        machine.library(limit=0.2)
    assert machine.made() == []


def test_linking_has_the_rest_of_the_time(machine: Machine) -> None:
    machine.compiler_does(f'case "$out" in */*.so) {HANGS};; *) sleep 0.5; {COMPILES};; esac')
    with pytest.raises(CompilationError) as raised:
        machine.library(limit=2)
    assert machine.made() == [PROCESSOR, "processor.o"]
    assert float(raised.value.reason.partition("took longer than ")[2].split()[0]) <= 1.5


def test_a_process_waits_as_long_as_another_may_take() -> None:
    each = dict.fromkeys(("processor", *INSTRUCTIONS), 2 * TIME_LIMIT)
    wait = inspect.signature(library_path).parameters["wait"].default
    assert sum(each.values()) < wait < sum(each.values()) + 60


def test_what_took_too_long_in_another_process_is_not_tried_at_once(machine: Machine) -> None:
    machine.compiler_does(HANGS)
    processes = [process(machine, 1.5) for _ in range(2)]
    told = [each.communicate(timeout=LIMIT)[1] for each in processes]
    assert all("took longer than 1.5 seconds" in each for each in told) and machine.made() == ["processor.o"]


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
    assert len(set(folders)) == len(folders) == machine.made().count("avx512.o")
    (machine.sources / "README").write_text("not compiled")
    assert machine.library().parent == folders[-1]


def test_without_a_compiler_what_is_there_serves(machine: Machine, no_compiler: Callable[[], None]) -> None:
    path = machine.library()
    no_compiler()
    assert machine.library() == path
    (machine.sources / "avx512.cpp").write_text("int newer;\n")
    with pytest.raises(NativeUnavailableError, match=r"Install one: pip install 'forerun\[compiler\]'"):
        machine.library()


@pytest.mark.parametrize("chosen", ["no-such-compiler", "no-such-compiler -x", "'g++"])
def test_a_compiler_that_is_named_must_be_there(machine: Machine, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("CXX", chosen)
    with pytest.raises(NativeUnavailableError, match=r"CXX is .* Correct it, or unset it"):
        machine.library()


def test_a_compiler_may_be_named_with_arguments(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"/usr/bin/env '{machine.compiler}'")
    assert machine.library().exists() and machine.made() == FIRST


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "echo warning: x; echo 'a.cpp:3:1: error: no such thing'; exit 1",
            "exit code 1: a.cpp:3:1: error: no such thing.",
        ),
        ("echo 'a.s: No space left on device'; exit 1", "No space left on device. Free disk space in"),
        ("kill -9 $$", "was ended by signal 9. Free memory"),
        ("exit 0", "has written no processor.o."),
    ],
)
def test_a_compiler_that_fails_is_quoted(machine: Machine, body: str, told: str) -> None:
    machine.compiler_does(body)
    with pytest.raises(NativeUnavailableError) as raised:
        machine.library()
    assert told in str(raised.value)
    assert [name.partition(".")[2] for name in machine.files()] == (
        [] if "No space" in told else ["", "processor.failed.json"]
    )


@pytest.mark.parametrize("body", ["echo 'a.cpp: error: x'; exit 1", "kill -9 $$", "exit 0"])
def test_a_compiler_that_failed_is_not_tried_again_until_it_is_said(machine: Machine, body: str) -> None:
    def failure() -> str:
        with pytest.raises(CompilationError) as raised:
            machine.library()
        return str(raised.value)

    machine.compiler_does(body)
    told = failure()
    (file,) = (machine.home / "kernels").glob("*.json")
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
    for _ in range(2):
        with pytest.raises(NativeUnavailableError, match="Free disk space"):
            machine.library()
        assert machine.made() == ["processor.o"]
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
    (file,) = (machine.home / "kernels").glob("*.json")
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
    assert [name.partition(".")[2] for name in machine.files()] == ["", "processor.failed.json"]
    child = int(Path(f"{machine.log}.pid").read_text())
    until(lambda: not is_alive(child))


def test_a_process_that_is_killed_leaves_nothing_that_is_used(machine: Machine) -> None:
    machine.compiler_does(HANGS)
    killed, pid = process(machine), Path(f"{machine.log}.pid")
    with killed:
        until(lambda: pid.exists() and bool(pid.read_text().strip()))
        assert "processor.o" in machine.files()  # half of it
        killed.kill()
    os.killpg(os.getpgid(int(pid.read_text())), signal.SIGKILL)
    machine.compiler_does(COMPILES)
    path = machine.library(wait=0)
    assert path.read_bytes() == b"library" and machine.files() == sorted([path.parent.name, FACTS, *FIRST])


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
        assert "processor.o" in machine.files() and [*scratch.iterdir()]
        ended.send_signal(number)
        assert ended.wait(LIMIT) == -number
    until(lambda: not is_alive(int(pid.read_text())))
    assert [Path(name).suffix for name in machine.files()] == [".lock"] and not [*scratch.iterdir()]


def test_two_processes_compile_once(machine: Machine) -> None:
    machine.compiler_does(f"sleep 0.3; {COMPILES}")
    processes = [process(machine) for _ in range(2)]
    told = [each.communicate(timeout=LIMIT)[0].strip() for each in processes]
    assert told == [str(machine.library())] * 2 and machine.made() == FIRST


def test_nobody_waits_for_ever(machine: Machine) -> None:
    folder = machine.library().parent
    (folder / LIBRARY).unlink()
    with (
        locked(folder, ValueError, wait=False),
        pytest.raises(NativeUnavailableError, match="in use by another process"),
    ):
        machine.library(wait=0.1)
    assert machine.library().exists()


@pytest.mark.parametrize("damage", [LIBRARY, PROCESSOR, FACTS])
@pytest.mark.parametrize("content", [b"", b"librar", b"library2", None])
def test_a_damaged_library_is_compiled_anew(machine: Machine, damage: str, content: bytes | None) -> None:
    path = machine.library()
    machine.made()
    if content is None:
        (path.parent / damage).unlink()
    else:
        (path.parent / damage).write_bytes(content)
    assert machine.library() == path and path.read_bytes() == b"library"
    assert machine.made() == (FIRST if damage == FACTS else [damage])  # objects are linked anew


def test_a_home_that_cannot_be_written(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(NativeUnavailableError, match=r"cannot be locked: Not a directory.* FORERUN_HOME"):
        machine.library()
    monkeypatch.setenv("FORERUN_HOME", "")
    monkeypatch.setattr("forerun.kernels.cpu.compiler.home", lambda: None)
    with pytest.raises(NativeUnavailableError, match=r"no home folder .* Set the variable FORERUN_HOME"):
        machine.library()
    assert machine.made() == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full_or_read_only(machine: Machine, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    path, replace = machine.library(), Path.replace

    def fail(self: Path, target: Path) -> Path:
        if ".tmp" in str(self):
            raise OSError(code, os.strerror(code))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    assert machine.library() == path  # what is there is used
    (machine.sources / "avx512.cpp").write_text("int newer;\n")
    with pytest.raises(NativeUnavailableError, match=rf"{os.strerror(code)}.* FORERUN_HOME"):
        machine.library()
    assert {*machine.files()} == {path.parent.name, FACTS, *FIRST} | {name for name in machine.files() if "-" in name}


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
    (machine.sources / "avx512.cpp").write_text("int newer;\n")  # of an editable installation
    with pytest.raises(NativeUnavailableError, match="no C"):
        machine.library()


def test_a_library_for_another_platform_is_found_there_alone(
    machine: Machine, no_compiler: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, compiler, prebuilt = find_target("windows-amd64"), find_compiler(), machine.home / "prebuilt"
    assert compiler is not None
    compile_into(prebuilt, compiler, machine.sources, LIMIT, ("-target", target.triple), target)
    assert machine.log.read_text().count(f"-target {target.triple} ") == len(HAS) + 3
    assert sorted(path.name for path in prebuilt.glob("*forerun*")) == ["forerun.dll", "forerun.o"]
    no_compiler()
    with pytest.raises(NativeUnavailableError, match="no C"):
        machine.library()
    monkeypatch.setattr(platform, "system", lambda: target.system)
    monkeypatch.setattr(platform, "machine", lambda: target.machine)
    monkeypatch.setattr(compile_module, "LIBRARY", "forerun.dll")
    assert machine.library() == prebuilt / "forerun.dll"


def test_targets_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match=r"FORERUN_TARGET is 'mars', but wheels are made for linux-x86_64, linux-"):
        find_target("mars")


HERE = [target for target in TARGETS if (target.system, target.machine) == (platform.system(), platform.machine())]


@pytest.mark.skipif(not HERE, reason="Zig is not told of this platform")
def test_without_a_compiler_zigs_is_used(
    machine: Machine, no_compiler: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compiler()
    with pytest.raises(
        NativeUnavailableError, match=r"no C\+\+ compiler\. Install one: pip install 'forerun\[compiler\]'; "
    ):
        machine.library()
    monkeypatch.delitem(sys.modules, "ziglang")
    package = tmp_path / "packages" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    zig = package / "zig"
    zig.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3" = "c++ -target {HERE[0].triple}" ] || exit 1\nshift 3\nexec {machine.compiler} "$@"\n'
    )
    zig.chmod(0o755)
    monkeypatch.syspath_prepend(str(package.parent))
    assert machine.library().name == LIBRARY
    assert machine.made() == FIRST
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "g++").symlink_to(machine.compiler)
    assert (compiler := find_compiler()) is not None
    assert compiler.command == (str(tmp_path / "nothing" / "g++"),)


def test_sources_that_are_not_there(machine: Machine) -> None:
    with pytest.raises(NativeUnavailableError, match="sources of the kernels are not in"):
        library_path(machine.sources / "below")
    (machine.sources / "avx2.cpp").unlink()
    (machine.sources / "avx2.cpp").symlink_to("nowhere")
    with pytest.raises(NativeUnavailableError, match="sources of the kernels cannot be read"):
        machine.library()
