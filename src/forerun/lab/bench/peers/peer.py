"""A running peer: its process, what it reports of itself, and its answers, checked."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from forerun.utils.json_file import Fields
from forerun.utils.processes import end_group

MAX_LINE = 1 << 24
"""Bytes of the longest reply."""
_GOODBYE_SECONDS = 5.0
_LAST_LINES = 20
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_REMEDY = "Run it by hand to see why."


class PeerError(Exception):
    """A peer that cannot go on; the text is the reason."""


class PeerProcess:
    """A worker process, which answers one JSON object on a line with another within a time limit.

    If it crashes, hangs, or prints something else or nothing, the caller gets a PeerError with a reason. The process is
    ended with all that it started.

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

    def exchange(self, request: Mapping[str, Any], limit: float, *, quote_errors: bool = False) -> Fields:
        """Send a request and wait for the reply.

        Args:
            limit: seconds to wait for it.
            quote_errors: the reason may quote what the process printed last on standard error. Not where that can hold
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
            raise PeerError(self._ended(quote_errors))
        try:
            return Fields.parse(reply, "its reply", PeerError, remedy=_REMEDY, private=True)
        except PeerError:
            self.stop(at_once=True)
            raise PeerError("it printed something that is no reply") from None

    def stop(self, at_once: bool = False) -> None:
        """End the process, and every process that it started; without `at_once` it may leave by itself first."""
        if at_once:  # first of all: closing waits for a thread that writes to a process that does not read
            end_group(self._process)
        with contextlib.suppress(OSError):
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_SECONDS)
        end_group(self._process)
        self._process.wait()
        for reader in self._readers:
            reader.join(_GOODBYE_SECONDS)
        self._scratch.cleanup()

    def _ended(self, quote_errors: bool) -> str:
        self.stop()
        code = self._process.returncode
        reason = f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
        printed = [line for line in self._errors if line.strip()]
        return f"{reason}: {printed[-1].strip()[:300]}" if quote_errors and printed else reason

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, which is seen by the missing reply
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


_AVX512 = re.compile(r"AVX-?512", re.IGNORECASE)
_LISTED = re.compile(r"SSE|AVX|DEFAULT", re.IGNORECASE)


LOAD_LIMIT, PROMPT_LIMIT = 600.0, 300.0
"""Seconds in which a peer must have loaded its model, and have answered a prompt."""


@dataclass(frozen=True, slots=True)
class PeerStart:
    """How a peer is started.

    Attributes:
        text: what the user named it by.
        command: starts its worker.
        options: the worker's first line; "threads", "name" and "kind" are among them.
    """

    text: str
    command: Sequence[str]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One generation.

    Attributes:
        token_ids: what was generated.
        seconds: around the generation, prompt included.
        first_seconds: of these, until the first token; None if the peer does not report them.
        steps: forwards that gave tokens; None if the peer does not report them.
    """

    token_ids: Sequence[int]
    seconds: float
    first_seconds: float | None
    steps: int | None

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / len(self.token_ids)


@dataclass(slots=True)
class Peer:
    """An engine in a process of its own.

    Attributes:
        name: what its rows are called.
        worker: its process.
        version: of its software.
        instructions: the instruction sets that it says it uses.
        precision: of its weights, as it calls it.
        methods: what it can do, plain decoding first.
        about: all that it reported when it was ready.
        refused: method -> why it was left out.
    """

    name: str
    worker: PeerProcess
    version: str
    instructions: str
    precision: str
    methods: list[str]
    about: Fields
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def bits(self) -> int | None:
        """Return the bits of its precision: 16 of bfloat16, 8 of Q8_0, 4 of Q4_K; None where its name has no number."""
        found = re.search(r"\d+", self.precision)
        return int(found.group()) if found else None

    @classmethod
    def start(cls, start: PeerStart) -> Peer:
        """Start a worker and wait until it has loaded.

        Raises:
            PeerError: it is not ready in time, or says nothing that can be read.
        """
        options = start.options
        worker = PeerProcess(start.command, start.options["threads"])
        try:
            ready = worker.exchange(options, LOAD_LIMIT, quote_errors=True).fields("ready")
            precision = ready.string("precision")
            parts = options["kind"], precision, options.get("instructions")
            name = options["name"] or " ".join(filter(None, parts))
            version = ready.string("version")
            instructions = ready.string("instructions")
            return cls(name, worker, version, instructions, precision, ready.list_of("methods", str), ready)
        except BaseException:
            worker.stop(at_once=True)
            raise

    def generate(self, method: str, token_ids: Sequence[int], max_tokens: int) -> PeerAnswer | None:
        """Generate once; None where the method failed, which is then removed.

        Raises:
            PeerError: the peer itself cannot go on.
        """
        request = {"method": method, "token_ids": list(token_ids), "max_tokens": max_tokens}
        reply = self.worker.exchange(request, PROMPT_LIMIT)
        if "error" in reply:
            self._refuse(method, f"it reported {reply.string('error')}")
            return None
        answer = PeerAnswer(
            reply.list_of("token_ids", int),
            reply.number("seconds", low=0),
            reply.number("first_seconds", None, low=0),
            reply.integer("steps", None, low=1),
        )
        if len(answer.token_ids) < max_tokens or math.isclose(answer.seconds, 0):
            self._refuse(method, f"it gave {len(answer.token_ids)} tokens in place of {max_tokens}")
            return None
        return answer

    def instruction_text(self, processor_has_avx512: bool) -> str:
        """Describe the instruction sets, and whether AVX-512 is missing among them though the processor has it."""
        lacks = processor_has_avx512 and _LISTED.search(self.instructions) and not _AVX512.search(self.instructions)
        return self.instructions + ("; without AVX-512, which the processor has" if lacks else "")

    def _refuse(self, method: str, reason: str) -> None:
        self.methods.remove(method)
        self.refused[method] = reason
