"""What is measured beside the roofline."""

from __future__ import annotations

import pytest
import torch

from forerun.lab.bench.forward import measure_roof
from forerun.lab.plan import measured
from forerun.lab.plan.measured import fit, product_flops, read_bandwidth


def test_layers_and_rows_are_told_apart_by_models_of_different_depth() -> None:
    samples = [(layers, rows, layers * (3.0 + 0.5 * rows)) for layers in (2, 10) for rows in (1, 4, 8)]
    assert fit(samples) == pytest.approx((3.0, 0.5))


def test_neither_of_them_is_negative() -> None:
    falling = [(2, 1, 10.0), (2, 8, 3.0), (8, 1, 40.0), (8, 8, 12.0)]
    layer, row = fit(falling)
    assert layer > 0 and row == 0
    assert fit([(2, 1, -1.0), (4, 8, -2.0)]) == (0.0, 0.0)


def test_what_the_machine_reads_and_computes_is_measured() -> None:
    assert read_bandwidth(1) > 0 and product_flops(torch.float32) > 0


def test_a_roofline_multiplies_no_bfloat16_where_that_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[torch.dtype] = []

    def matmul(matrix: torch.Tensor, other: torch.Tensor) -> None:
        multiplied.append(matrix.dtype)

    monkeypatch.setattr(torch, "matmul", matmul)
    for is_quick, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(measured, "is_quick_at_bfloat16", lambda found=is_quick: found)
        multiplied.clear()
        assert measure_roof(["bfloat16", "int8"]).flops.keys() == {"bfloat16"}
        assert set(multiplied) == {dtype}
