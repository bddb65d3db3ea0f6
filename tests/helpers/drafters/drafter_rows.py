"""The drafters of the table as parameters of a test."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.config import BUNDLED_MODELS, BUNDLED_OTHER_VOCAB
from forerun.drafters import DRAFTERS

TWINS = ("eagle-tree", "medusa-tree", "mtp")
"""Drafters that keep their sequences by the code of another one: eagle, medusa."""


def rows(slow: tuple[str, ...] = ()) -> list[Any]:
    """All names of the table, some of which run with the slow tests.

    slow: `TWINS` where the test is of what a drafter keeps from step to step, not of what it drafts. A drafter that
        is new in the table runs always.
    """
    there = BUNDLED_MODELS[BUNDLED_OTHER_VOCAB].exists()
    missing = pytest.mark.skipif(not there, reason="its draft is not trained")
    marks = {"cross-vocab": [missing]} | {name: [pytest.mark.slow] for name in slow}
    return [pytest.param(name, marks=marks.get(name, [])) for name in DRAFTERS]
