"""`forerun serve`, with Ray and without, as processes of their own: started, waited for, killed, and what they cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from config_keys import keys_in_file

PYTHON = os.environ.get("FORERUN_RAY_PYTHON", "") or (sys.executable if find_spec("ray") else "")
if PYTHON:
    PYTHON = str(Path(PYTHON).absolute())  # not resolved: an environment's interpreter is a link
MISSING = (
    "Ray is not installed: `make scale` makes an environment with it; or FORERUN_RAY_PYTHON=ENV/bin/python, where "
    "forerun's extra `ray` is"
)
SRC = Path(__file__).parents[3] / "src"
START = 240.0
"""Seconds in which a server must be ready."""
ENGINE = "ServeReplica:forerun:RayEngine"
_KEYS, _number = TemporaryDirectory(), count()
_TICKS = os.sysconf("SC_CLK_TCK")


def environment(threads: int = 1) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def forerun(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command, by the interpreter that has Ray; options without a flag may be among the arguments."""
    keys = Path(_KEYS.name) / f"{next(_number)}.toml"
    command = [PYTHON, "-m", "forerun", *keys_in_file(arguments, keys)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment(), **(pipes | options))


@dataclass
class Served:
    """A server in a process of its own.

    Attributes:
        lines: what it has written.
        url: without a path; empty until it is ready.
    """

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    def follow(self) -> None:
        """Read what it writes, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if '"event": "ready"' in line:
                self.url = json.loads(line[line.index("{") :])["url"]

    def engines(self) -> list[int]:
        """Processes of the engines."""
        return [process for process in self.processes() if ENGINE in name_of(process)]

    def processes(self) -> list[int]:
        """The process, and all below it."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and (parent := parent_of(int(entry.name))) is not None:
                children.setdefault(parent, []).append(int(entry.name))
        found, queue = [], [self.process.pid]
        while queue:
            found.append(queue.pop())
            queue += children.get(found[-1], [])
        return found

    def seconds(self) -> tuple[float, float]:
        """CPU seconds so far: of the engines, and of all the other processes."""
        engines = self.engines() or [self.process.pid]
        spent = {process: seconds_of(process) for process in self.processes()}
        return sum(spent.get(each, 0.0) for each in engines), sum(spent[each] for each in spent.keys() - set(engines))


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """A server that is ready, of `started`."""
    with started(*arguments) as made:
        end = time.monotonic() + START
        while not made.url:
            assert made.process.poll() is None and time.monotonic() < end, "".join(made.lines[-40:])
            time.sleep(0.05)
        yield made


@contextmanager
def started(*arguments: str) -> Iterator[Served]:
    """A server on a free port; when it ends, nothing of it may be left."""
    with forerun("serve", *arguments, "--port", "0", "--log-format", "json", start_new_session=True) as process:
        made = Served(process)
        reader = threading.Thread(target=made.follow, daemon=True)
        reader.start()
        try:
            yield made
        finally:
            everything = made.processes()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()
            gone(everything)
            reader.join(10)


def gone(processes: list[int], within: float = 30.0) -> None:
    """Wait until none of these processes is there."""
    end = time.monotonic() + within
    while left := [process for process in processes if parent_of(process) is not None and name_of(process)]:
        assert time.monotonic() < end, [name_of(process) for process in left]
        time.sleep(0.1)


def name_of(process: int) -> str:
    """What it is called; empty for one that is gone or is a zombie."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def parent_of(process: int) -> int | None:
    stat = _stat(process)
    return None if stat is None else int(stat[1])


def seconds_of(process: int) -> float:
    """CPU seconds of a process so far."""
    stat = _stat(process)
    return 0.0 if stat is None else (int(stat[11]) + int(stat[12])) / _TICKS


def _stat(process: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
