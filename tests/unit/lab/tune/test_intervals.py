"""Intervals of paired ratios."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.lab.tune.ledger import ratio_of_sums, student_quantile


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_students_quantiles(freedom: int, value: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(value, rel=0.004)


def test_a_ratio_of_sums_weighs_pairs_by_their_seconds() -> None:
    found = ratio_of_sums([10.0, 1.0], [5.0, 1.0])
    assert found.median == pytest.approx(11 / 6)
    assert found.low is not None and found.high is not None and found.low < 11 / 6 < found.high
    assert ratio_of_sums([2.0], [1.0]).low is None
    even = ratio_of_sums([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert even.low == pytest.approx(2) and even.high == pytest.approx(2)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        plain = rng.lognormal(0, 0.3, 8)
        arm = plain / 1.1 * rng.lognormal(0, 0.05, 8)
        found = ratio_of_sums(plain.tolist(), arm.tolist())
        truth = 1.1 * np.exp(-(0.05**2) / 2)
        assert found.low is not None and found.high is not None
        held += found.low <= truth <= found.high
    assert 920 <= held <= 975


def test_a_few_prompts_that_gain_much_do_not_hide_that_all_gain() -> None:
    plain = [1.0] * 8
    found = ratio_of_sums(plain, [each / gain for each, gain in zip(plain, [1.3, 1.2, 1.4, 1.2, 1.3, 5, 6, 1.3])])
    assert found.median == pytest.approx(1.58, abs=0.01)
    assert found.low is not None and found.high is not None
    assert 1.05 < found.low < found.high < 2.4
    assert found.high / found.median == pytest.approx(found.median / found.low)
