"""Which arm is chosen, and whether any is, where acceptance and costs are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forerun.config import AUTO
from forerun.lab.tune.arms import PLAIN, Trial, TuningArm, Unit
from forerun.lab.tune.ledger import Ledger, Round, run_round
from forerun.lab.tune.outcome import Answer, TuningVerdict, confirm, judge
from forerun.lab.tune.search import finalists, kept_arms, search
from forerun.speculation.predictor import SpeedPrediction
from simulated_trials import Simulated, costs

BLOCK = costs(first=0.8, later=0.05, row=0.02)
ARMS = [TuningArm("block", AUTO), *(TuningArm("block", k) for k in (1, 2, 3, 4, 6, 8))]
UNITS = [(number,) for number in range(40)]
SELECTION, REPORT = UNITS[::2], UNITS[1::2]


def tuned(
    trials: Simulated, arms: Sequence[TuningArm] = ARMS, units: Sequence[Unit] = SELECTION
) -> tuple[TuningVerdict, Ledger]:
    """The whole of it: search on one half of the prompts, the verdict from the other."""
    first, last = Ledger(), Ledger()
    found = search(trials, first, arms, units, until=40_000.0)
    confirm(trials, last, found, REPORT, until=trials.now() + 30_000.0)
    return judge(last, found, PLAIN), last


def answers(share: float, count: int) -> list[Answer]:
    edge = SpeedPrediction.of(BLOCK, [1.0] * BLOCK.most).break_even
    assert edge is not None
    return [tuned(Simulated(BLOCK, {"block": share * edge}, seed=seed))[0].answer for seed in range(count)]


@pytest.mark.parametrize(("share", "right"), [(0.9, {"off"}), (1.0, {"off", "tie"}), (1.1, {"on"})])
def test_speculation_is_judged_by_its_break_even(share: float, right: set[Answer]) -> None:
    assert set(answers(share, 1)) <= right


@pytest.mark.slow
@pytest.mark.parametrize(("share", "right"), [(0.9, {"off"}), (1.0, {"off", "tie"}), (1.1, {"on"})])
def test_in_nineteen_of_twenty_it_is_judged_rightly(share: float, right: set[Answer]) -> None:
    assert sum(answer in right for answer in answers(share, 20)) >= 19


def test_a_fixed_k_is_chosen_only_if_it_is_clearly_faster_than_the_choice_step_by_step() -> None:
    even = Simulated(costs(0.1, 0.1, 0.02), {"block": 0.8})
    assert tuned(even)[0].arm.is_auto
    slow = Simulated(costs(0.1, 0.1, 0.02), {"block": 0.8, "fast": 0.95})
    verdict, ledger = tuned(slow, [TuningArm("block", AUTO), TuningArm("fast", 8)])
    assert verdict.answer == "on" and verdict.arm == TuningArm("fast", 8)
    between = ledger.speedup(TuningArm("fast", 8), over=TuningArm("block", AUTO))
    assert between is not None and between.low is not None and between.low > 1.02


def measured(luck: Sequence[float], **per_token: Sequence[float] | float) -> tuple[Ledger, list[TuningArm]]:
    """A ledger of arms that take so much of plain decoding's time, with luck that all of them share."""
    arms, ledger = [TuningArm(name) for name in per_token], Ledger()
    for number, each in enumerate(luck):
        plain = Trial(10.0, 10)
        trials = {
            arm: Trial(10 * each * (share if isinstance(share, float) else share[number]), 10)
            for arm, share in zip(arms, per_token.values(), strict=True)
        }
        ledger.rounds.append(Round((number,), trials, [plain], dict.fromkeys(arms, plain.per_token)))
    return ledger, arms


SUFFIX = TuningArm("suffix")


