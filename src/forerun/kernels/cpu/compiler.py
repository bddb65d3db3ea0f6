"""Find the C++ compiler, compile the native library once and keep it, or take the prebuilt one of a wheel."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from forerun.errors import CompilationError, NativeUnavailableError
from forerun.utils import machine
from forerun.utils.files import digest, file_digest, leftovers, locked, remove, whole_folder, write_json
from forerun.utils.home import HOME_VARIABLE, KERNELS_FOLDER, home
from forerun.utils.json_file import Fields
from forerun.utils.signals import cleaned_up, held

VARIABLE = "CXX"
"""Environment variable: the compiler, with optional arguments. If set, no other is tried."""
INSTALL = "Install g++ or clang++ (on Debian and Ubuntu: apt install g++), or name a C++ compiler by the variable CXX."
_NAMES = ("c++", "g++", "clang++")
_VERSION_SECONDS = 20.0
_REASON_CHARACTERS = 300
_POLL = 0.02
"""Seconds after which running compilers are looked at again."""
_MAX_OUTPUT = 1 << 20
_DISK_FULL = (
    "Free disk space in the folder that FORERUN_HOME names and in that of temporary files, or set TMPDIR to another."
)
_ANOTHER = f"Free memory if there was too little; else name another compiler by the variable CXX. {INSTALL}"


@dataclass(frozen=True, slots=True)
class Compiler:
    """An installed compiler.

    Attributes:
        command: starts it.
        version: the output of --version.
    """

    command: tuple[str, ...]
    version: str

    def call(self, arguments: Sequence[Sequence[str]], limit: float) -> None:
        """Run the compiler with each of these arguments, on as many cores as there are, with a time limit for all.

        Args:
            limit: seconds after which the compilers and their child processes are killed.

        Raises:
            CompilationError: one fails, or they take longer.
            NativeUnavailableError: one cannot be started, or the disk is full.
        """
        code, output = _run([[*self.command, *each] for each in arguments], limit)
        if code:
            reason = f"They could not be compiled: {self.command[0]} {_reason(code, output)}."
            if "No space left" in output:
                raise NativeUnavailableError(reason, _DISK_FULL)
            raise CompilationError(reason, _ANOTHER)


def find_compiler() -> Compiler | None:
    """Return the compiler that CXX names, else the first of c++, g++ and clang++ that is installed, or None.

    Raises:
        NativeUnavailableError: CXX names one that is not there, or --version fails.
    """
    chosen = os.environ.get(VARIABLE, "").strip()
    try:
        commands = [shlex.split(chosen)] if chosen else [[name] for name in _NAMES]
    except ValueError as failure:  # a quotation mark that is not closed
        raise _no_such(chosen, str(failure)) from None
    for program, *arguments in commands:
        if (path := shutil.which(program)) is not None:
            command = (path, *arguments)
            code, output = _run([[*command, "--version"]], _VERSION_SECONDS)
            if code:
                raise NativeUnavailableError(f"{path} --version {_reason(code, output)}.", INSTALL)
            return Compiler(command, output.strip())
    if chosen:
        raise _no_such(chosen, "there is no such program")
    return None


def _no_such(chosen: str, reason: str) -> NativeUnavailableError:
    return NativeUnavailableError(f"{VARIABLE} is {chosen!r}: {reason}.", f"Correct it, or unset it. {INSTALL}")


def _run(commands: Sequence[Sequence[str]], limit: float) -> tuple[int, str]:
    """Run commands, side by side, and return the exit code of one that fails, else 0, and their output. Raises
    NativeUnavailableError if one cannot start, CompilationError if they exceed `limit`."""
    try:
        # Its temporary files lie in here, and go with it even where it is killed.
        with cleaned_up(), TemporaryDirectory(prefix="forerun-", ignore_cleanup_errors=True) as scratch:
            log_file = Path(scratch) / "output"  # no pipe: whoever is left of its group could hold that open
            with log_file.open("wb") as file:
                code = _exit_code(commands, partial(_start, log_file=file, scratch=scratch), limit)
            with log_file.open("rb") as file:
                return code, file.read(_MAX_OUTPUT).decode("utf-8", "replace")
    except OSError as failure:
        reason = f"Temporary files of {commands[0][0]} cannot be written: {failure.strerror or failure}."
        raise NativeUnavailableError(reason, _DISK_FULL) from None


def _start(command: Sequence[str], log_file: IO[bytes], scratch: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": scratch, "LC_ALL": "C"},
            start_new_session=True,  # a group of its own, to be ended with all that it starts
        )
    except OSError as failure:
        raise NativeUnavailableError(f"{command[0]} cannot be run: {failure.strerror or failure}.", INSTALL) from None


def _exit_code(
    commands: Sequence[Sequence[str]], start: Callable[[Sequence[str]], subprocess.Popen[bytes]], limit: float
) -> int:
    """Wait for all commands to end, or one to fail. Whatever else ends this, Ctrl-C and SIGTERM included, kills their
    process groups."""
    waiting = deque(commands)
    running = list[subprocess.Popen[bytes]]()
    end = time.monotonic() + limit
    try:
        while waiting or running:
            while waiting and len(running) < machine.cores():
                with held():
                    running.append(start(waiting.popleft()))
            for process in [each for each in running if each.poll() is not None]:
                running.remove(process)
                if process.returncode:
                    return int(process.returncode)
            if running and time.monotonic() > end:
                reason = f"{commands[0][0]} took longer than {limit:g} seconds, and was ended."
                remedy = "Try again when the machine has less to do, or name another compiler by the variable CXX."
                raise CompilationError(reason, remedy)
            time.sleep(_POLL)
        return 0
    finally:
        for process in running:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reason(code: int, output: str) -> str:
    """Return a clause with the cause of a failure: the first output line that mentions an error, else the last line."""
    what = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "No space left" in line or "error" in line.lower()] or lines[-1:]
    return f"{what}: {telling[0][:_REASON_CHARACTERS].rstrip('.')}" if telling else what


# The file of the native library: prebuilt in a wheel, or compiled once by this machine's compiler and kept.
#
# It is kept in the folder kernels/KEY of `home()`, where KEY stands for everything that decides its contents and where
# it runs: sources, flags, architecture and features of the processor, C library, compiler. Beside it lies a file with
# its checksum, compared before the library is loaded. The folder appears as a whole or not at all. Nothing is compiled
# for one processor alone: the instruction set is chosen at run time.
#
# Where the compiler fails, the file KEY.failed.json keeps its reason, and later processes repeat that in place of
# compiling. A compiler that is missing, or a disk that is full, is looked at each time.

HERE = Path(__file__).parent
SOURCES = HERE / "csrc"
PREBUILT = HERE / "prebuilt"
"""In a wheel for one platform: the folder of the library that was compiled for it."""
LIBRARY = "libforerun.so"
FACTS = "build.json"
"""Beside the library: what it was compiled from and by, and its checksum."""
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
"""Without -march and -ffast-math: the file serves any processor of its architecture, with the same bits."""
TIME_LIMIT = 300.0
"""Seconds that compiling may take: two or three minutes of one core, shared by those that there are; several times that
on a busy machine."""
_WAIT = TIME_LIMIT + 30
"""Seconds to wait for another process that compiles the same."""
_OTHER_FOLDER = f"The variable {HOME_VARIABLE} names another folder."

_log = logging.getLogger(__name__)
_unwritable = partial(NativeUnavailableError, remedy=_OTHER_FOLDER)


def library_path(
    sources: Path = SOURCES, prebuilt: Path = PREBUILT, limit: float = TIME_LIMIT, wait: float = _WAIT
) -> Path:
    """Return the path of the library, compiling it if necessary, after comparing its checksum.

    Args:
        sources: the folder of the C++ files: *.cpp are compiled, headers may lie in folders below.
        prebuilt: the folder of a library that came with them; one of other sources is passed over.
        limit: seconds that compiling, and then linking, may take.
        wait: seconds to wait for another process that is compiling.

    Raises:
        NativeUnavailableError: there is none, and none can be compiled or kept.
    """
    recipe = _recipe(sources)
    if _is_sound(prebuilt, recipe):
        return prebuilt / LIBRARY
    if os.name != "posix":
        raise NativeUnavailableError(
            f"The native kernels do not run on {platform.system()}.", "Linux and macOS run them."
        )
    base = home()
    if base is None:
        raise NativeUnavailableError("There is no home folder to keep them in.", f"Set the variable {HOME_VARIABLE}.")
    here = digest("\n".join((recipe, *machine.features(), *platform.libc_ver())).encode())
    kept = base / KERNELS_FOLDER
    compiler = find_compiler()
    if compiler is None:
        for folder in sorted(kept.glob(f"{here[:16]}-*")):  # compiled when there was a compiler
            if _is_sound(folder, recipe):
                return folder / LIBRARY
        raise NativeUnavailableError("There is no C++ compiler.", INSTALL)
    folder = kept / f"{here[:16]}-{digest(repr(compiler).encode())[:16]}"
    if not _is_sound(folder, recipe):
        _refuse_what_failed(folder)
        remedy = "A program compiles there: wait, or end it."
        with locked(folder, _unwritable, wait=wait, remedy=remedy):
            if not _is_sound(folder, recipe):  # else another process has just done it
                _refuse_what_failed(folder)  # or has just failed
                for left in leftovers(folder):  # of killed processes: this process holds the lock
                    remove(left)
                _log.warning("Compiling the kernels, once: this can take some minutes.")
                try:
                    compile_into(folder, compiler, sources, limit)
                except CompilationError as failure:
                    raise _kept_failure(folder, failure) from None
    return folder / LIBRARY


def compile_into(
    folder: Path, compiler: Compiler, sources: Path = SOURCES, limit: float = TIME_LIMIT, extra: tuple[str, ...] = ()
) -> None:
    """Compile each file on a core of its own, and replace `folder` by the library and its build facts at once.

    Args:
        extra: further arguments of the compiler.

    Raises:
        CompilationError: it fails, or takes longer than `limit` seconds.
        NativeUnavailableError: the folder cannot be written.
    """
    recipe = _recipe(sources)
    files = sorted(sources.glob("*.cpp"))
    flags = [*FLAGS, *extra]
    with whole_folder(folder, _unwritable) as new:
        library = new / LIBRARY
        objects = [str(path) for path in files]
        if len(files) > 1:
            objects = [str(new / f"{path.stem}.o") for path in files]
            pairs = zip(files, objects, strict=True)
            compiler.call([[*flags, "-c", "-o", made, str(path)] for path, made in pairs], limit)
        compiler.call([[*flags, "-o", str(library), *objects]], limit)
        for left in new.glob("*.o"):
            left.unlink()
        try:
            with library.open("rb") as file:
                checksum = file_digest(file)
        except FileNotFoundError:
            raise CompilationError(f"{compiler.command[0]} has written no library.", INSTALL) from None
        facts = {"recipe": recipe, "library": checksum, "compiler": compiler.version.partition("\n")[0]}
        write_json(new / FACTS, facts, error=_unwritable)


def _failure_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.failed.json")


def _kept_failure(folder: Path, failure: CompilationError) -> CompilationError:
    """Store the failure for later processes, as far as the file can be written, and return it."""
    file = _failure_file(folder)
    with suppress(NativeUnavailableError):
        write_json(file, {"reason": failure.reason, "remedy": failure.remedy}, error=_unwritable)
    return _with_retry(failure.reason, failure.remedy, file)


def _refuse_what_failed(folder: Path) -> None:
    """Raise CompilationError if these sources and this compiler have failed before."""
    file = _failure_file(folder)
    try:
        facts = Fields.read(file, ValueError)
        reason = facts.string("reason")
        remedy = facts.string("remedy")
    except ValueError:
        return
    raise _with_retry(reason, remedy, file)


def _with_retry(reason: str, remedy: str, file: Path) -> CompilationError:
    return CompilationError(reason, f"{remedy} This compiler is not tried again until {file} is removed.")


def _recipe(sources: Path) -> str:
    """Return a hash of the sources, flags and architecture. Raises NativeUnavailableError."""
    try:
        files = [path for path in sorted(sources.rglob("*")) if path.suffix in (".cpp", ".h")]
        parts = [f"{path.relative_to(sources).as_posix()}\n{digest(path.read_bytes())}\n".encode() for path in files]
    except OSError as failure:
        reason = f"The sources of the kernels cannot be read: {sources}: {failure.strerror}."
        raise NativeUnavailableError(reason, "Install forerun anew.") from None
    if not any(path.suffix == ".cpp" for path in files):
        raise NativeUnavailableError(f"The sources of the kernels are not in {sources}.", "Install forerun anew.")
    return digest(*parts, "\n".join((*FLAGS, platform.system(), platform.machine())).encode())


def _is_sound(folder: Path, recipe: str) -> bool:
    """Return whether the folder holds a library of this recipe whose checksum matches."""
    try:
        facts = Fields.read(folder / FACTS, ValueError)
        with (folder / LIBRARY).open("rb") as file:
            return facts.string("recipe") == recipe and facts.string("library") == file_digest(file)
    except (OSError, ValueError):
        return False
