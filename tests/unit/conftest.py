"""The native kernels with each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forerun.config import INSTRUCTIONS
from kernel_cases import using


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param
