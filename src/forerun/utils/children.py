"""Child processes for work that a foreign input can make endless: templates, long texts, grammars.

A task has limits of processor time and of memory, and ends with its caller. The processes are kept alive. What they do
is in `utils/child_program.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from copy import copy
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeVar

from forerun.utils import child_program
from forerun.utils.child_program import MEMORY, Answer, memory_beside, read_frame, write_frame
from forerun.utils.processes import watched_memory

T = TypeVar("T")

MOST_CHILDREN = 4
_IDLE_SECONDS = 20.0
"""After which a child is ended, but for the last one unless it is large."""
_LARGE = 1 << 28
"""Bytes of a child that is not kept."""
_WALL_FACTOR, _WALL_SECONDS = 10.0, 60.0
"""Limit of a task's whole time by its limit of processor time: children give way to the engine's threads."""
_ALONE = dict.fromkeys(("RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
"""Each thread would reserve memory."""


class TaskError(Exception):
    """A task that failed; its text says why."""


class TaskLimitError(TaskError):
    """A task that exceeded one of its limits; the text goes on after its subject ("takes more than ...")."""


class Caller:
    """Whoever waits for tasks in one thread, and may leave before they end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self.has_left = False

    def leave(self) -> None:
        """End the task that is being performed, and every later one. Any thread may call this."""
        with self._lock:
            self.has_left = True
            if self._child is not None:
                self._child.kill()

    @contextmanager
    def waiting_for(self, child: _Child) -> Iterator[None]:
        """Have `leave` end this child's task. Raises TaskError if that has been called."""
        with self._lock:
            if self.has_left:
                raise TaskError("its caller has left")
            self._child = child
        try:
            yield
        finally:
            with self._lock:
                self._child = None


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


async def in_thread(
    work: Callable[[], T], executor: Executor | None = None, ended: Callable[[], object] = lambda: None
) -> T:
    """Return the result of work in a thread. Where this is cancelled, the tasks of the work end.

    Args:
        executor: of the thread; None: the event loop's own.
        ended: called in the event loop when the thread is free again.
    """
    caller = Caller()
    context = copy_context()
    context.run(_caller.set, caller)
    future = asyncio.get_running_loop().run_in_executor(executor, context.run, work)
    # an exception may come when nobody waits for it any more
    future.add_done_callback(lambda done: (ended(), done.cancelled() or done.exception()))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        caller.leave()
        raise


class _Child:
    """A process that performs one task at a time.

    Attributes:
        known: keys of the tokenizers that it has.
        resident: bytes of memory that it held after its last task.
        most: bytes that it may hold.
        idle_since: of `time.monotonic`.
    """

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-P", child_program.__file__, *arguments]
        pipe = subprocess.PIPE
        environment = os.environ | _ALONE | {"TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, bufsize=-1
        )
        self.known: set[str] = set()
        self.resident = 0
        self.most = MEMORY
        self.idle_since = 0.0
        self._is_late = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not written yet is written when it is closed
                pipe.close()

    def perform(self, task: str, arguments: dict[str, Any], blob: bytes, seconds: float) -> Answer:
        """Return a task's answer. Raises TaskError; TaskLimitError: it exceeded a limit. Then the process has ended."""
        target: Any = self._process.stdin
        source: Any = self._process.stdout
        timer = threading.Timer(_WALL_SECONDS + _WALL_FACTOR * seconds, self._expire)
        timer.daemon = True
        timer.start()
        with watched_memory(self._process, self.most) as exceeded:
            try:
                write_frame(target, {"task": task, "seconds": seconds, "arguments": arguments}, blob)
                answer = read_frame(source)
            except OSError:  # it has ended
                answer = None
            finally:
                timer.cancel()
        if answer is None:
            raise TaskLimitError(_TOO_LARGE) if exceeded.is_set() else self._death(seconds)
        fields, content = answer
        self.resident = fields.pop("resident")
        if (excess := fields.get("exceeded")) is not None:
            raise TaskLimitError(excess or _TOO_LARGE)
        if "failed" in fields:
            raise TaskError(fields["failed"])
        return fields, content

    def _expire(self) -> None:
        self._is_late = True
        self.kill()

    def _death(self, seconds: float) -> TaskError:
        """Return the error of a task in which the process has ended."""
        ended = self._process.wait()
        if self._is_late:
            return TaskLimitError("has not come to an end in time")
        if hasattr(signal, "SIGPROF") and ended == -signal.SIGPROF:
            return TaskLimitError(f"takes more than {seconds:.3g} s of processor time")
        if hasattr(signal, "SIGABRT") and ended == -signal.SIGABRT:  # memory that was refused
            return TaskLimitError(_TOO_LARGE)
        return TaskError(f"the process that performs it ended with {ended}")


