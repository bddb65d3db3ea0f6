"""The line about memory that commands say before they load."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

import pytest

from forerun.cli import output
from forerun.cli.output import LoadingProgress, log_memory_plan
from forerun.config import MEMORY_LOG
from forerun.models import load_model
from forerun.models.loading.weights import progress_to

from .conftest import Invoke

LINE = "forerun: weights 12.4 MiB (int8), keys and values up to "


def test_generate_says_it_before_the_answer(invoke: Invoke) -> None:
    arguments = ("generate", "--model", "bundled", "--drafter", "none", "--quantize", "int8", "--max-tokens", "2", "x")
    loading, line = invoke(*arguments).stderr.splitlines()[:2]
    assert loading == "forerun: loading bundled" and line.startswith(LINE)
    assert "weights" not in invoke(*arguments, "--json").output


def test_it_is_said_within_the_block_alone() -> None:
    said: list[str] = []
    log = logging.getLogger(MEMORY_LOG)
    before = log.level, log.propagate, list(log.handlers)
    with suppress(KeyError), log_memory_plan(said.append):
        log.info("of %d", 1)
        raise KeyError
    log.info("2")
    assert said == ["of 1"] and before == (log.level, log.propagate, list(log.handlers))


def test_reading_for_long_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 100.0, list[str]()
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    progress = LoadingProgress(said.append)
    for now in (100.0, 105.0, 111.0, 112.0, 121.5):
        progress("it", int(now * 1e6), 200_000_000)
    progress("another", 1, 2)
    assert said == ["loading it: 111 MB of 200 MB", "loading it: 122 MB of 200 MB"]


def test_the_bar_is_drawn_after_two_seconds_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    progress = LoadingProgress(output.note)
    progress("it", 1_000_000, 8_000_000)
    now = 101.9
    progress("it", 2_000_000, 8_000_000)
    assert capsys.readouterr().err == ""
    now = 102.1
    progress("it", 4_000_000, 8_000_000)
    assert "4.0/8.0 MB" in capsys.readouterr().err
    progress("it", 8_000_000, 8_000_000)
    capsys.readouterr()
    progress("it", 8_000_000, 8_000_000)
    assert capsys.readouterr().err == ""


def test_a_model_reports_the_bytes_that_it_reads() -> None:
    seen: list[tuple[str, int, int]] = []
    with progress_to(lambda *each: seen.append(each)):
        load_model("bundled")
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen) and seen[-1][1] == seen[-1][2] > 1e6
    assert {name for name, *_ in seen} == {"bundled"}
