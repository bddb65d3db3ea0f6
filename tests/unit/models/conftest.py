"""The native kernels with each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forerun.config import INSTRUCTIONS
from forerun.kernels.native import native


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    library = native()
    if library is None:
        pytest.skip("there are no native kernels here")
    before = library.instructions
    if not library.use_instructions(request.param):
        pytest.skip(f"the processor lacks {request.param}")
    yield request.param
    library.use_instructions(before)