UNSURE = (0.7, 1.4, 0.7, 1.4)
EVEN = (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("own", [0.8, 1.0, 1.1])
def test_where_no_difference_is_shown_the_default_is_kept(own: float) -> None:
    found = judge(*measured(UNSURE, other=0.7, suffix=own), SUFFIX)
    assert (found.answer, found.arm) == ("tie", SUFFIX)
    assert "No difference could be shown" in found.reason and "the default suffix is kept" in found.reason


def test_what_beats_plain_decoding_must_be_shown_to_beat_the_default_too() -> None:
    found = judge(*measured(EVEN, other=0.8, suffix=UNSURE), SUFFIX)
    assert (found.answer, found.arm) == ("tie", SUFFIX) and "other 1.31 [" in found.reason
    found = judge(*measured(EVEN, other=0.8, suffix=0.9), SUFFIX)
    assert (found.answer, found.arm) == ("on", TuningArm("other")) and "Over the default suffix: 1.12" in found.reason


def test_plain_decoding_is_kept_where_the_default_is_slower_or_cannot_be_tried() -> None:
    found = judge(*measured(EVEN, other=UNSURE, suffix=1.2), SUFFIX)
    assert (found.answer, found.arm) == ("tie", PLAIN) and "faster than the default suffix" in found.reason
    found = judge(*measured(UNSURE, other=0.9), SUFFIX)
    assert (found.answer, found.arm) == ("tie", PLAIN) and "plain decoding is kept" in found.reason


def test_the_interval_is_of_prompts_that_had_no_part_in_the_choice() -> None:
    trials = Simulated(costs(0.1, 0.1, 0.02), {"block": 0.8})
    _, ledger = tuned(trials)
    assert {round_.unit for round_ in ledger.rounds} <= set(REPORT)
    searched = trials.ran[: next(place for place, (_, unit) in enumerate(trials.ran) if unit in REPORT)]
    assert {unit for _, unit in searched} <= set(SELECTION)


def test_a_drafter_that_breaks_is_left_out_and_the_others_go_on() -> None:
    trials = Simulated(costs(0.1, 0.1, 0.02), {"block": 0.8, "frail": 0.99}, fails={"frail": 2})
    verdict, _ = tuned(trials, [TuningArm("frail", AUTO), TuningArm("frail", 4), *ARMS])
    assert verdict.answer == "on" and verdict.arm.drafter == "block"
    ledger = Ledger()
    search(
        Simulated(BLOCK, {}, fails={"frail": 0}),
        ledger,
        [TuningArm("frail", 4), TuningArm("block", 4)],
        UNITS,
        until=10_000.0,
    )
    assert ledger.failed == {TuningArm("frail", 4): "it broke"}


def test_one_that_breaks_while_it_is_confirmed_is_not_chosen() -> None:
    arms = [TuningArm("frail", AUTO), TuningArm("block", 4)]
    trials = Simulated(costs(0.1, 0.1, 0.02), {"block": 0.8, "frail": 0.99}, fails={"frail": 3})
    ledger = Ledger()
    confirm(trials, ledger, arms, REPORT, until=20_000.0)
    verdict = judge(ledger, arms, arms[0])
    assert verdict.answer == "on" and verdict.arm == TuningArm("block", 4)


def test_where_nothing_can_win_it_ends_early() -> None:
    trials = Simulated(BLOCK, {"block": 0.05})
    verdict, _ = tuned(trials)
    assert verdict.answer == "off" and verdict.arm == PLAIN
    assert "Do not speculate" in verdict.reason
    assert len(trials.ran) < 160


def test_the_time_is_kept() -> None:
    trials = Simulated(BLOCK, {"block": 0.6})
    ledger = Ledger()
    search(trials, ledger, ARMS, SELECTION, until=3_000.0)
    assert trials.now() < 3_000.0 + 2 * 256 * 2
    assert ledger.rounds[-1].beside.keys() == ledger.rounds[-1].trials.keys()


def test_an_interrupt_leaves_what_is_known() -> None:
    class Interrupted(Simulated):
        def run(self, arm, unit):  # type: ignore[no-untyped-def]
            if len(self.ran) == 3:
                raise KeyboardInterrupt
            return super().run(arm, unit)

    ledger = Ledger()
    with pytest.raises(KeyboardInterrupt):
        run_round(Interrupted(BLOCK, {"block": 0.6}), ledger, UNITS[0], ARMS)
    assert list(ledger.rounds[0].trials) == ARMS[:2]
    assert ledger.speedup(ARMS[0]) is not None


def test_the_better_half_stays_and_the_finalists_with_it() -> None:
    ranked = [TuningArm("a", 1), TuningArm("b", 2), TuningArm("c", 3), TuningArm("d", AUTO), TuningArm("e", AUTO)]
    assert kept_arms(ranked) == [*ranked[:3], TuningArm("d", AUTO)]
    mixed = [TuningArm("a", 1), TuningArm("b", 2), TuningArm("c", AUTO), TuningArm("d", AUTO), TuningArm("a", AUTO)]
    assert kept_arms(mixed) == [*mixed[:3], TuningArm("a", AUTO)]
    assert finalists(ranked) == [TuningArm("a", 1), TuningArm("d", AUTO)]


def test_promising_arms_join_after_the_first_look() -> None:
    trials = Simulated(costs(0.1, 0.1, 0.02), {"block": 0.9})
    ledger = Ledger()
    found = search(
        trials, ledger, [TuningArm("block", 1)], SELECTION, until=20_000.0, more=lambda _: [TuningArm("block", 8)]
    )
    assert found == [TuningArm("block", 8), TuningArm("block", 1)]