_TOO_LARGE = f"takes more than {MEMORY >> 30} GiB of memory"


class Children:
    """Processes that perform tasks for any threads, a few at once; they are started when they are needed.

    arguments: of the program.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._free = threading.BoundedSemaphore(MOST_CHILDREN)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []  # the one used last is at the end
        self._timer: threading.Timer | None = None

    def perform(
        self, task: str, arguments: dict[str, Any], blob: bytes = b"", *, seconds: float, tokenizer: Any = None
    ) -> Answer:
        """Perform a task of `utils/child_program.py` in a child.

        Args:
            arguments: what JSON can write.
            seconds: of processor time that it may take.
            tokenizer: of the Transformers and tokenizers libraries, whose key is one of the arguments then.

        Raises:
            TaskError: it failed, or its caller has left. TaskLimitError: it exceeded a limit.
        """
        caller = _caller.get() or Caller()
        with self._free:
            child = self._take()
            try:
                with caller.waiting_for(child):
                    if tokenizer is not None:
                        key, content = tokenizer_json(tokenizer)
                        if key not in child.known:
                            child.most = memory_beside(content)
                            child.perform("define", {"key": key}, content, _WALL_SECONDS)
                            child.known.add(key)
                        arguments = {"key": key, **arguments}
                    return child.perform(task, arguments, blob, seconds)
            except TaskLimitError:  # what it holds is of no use
                child.close()
                raise
            finally:
                self._give_back(child, caller.has_left)

    def start(self) -> None:
        """Start a child, unless there is one."""
        with self._lock:
            if not self._idle:
                self._idle.append(_Child(*self._arguments))

    def close(self) -> None:
        """End the idle children."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for child in idle:
            child.close()

    def forget(self) -> None:
        """Leave the children to the parent of a process that was forked."""
        self.__init__(*self._arguments)  # type: ignore[misc]

    def _take(self) -> _Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    return child
                child.close()
        try:
            return _Child(*self._arguments)
        except OSError as failure:
            raise TaskError(f"no process can be started for it: {failure.strerror or failure}") from None

    def _give_back(self, child: _Child, is_killed: bool) -> None:
        if is_killed or not child.is_alive:
            child.close()
            return
        with self._lock:
            child.idle_since = time.monotonic()
            self._idle.append(child)
            self._watch()

    def _watch(self) -> None:
        """Look after `_IDLE_SECONDS` which children to end."""
        if self._timer is None and (len(self._idle) > 1 or self._idle[-1].resident > _LARGE):
            self._timer = threading.Timer(_IDLE_SECONDS, self._end_idle)
            self._timer.daemon = True
            self._timer.start()

    def _end_idle(self) -> None:
        with self._lock:
            self._timer = None
            old = [child for child in self._idle if child.idle_since <= time.monotonic() - _IDLE_SECONDS]
            if len(old) == len(self._idle):
                small = [child for child in old if child.resident <= _LARGE]
                old = [child for child in old if child not in small[-1:]]
            self._idle = [child for child in self._idle if child not in old]
            if self._idle:
                self._watch()
        for child in old:
            child.close()


CHILDREN, RENDERERS = Children(), Children(child_program.RENDERS)
"""For long texts and grammars, and for chat templates, which seldom take a thousandth of a second."""
for each in (CHILDREN, RENDERERS):
    atexit.register(each.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=each.forget)


@lru_cache(maxsize=2)
def tokenizer_json(tokenizer: Any) -> tuple[str, bytes]:
    """Return a digest of a tokenizer's tokenizer.json, without padding and truncation, and the file."""
    backend = tokenizer.backend_tokenizer
    if backend.padding is not None or backend.truncation is not None:
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
    content = backend.to_str().encode()
    return blake2b(content, digest_size=16).hexdigest(), content
