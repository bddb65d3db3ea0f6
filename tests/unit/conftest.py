"""The native kernels with each instruction set; numbers of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kernel_cases


@pytest.fixture(params=kernel_cases.SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernel_cases.using(request.param):
        yield request.param


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Compute with so many."""
    with kernel_cases.threads(request.param):
        yield request.param
