"""The line about memory that commands say before they load."""

from __future__ import annotations

import logging
from contextlib import suppress

from forerun.cli.output import log_memory_plan
from forerun.config import MEMORY_LOG

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
