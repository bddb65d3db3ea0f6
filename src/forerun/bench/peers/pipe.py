"""A worker process and the pipe to it: started, asked within a time limit, ended with all that it started.

Whatever the process does, crash, hang, print something else or nothing, the caller gets a `PeerError` with a reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any

from forerun.files.json_file import Fields

MAX_LINE = 1 << 24
"""Bytes of the longest reply."""
_GOODBYE_SECONDS = 5.0
_LAST_LINES = 20
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_REMEDY = "Run it by hand to see why."


class PeerError(Exception):
    """A peer that cannot go on; the text is the reason."""


class Worker:
    """A process that answers one JSON object on a line with another.

    Args:
        command: starts it.
        threads: for the environment variables that libraries read.

    Raises:
        PeerError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], threads: int) -> None:
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads)), "PYTHONUNBUFFERED": "1"}
        # its temporary files lie in here, and go with it even where it is killed
        self._scratch = tempfile.TemporaryDirectory(prefix="forerun-", ignore_cleanup_errors=True)
        environment["TMPDIR"] = self._scratch.name
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # a group of its own, to be ended with all that it starts
            )
        except OSError as error:
            self._scratch.cleanup()
            raise PeerError(f"{command[0]} cannot be started: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._input = self._process.stdin
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._errors: deque[str] = deque(maxlen=_LAST_LINES)
        self._readers = [
            threading.Thread(target=self._read_replies, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def ask(self, request: Mapping[str, Any], limit: float, *, tell_errors: bool = False) -> Fields:
        """The reply to a request.

        Args:
            limit: seconds to wait for it.
            tell_errors: the reason may quote what the process printed last on standard error. Not where that can hold
                a prompt.

        Raises:
            PeerError: no reply in time, the process has ended, or what it printed is no reply. It is ended then.
        """
        line = json.dumps(request).encode() + b"\n"
        # in a thread: a process that hangs does not read, and the pipe holds only so much
        threading.Thread(target=self._write, args=(line,), daemon=True).start()
        try:
            reply = self._lines.get(timeout=limit)
        except queue.Empty:
            self.stop(at_once=True)
            raise PeerError(f"no answer within {limit:g} seconds") from None
        except BaseException:  # Ctrl-C
            self.stop(at_once=True)
            raise
        if not reply:
            raise PeerError(self._ended(tell_errors))
        try:
            return Fields.parse(reply, "its reply", PeerError, remedy=_REMEDY, private=True)
        except PeerError:
            self.stop(at_once=True)
            raise PeerError("it printed something that is no reply") from None

    def stop(self, at_once: bool = False) -> None:
        """End the process, and every process that it started; without `at_once` it may leave by itself first."""
        if at_once:  # first of all: closing waits for a thread that writes to a process that does not read
            self._kill()
        with contextlib.suppress(OSError):
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_SECONDS)
        self._kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(_GOODBYE_SECONDS)
        self._scratch.cleanup()

    def _kill(self) -> None:
        """End the process and all of its group."""
        with contextlib.suppress(OSError):  # the group is gone where all of it has left
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()

    def _ended(self, tell_errors: bool) -> str:
        self.stop()
        code = self._process.returncode
        reason = f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
        said = [line for line in self._errors if line.strip()]
        return f"{reason}: {said[-1].strip()[:300]}" if tell_errors and said else reason

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, which the reply's absence tells
            self._input.write(line)
            self._input.flush()

    def _read_replies(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(MAX_LINE):
                self._lines.put(line)
        self._lines.put(b"")

    def _read_errors(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(1 << 16):
                self._errors.append(line.decode(errors="replace"))
