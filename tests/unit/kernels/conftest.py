"""The native library, once with each instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forerun.kernels.native import native
from forerun.kernels.native.library import INSTRUCTIONS, Library


@pytest.fixture(params=INSTRUCTIONS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = native()
    if found is None:
        pytest.skip("there are no native kernels here")
    before = found.instructions
    if not found.use_instructions(request.param):
        pytest.skip(f"the processor lacks {request.param}")
    yield found
    found.use_instructions(before)
