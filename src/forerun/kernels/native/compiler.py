"""The C++ compiler: which there is, and one call of it, in a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from forerun.errors import CompilationError, NativeUnavailableError

VARIABLE = "CXX"
"""Environment variable: the compiler, with arguments if wanted. Set, no other is tried."""
INSTALL = "Install g++ or clang++ (on Debian and Ubuntu: apt install g++), or name a C++ compiler by the variable CXX."
_NAMES = ("c++", "g++", "clang++")
_VERSION_SECONDS = 20.0
_REASON_CHARACTERS = 300
_MAX_OUTPUT = 1 << 20
_ROOM = "Make room in the folder that FORERUN_HOME names and in that of temporary files, or let TMPDIR name another."
_ANOTHER = f"Free memory if there was too little; else name another compiler by the variable CXX. {INSTALL}"


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that is there.

    Attributes:
        command: starts it.
        version: what it says of itself.
    """

    command: tuple[str, ...]
    version: str

    def call(self, arguments: Sequence[str], limit: float) -> None:
        """Run it once.

        Args:
            limit: seconds after which it is ended, with all that it started.

        Raises:
            CompilationError: it fails, or it takes longer.
            NativeUnavailableError: it cannot be started, or finds no room on the disk.
        """
        code, said = _run([*self.command, *arguments], limit)
        if code:
            reason = f"They could not be compiled: {self.command[0]} {_reason(code, said)}."
            if "No space left" in said:
                raise NativeUnavailableError(reason, _ROOM)
            raise CompilationError(reason, _ANOTHER)


def find_compiler() -> Compiler | None:
    """The compiler that CXX names, else c++, g++ or clang++, the first that is there; None without any.

    Raises:
        NativeUnavailableError: CXX names one that is not there, or the compiler does not tell its version.
    """
    chosen = os.environ.get(VARIABLE, "").strip()
    try:
        commands = [shlex.split(chosen)] if chosen else [[name] for name in _NAMES]
    except ValueError as failure:  # a quotation mark that is not closed
        raise _no_such(chosen, str(failure)) from None
    for program, *arguments in commands:
        if (path := shutil.which(program)) is not None:
            command = (path, *arguments)
            code, said = _run([*command, "--version"], _VERSION_SECONDS)
            if code:
                raise NativeUnavailableError(f"{path} --version {_reason(code, said)}.", INSTALL)
            return Compiler(command, said.strip())
    if chosen:
        raise _no_such(chosen, "there is no such program")
    return None


def _no_such(chosen: str, reason: str) -> NativeUnavailableError:
    return NativeUnavailableError(f"{VARIABLE} is {chosen!r}: {reason}.", f"Correct it, or unset it. {INSTALL}")


def _run(command: Sequence[str], limit: float) -> tuple[int, str]:
    """Exit code and output. Raises NativeUnavailableError where it cannot be started or takes longer than `limit`."""
    try:
        # Its temporary files lie in here, and go with it even where it is killed.
        with TemporaryDirectory(prefix="forerun-", ignore_cleanup_errors=True) as scratch:
            output = Path(scratch) / "output"  # no pipe: whoever is left of its group could hold that open
            with output.open("wb") as file:
                code = _exit_code(_start(command, file, scratch), command[0], limit)
            with output.open("rb") as file:
                return code, file.read(_MAX_OUTPUT).decode("utf-8", "replace")
    except OSError as failure:
        reason = f"Temporary files of {command[0]} cannot be written: {failure.strerror or failure}."
        raise NativeUnavailableError(reason, _ROOM) from None


def _start(command: Sequence[str], output: IO[bytes], scratch: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": scratch, "LC_ALL": "C"},
            start_new_session=True,  # a group of its own, to be ended with all that it starts
        )
    except OSError as failure:
        raise NativeUnavailableError(f"{command[0]} cannot be run: {failure.strerror or failure}.", INSTALL) from None


def _exit_code(process: subprocess.Popen[bytes], name: str, limit: float) -> int:
    """Wait until it has ended. Whatever interrupts that, Ctrl-C too, ends it with all that it started."""
    try:
        return process.wait(limit)
    except BaseException as failure:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(failure, subprocess.TimeoutExpired):
            raise
        reason = f"{name} took longer than {limit:g} seconds, and was ended."
        remedy = "Try again when the machine has less to do, or name another compiler by the variable CXX."
        raise CompilationError(reason, remedy) from None


def _reason(code: int, said: str) -> str:
    """Why it failed, in a clause: its first line that tells of an error, else its last."""
    what = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "No space left" in line or "error" in line.lower()] or lines[-1:]
    return f"{what}: {telling[0][:_REASON_CHARACTERS].rstrip('.')}" if telling else what
