"""The arithmetic of an audit's tests and of what they would find."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2, ncx2

from forerun.lab.audit.statistics import detectable, deviation, g_test, homogeneity, more_often, power, share_found

CELLS = np.random.default_rng(1).dirichlet(np.full(64, 2.0))


def test_a_million_samples_in_64_cells() -> None:
    """0.41 % is found with probability 0.9 at a level of 1e-3; at 1e-4 it takes 0.44 %."""
    assert 0.9 < power(1e6, 63, 1e-3, 0.0041) < 0.93
    assert detectable(1e6, 63, 1e-3) == pytest.approx(0.00403, abs=2e-5)
    assert detectable(1e6, 63, 1e-4) == pytest.approx(0.00437, abs=2e-5)
    assert power(1e6, 63, 1e-4, 0.0041) == pytest.approx(0.797, abs=2e-3)
    bound = chi2.isf(1e-4, 63)
    assert power(1e6, 63, 1e-4, 0.0041) == pytest.approx(ncx2.sf(bound, 63, 4e6 * 0.0041**2))


def test_the_stated_power_is_that_of_simulations() -> None:
    """The least favourable deviation of a given total variation, and one that is not."""
    rng = np.random.default_rng(3)
    count, level = 4_000, 1e-3
    distance = detectable(count, 63, level)
    signs = np.where(np.arange(64) % 2, 1.0, -1.0)
    for weights in (np.full(64, 1 / 64), CELLS):
        moved = weights * (1 + 2 * distance * signs)
        off = moved / moved.sum()
        true = float(np.abs(off - weights).sum()) / 2
        found = np.mean([g_test(rng.multinomial(count, off), weights, 1.0).p_value < level for _ in range(100)])
        assert found > 0.8 - 3 * abs(true - distance) / distance


def test_the_level_is_kept() -> None:
    rng = np.random.default_rng(4)
    for cells, count in ((CELLS, 700), (np.array([0.5, 0.3, 0.15, 0.04, 0.01]), 300)):
        values = [g_test(rng.multinomial(count, cells), cells).p_value for _ in range(300)]
        assert 0.015 < np.mean([value < 0.05 for value in values]) < 0.09


def test_cells_that_expect_too_few_are_merged_and_nothing_is_lost() -> None:
    outcome = g_test([50, 3, 4, 5, 4, 0], [0.7, 0.08, 0.08, 0.08, 0.06, 0.0], least=9)
    assert outcome.freedom == 2 and outcome.num_samples == 66
    assert g_test([3, 2], [0.5, 0.5]).freedom == 0  # one cell is left: nothing can be said
    assert g_test([3, 2], [0.5, 0.5]).p_value == 1


def test_what_cannot_come_fails_at_once() -> None:
    assert g_test([500, 499, 1], [0.5, 0.5, 0.0]).p_value == 0
    assert g_test([5, 1], [1.0, 0.0]).p_value == 0


def test_strata_add_up() -> None:
    one, two = g_test([60, 40], [0.5, 0.5]), g_test([30, 70], [0.4, 0.6])
    both = one + two
    assert (both.freedom, both.num_samples) == (2, 200)
    assert both.statistic == pytest.approx(one.statistic + two.statistic)


def test_two_samples_against_each_other() -> None:
    rng = np.random.default_rng(5)
    same = [homogeneity(rng.multinomial(900, CELLS), rng.multinomial(400, CELLS)).p_value for _ in range(200)]
    assert 0.005 < np.mean([value < 0.05 for value in same]) < 0.11
    other = np.roll(CELLS, 1)
    assert homogeneity(rng.multinomial(900, CELLS), rng.multinomial(400, other)).p_value < 1e-4
    assert homogeneity([0, 0], [5, 6]).p_value == 1
    assert homogeneity(rng.multinomial(900, CELLS), rng.multinomial(900, CELLS)).num_samples == 450


def test_a_measured_deviation_lies_in_its_bounds() -> None:
    rng = np.random.default_rng(6)
    off = CELLS.copy()
    off[:8] *= 1.5
    off /= off.sum()
    true = float(np.abs(off - CELLS).sum()) / 2
    for count in (300, 20_000):
        found = deviation(rng.multinomial(count, off), CELLS)
        assert found.low <= true <= found.high and found.low <= found.seen
    assert deviation(rng.multinomial(10**6, off), CELLS).low > 0.8 * true


def test_counts() -> None:
    assert share_found(229) == pytest.approx(0.01, abs=1e-4)
    assert share_found(0) == 1
    assert more_often((0, 48), (20, 48)) < 1e-5
    assert more_often((20, 48), (20, 48)) > 0.3
    assert detectable(0, 3, 1e-4) == 1 and detectable(5, 3, 1e-4) == 1
