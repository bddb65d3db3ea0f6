"""The predictor, held to the textbook."""

from __future__ import annotations

import pytest

from forerun.errors import ConfigError
from forerun.speculation.predictor import ChainAcceptance, CostsByK, SpeedPrediction, break_even, expected_tokens


def costs(plain: float, verify: float, draft: float, most: int = 8, rest: float = 0.0) -> CostsByK:
    """A target whose forward takes `verify` whatever its rows, and drafts of so many seconds a token."""
    counts = range(most + 1)
    return CostsByK(plain, [plain, *[verify] * most], [draft * count for count in counts], [rest for _ in counts])


def test_the_textbooks_step_takes_85_ms_where_plain_decoding_takes_250() -> None:
    textbook = costs(plain=0.050, verify=0.060, draft=0.025 / 5)
    assert textbook.seconds(5) == pytest.approx(0.085)
    assert textbook.speedup(length=5, num_draft_tokens=5) == pytest.approx(0.250 / 0.085)
    assert round(textbook.speedup(5, 5), 1) == 2.9


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"), [(0.75, 4, 3.05), (0.4, 4, 1.65), (0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 1, 1.5)]
)
def test_expected_tokens_are_those_of_the_geometric_sum(alpha: float, k: int, tokens: float) -> None:
    assert expected_tokens(alpha, k) == pytest.approx(tokens, abs=0.005)
    summed = 1 + sum(alpha**power for power in range(1, k + 1))
    assert expected_tokens(alpha, k) == pytest.approx(summed)
    assert 1 + sum(ChainAcceptance((alpha,)).gains(k)) == pytest.approx(summed)


def test_acceptance_by_position_is_multiplied_up() -> None:
    assert ChainAcceptance((0.8, 0.5)).gains(4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    for wrong in ((), (1.2,), (-0.1, 0.5), (float("nan"),)):
        with pytest.raises(ConfigError, match="acceptance is"):
            ChainAcceptance(wrong)


def test_a_prediction_is_the_expected_length_over_the_steps_seconds() -> None:
    some = costs(plain=1.0, verify=1.2, draft=0.1, rest=0.05)
    predicted = SpeedPrediction.of(some, ChainAcceptance((0.7,)).gains(8))
    for each in predicted.by_k:
        assert each.tokens == pytest.approx(expected_tokens(0.7, each.num_draft_tokens))
        assert each.speedup == pytest.approx(some.speedup(each.tokens, each.num_draft_tokens))
    assert predicted.best is not None
    assert predicted.best.speedup == max(each.speedup for each in predicted.by_k)


def test_at_break_even_the_speed_is_that_of_plain_decoding() -> None:
    some = costs(plain=1.0, verify=1.3, draft=0.2)
    for k in (1, 2, 5):
        edge = break_even(some, k)
        assert edge is not None
        assert some.speedup(expected_tokens(edge, k), k) == pytest.approx(1)
    predicted = SpeedPrediction.of(some, ChainAcceptance((0.1,)).gains(8))
    assert predicted.best is None
    assert predicted.break_even == min(each.break_even for each in predicted.by_k if each.break_even is not None)


def test_a_draft_that_costs_more_than_it_can_ever_gain_never_breaks_even() -> None:
    expensive = costs(plain=1.0, verify=1.0, draft=2.0)
    assert break_even(expensive, 3) is None
    assert SpeedPrediction.of(expensive, [1.0] * 8).break_even is None
    free = CostsByK(1.0, [1.0, 0.9], [0.0, 0.0], [0.0, 0.0])
    assert break_even(free, 1) == 0


def test_drafts_that_come_shorter_cost_fewer_rows() -> None:
    rising = CostsByK(1.0, [1.0, 2.0, 3.0], [0.0] * 3, [0.0] * 3)
    whole = SpeedPrediction.of(rising, [0.4, 0.2])
    half = SpeedPrediction.of(rising, [0.4, 0.2], accept_probs=[0.5, 0.25])
    assert half.by_k[1].seconds == pytest.approx(1 + 0.5 + 0.25) and whole.by_k[1].seconds == pytest.approx(3)
    assert half.by_k[1].speedup > whole.by_k[1].speedup
