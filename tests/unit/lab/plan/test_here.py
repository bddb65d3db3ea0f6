"""What is measured beside the roofline."""

from __future__ import annotations

import pytest
import torch

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
