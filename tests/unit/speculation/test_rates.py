"""Acceptance by level."""

import pytest

from forerun.speculation import Rates, bin_centres, bin_of


def test_nothing_seen_is_the_prior() -> None:
    rates = Rates([0.2, 0.9])
    assert (rates.rate(0), rates.rate(1), rates.rate(7)) == (0.2, 0.9, 0.9)


def test_trials_outweigh_the_prior_and_levels_stay_apart() -> None:
    rates = Rates([0.5, 0.5], weight=2, decay=1)
    for _ in range(98):
        rates.observe(0, True)
    assert rates.rate(0) == pytest.approx(99 / 100)
    assert rates.rate(1) == 0.5
    assert rates._tried[0] == 98


def test_the_past_is_forgotten() -> None:
    rates = Rates([0.5], decay=0.9)
    for _ in range(100):
        rates.observe(0, True)
    for _ in range(30):
        rates.observe(0, False)
    assert rates.rate(0) < 0.15


def test_bins() -> None:
    assert [bin_of(value, 4) for value in (0.0, 0.24, 0.25, 0.99, 1.0)] == [0, 0, 1, 3, 3]
    assert bin_centres(2) == [0.25, 0.75]
