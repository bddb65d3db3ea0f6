"""Processes are ended with what they have started, and watched where no kernel bounds their memory."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from forerun.utils.processes import end_group, watched_memory

SYSTEMS = pytest.mark.parametrize("system", [sys.platform, "win32"])
LIMIT = 60.0
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""
LARGE = "import time; held = bytearray(b'x') * (200 << 20); time.sleep(600)"
SMALL = "import sys; sys.stdin.read()"
MIB = 2**20


@SYSTEMS
def test_a_process_is_ended_with_what_it_has_started(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        monkeypatch.setattr(sys, "platform", system)
        end_group(process)
        assert process.wait(LIMIT) < 0
    end = time.monotonic() + LIMIT
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)
    end_group(process)  # nothing is left of it


def test_a_process_that_holds_too_much_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with subprocess.Popen([sys.executable, "-c", LARGE]) as process, watched_memory(process, 100 * MIB) as exceeded:
        assert process.wait(LIMIT) < 0
    assert exceeded.is_set()


def test_a_process_that_holds_less_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    command = [sys.executable, "-c", SMALL]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        with watched_memory(process, 100 * MIB) as exceeded:
            time.sleep(0.1)  # some looks
        process.communicate()
    assert process.returncode == 0 and not exceeded.is_set()
