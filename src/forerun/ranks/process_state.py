"""What can be told of a rank that does not answer: from its process, and from what it said itself."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_GRACE = 1.0
"""Seconds in which a process that closes its connections is seen to have ended, and can still say why."""


@dataclass(frozen=True, slots=True)
class Process:
    """Where a rank computes.

    Attributes:
        host: name of the machine. pid: of the process there.
    """

    host: str
    pid: int

    @classmethod
    def here(cls) -> Process:
        """This one."""
        return cls(socket.gethostname(), os.getpid())

    def state(self) -> str | None:
        """ "ended" or "stopped"; None for one that runs, or of which nothing can be known."""
        if self.host != socket.gethostname():
            return None
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "ended" if Path("/proc/self").exists() or not _answers(self.pid) else None
        except (OSError, IndexError):
            return None
        return {"Z": "ended", "X": "ended", "T": "stopped", "t": "stopped"}.get(letter)


def end_stopped(processes: Sequence[Process]) -> None:
    """Kill those that are stopped on this machine: nobody else would end them."""
    for process in processes:
        if process.state() == "stopped":
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)


def _answers(pid: int) -> bool:
    """Whether there is such a process, on systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def told(
    rank: int,
    processes: Sequence[Process],
    reason_of: Callable[[int], str | None],
    failure: str,
    timeout: float,
) -> tuple[int | None, str]:
    """The rank that is to blame, if one can be named, and a sentence about it.

    Args:
        rank: of the one that asks, of which nothing is asked.
        failure: what the transport said.
        timeout: seconds that were waited at most.
    """
    end = time.monotonic() + _GRACE
    silent = "imed out" in failure or "imeout" in failure
    while True:
        states = {other: process.state() for other, process in enumerate(processes) if other != rank}
        for other in range(len(processes)):
            said = None if other == rank else reason_of(other)
            if said is not None:
                return other, f"Rank {other} ({_place(processes[other])}) has ended: {said}"
        if silent or time.monotonic() > end:
            break
        time.sleep(0.05)
    # a stopped process explains why others ended, and an ended one why others do not answer
    for wanted in ("ended", "stopped"):
        for other, state in states.items():
            if state == wanted:
                what = (
                    "has ended without a word" if state == "ended" else f"is stopped, and was silent for {timeout:g} s"
                )
                return other, f"Rank {other} ({_place(processes[other])}) {what}."
    others = [other for other in range(len(processes)) if other != rank]
    name = f"Rank {others[0]} ({_place(processes[others[0]])})" if len(others) == 1 else f"One of ranks {others}"
    who = others[0] if len(others) == 1 else None
    if silent:
        return who, f"{name} did not answer for {timeout:g} s."
    return who, f"The connection to {name[0].lower() + name[1:]} was lost."


def _place(process: Process) -> str:
    return f"process {process.pid} on {process.host}"
