"""`forerun serve` as a process of its own, for as long as it is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forerun.bench.peers.pipe import THREAD_VARIABLES
from forerun.errors import ConfigError

LIMIT = 600.0
"""Seconds in which it must have loaded."""
_LOOK_EVERY = 0.1
_END = 20.0
"""Seconds that it has to end."""


@contextmanager
def started(
    arguments: Sequence[str], threads: int | None, say: Callable[[str], None] = lambda _: None
) -> Iterator[str]:
    """The address of a server on a free port, until the context ends.

    Args:
        arguments: of `forerun serve`.
        threads: of torch in it; None leaves it.

    Raises:
        ConfigError: it does not come up.
    """
    command = [sys.executable, "-m", "forerun", "serve", *arguments, "--port", "0"]
    say(f"starting forerun serve {' '.join(arguments)}")
    environment = dict(os.environ)
    if threads is not None:
        environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + LIMIT
    while True:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if (url := _ready(line)) is not None:
                return url
        code = process.poll()
        if code is not None or time.monotonic() > end:
            why = f"ended with exit code {code}" if code is not None else f"has not loaded within {LIMIT:g} seconds"
            last = " ".join(lines[-3:])[-600:]
            raise ConfigError(f"`forerun serve` {why}. The last that it said: {last or 'nothing'}")
        time.sleep(_LOOK_EVERY)


def _ready(line: str) -> str | None:
    """The address in the log line that tells it."""
    if not line.startswith("{"):
        return None
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return str(told["url"]) if told.get("event") == "ready" else None
