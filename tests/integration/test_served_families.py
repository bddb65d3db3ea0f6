"""docs/models.md says what is so."""

from __future__ import annotations

import re

import pytest
import transformers

from families import DESCRIBED
from served_families import END, OTHERS, PAGE, START, serve


def rows() -> dict[str, str]:
    lines = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0].strip().splitlines()[2:]
    return {line.split("|")[2].strip(" `"): line for line in lines}


def test_every_family_has_a_row() -> None:
    assert list(rows()) == OTHERS


def test_every_family_of_the_fused_decoder_is_timed() -> None:
    lines = PAGE.read_text(encoding="utf-8").partition("<!-- table: benchmarks/decoders.py -->")[2].splitlines()
    assert [line.split("|")[1].strip(" `") for line in lines if line.startswith("| `")][: len(DESCRIBED)] == [
        *DESCRIBED
    ]


FEW = ("codegen", "mpt", "bloom", "jamba")


def without_module(row: str) -> str:
    """A row but for the module whose rows differ, which depends on the processor and its libraries."""
    return re.sub(r"rows (alone|computed together): .*", r"rows \1", row)


VERSION = re.search(r"Transformers (\d+\.\d+)\.", PAGE.read_text(encoding="utf-8"))
assert VERSION is not None


@pytest.mark.skipif(
    not transformers.__version__.startswith(f"{VERSION[1]}."), reason=f"the table is of Transformers {VERSION[1]}"
)
@pytest.mark.parametrize(
    "family", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS if name not in FEW)]
)
def test_the_row_is_true(family: str) -> None:
    assert without_module(serve(family).row()) == without_module(rows()[family])
