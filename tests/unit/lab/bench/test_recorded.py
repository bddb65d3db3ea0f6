"""What measurements give to the schema of results."""

from __future__ import annotations

import pytest

from forerun.lab.bench.acceptance import AcceptanceRow
from forerun.lab.bench.forward import Roof
from forerun.lab.bench.quality import QualityRow
from forerun.lab.bench.recorded import acceptance_figures, quality_figures


def test_figures_of_number_formats_have_intervals() -> None:
    row = QualityRow("prose", "int4", 900, 5.1, 5.0, 0.02, 0.01, 0.003, 0.97)
    found = {each.name: each for each in quality_figures([row])}
    assert found["perplexity_lost"].low == pytest.approx(0.02 - 0.0196) and found["agreement"].value == 0.97
    assert found["perplexity"].labels == {"workload": "prose", "method": "int4"} and found["perplexity"].samples == 900


def test_figures_of_acceptance_have_positions() -> None:
    row = AcceptanceRow("code", "suffix", 4, 0.0, 0.5, 3.0, "x", 7, (0.9, 0.8))
    found = acceptance_figures([row])
    assert [each.value for each in found] == [3.0, 0.5, 0.9, 0.8] and found[0].samples == 7
    assert found[3].labels["position"] == 2 and found[3].labels["method"] == "suffix, K=4"


def test_the_roofline_bends_where_arithmetic_begins() -> None:
    roof = Roof(bandwidth=10e9, flops={"bfloat16": 100e9})
    assert roof.seconds(1_000_000, 2e6, "bfloat16", 1) == 2e6 / 10e9
    assert roof.seconds(1_000_000, 2e6, "bfloat16", 100) == 2e8 / 100e9
    assert roof.seconds(1_000_000, 0.6e6, "int4", 100) == 0.6e6 / 10e9
