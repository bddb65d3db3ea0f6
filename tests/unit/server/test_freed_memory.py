"""When freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
import threading
import time

import httpx
import pytest

from forerun.server import run as freed_memory
from forerun.server.run import FreedMemory
from forerun.utils import machine
from serving import LIMIT, fake_llm, serving, until


def test_only_after_requests_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(freed_memory, "glibc_function", lambda _: given.append)
    memory, now = FreedMemory(), time.monotonic()
    later = [now + place * freed_memory._EVERY for place in range(1, 6)]
    monkeypatch.setattr(freed_memory.time, "monotonic", lambda: later[0])

    def num_given(*num_active: int) -> int:
        for each in num_active:
            memory.tick(each)
            threads = [thread for thread in threading.enumerate() if thread.name == "malloc_trim"]
            [thread.join(LIMIT) for thread in threads]
        return len(given)

    assert num_given(0) == 0  # nobody has been there
    assert num_given(1) == num_given(1) == 1
    later.pop(0)
    assert num_given(0) == num_given(0) == 2  # the last of them has gone
    later.pop(0)
    assert num_given(0) == 2


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: object())
    memory = FreedMemory()
    memory._last = -math.inf
    memory.tick(1)
    assert memory._last == -math.inf


def test_the_server_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(freed_memory, "_EVERY", 0.0)
    monkeypatch.setattr(freed_memory, "glibc_function", lambda _: lambda _: given.append(1) or 1)
    with serving(fake_llm()) as served:
        body = {"prompt": "hello", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=LIMIT):
            until(lambda: bool(given))


SHARED = """
import ctypes, threading
from forerun.server.run import share_one_arena
share_one_arena()
threads = [threading.Thread(target=lambda: bytearray(10_000)) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
ctypes.CDLL(None).malloc_stats()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="another C library than glibc")
def test_threads_share_one_arena() -> None:
    told = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=True)
    assert told.stderr.count("Arena ") == 1
