"""Hooks of tests on a CUDA device: once it has failed, every later test of the process would fail by that alone.

A worker of pytest-xdist ends then, and another one goes on with a device that works; a single process stops.
"""

from __future__ import annotations

import os

import pytest
import torch

_failed: set[str] = set()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """After each phase of a test."""
    if call.excinfo is not None and _has_failed():
        _failed.add(item.nodeid)
        if not hasattr(item.config, "workerinput"):
            item.session.shouldstop = "the CUDA device has failed, and nothing passes in this process any more"


def pytest_runtest_logfinish(nodeid: str) -> None:
    """After the test's reports were sent."""
    if nodeid in _failed and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(1)


def _has_failed() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
