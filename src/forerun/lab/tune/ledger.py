"""The trials so far: rounds, in which each arm is paired with plain decoding, and the speedups that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean

from forerun.lab.bench.measure import LEVEL, Interval
from forerun.lab.tune.arms import PLAIN, ArmFailedError, Trial, Trials, TuningArm, Unit


def ratio_of_sums(numerator: Sequence[float], denominator: Sequence[float], confidence: float = LEVEL) -> Interval:
    """Return the sum of the numerators over that of the denominators, with Student's interval of the linearised
    logarithm.

    Entries of one index are a pair, which counts by its seconds, as it does in a day's work. The logarithm, since a
    few prompts that gain very much widen an interval upwards, which is no reason to doubt that there is a gain. One
    pair alone has no interval.
    """
    count = len(numerator)
    over = sum(denominator)
    ratio = sum(numerator) / over
    if count < 2:
        return Interval(ratio, None, None)
    residuals = [a - ratio * b for a, b in zip(numerator, denominator, strict=True)]
    error = math.sqrt(count / (count - 1) * sum(each**2 for each in residuals)) / over
    reach = student_quantile(0.5 + confidence / 2, count - 1) * error / ratio
    return Interval(ratio, ratio * math.exp(-reach), ratio * math.exp(reach))


def exceeds(found: Interval, bound: float) -> bool:
    """Return whether all of the interval lies above the bound."""
    return found.low is not None and found.low > bound


def stays_below(found: Interval, bound: float) -> bool:
    """Return whether all of the interval lies below the bound."""
    return found.high is not None and found.high < bound


def student_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's distribution, by its expansion around the normal one (Abramowitz and Stegun,
    26.7.5); exact for one and two degrees of freedom, for which that is too short."""
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z = NormalDist().inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / math.pow(freedom, power) for power, term in enumerate(terms))


ARMS_BETWEEN = 6
"""Arms that are tried between two trials of plain decoding: machines drift."""


@dataclass(slots=True)
class Round:
    """One unit, answered by plain decoding and several arms in turn.

    Attributes:
        trials: of each arm.
        plain: the trials of plain decoding.
        beside: seconds per token of plain decoding before and after each arm, their mean.
    """

    unit: Unit
    trials: dict[TuningArm, Trial] = field(default_factory=dict)
    plain: list[Trial] = field(default_factory=list)
    beside: dict[TuningArm, float] = field(default_factory=dict)

    def cost(self, arm: TuningArm) -> float:
        """Return the arm's seconds at the machine's average speed during the round."""
        mean = sum(trial.seconds for trial in self.plain) / len(self.plain)
        if arm == PLAIN:
            return mean
        return mean * self.trials[arm].per_token / self.beside[arm]


@dataclass(slots=True)
class Ledger:
    """All rounds, and the arms that failed.

    Attributes:
        failed: arm -> reason.
        confidence: of the intervals.
    """

    rounds: list[Round] = field(default_factory=list)
    failed: dict[TuningArm, str] = field(default_factory=dict)
    confidence: float = LEVEL

    def speedup(self, arm: TuningArm, over: TuningArm = PLAIN, level: int | None = None) -> Interval | None:
        """Return the tokens per second of one arm over another's, on the units that both were tried on; None without
        any.

        level: of load; None: all of them.
        """
        sums: dict[Unit, list[float]] = {}  # a unit that was tried several times is one pair
        for round_ in self.rounds:
            if arm in round_.trials and (over == PLAIN or over in round_.trials) and level in (None, len(round_.unit)):
                pair = sums.setdefault(round_.unit, [0.0, 0.0])
                pair[0] += round_.cost(over)
                pair[1] += round_.cost(arm)
        if not sums:
            return None
        over_plain, own = zip(*sums.values(), strict=True)
        return ratio_of_sums(over_plain, own, self.confidence)

    def first_token(self, arm: TuningArm) -> float:
        """Return the mean seconds to the first token, at plain decoding's prompts: an arm may have been tried on some
        of them only."""
        plain = [trial.first_seconds for trial in self.trials(PLAIN)]
        beside = [round_ for round_ in self.rounds if arm in round_.trials]
        if arm == PLAIN or not beside:
            return fmean(plain) if plain else 0.0
        own = sum(round_.trials[arm].first_seconds for round_ in beside)
        return fmean(plain) * own / max(1e-9, sum(round_.plain[0].first_seconds for round_ in beside))

    def trials(self, arm: TuningArm) -> list[Trial]:
        """Return the trials of an arm, in their order."""
        if arm == PLAIN:
            return [trial for round_ in self.rounds for trial in round_.plain]
        return [round_.trials[arm] for round_ in self.rounds if arm in round_.trials]

    def ranked(self, arms: Iterable[TuningArm]) -> list[TuningArm]:
        """Sort the arms that did not fail and were tried, the fastest first."""
        speeds = {arm: found.median for arm in arms if arm not in self.failed and (found := self.speedup(arm))}
        return sorted(speeds, key=speeds.__getitem__, reverse=True)


def run_round(
    trials: Trials,
    ledger: Ledger,
    unit: Unit,
    arms: Sequence[TuningArm],
    until: float = float("inf"),
    after: Callable[[TuningArm], None] = lambda _: None,
) -> bool:
    """Try each arm on the unit, unless the time is up before, and add the trials to the ledger. Return whether all were
    tried.

    until: on the clock of the trials.
    """
    round_ = Round(unit)
    last: list[TuningArm] = []  # since the last trial of plain decoding
    whole = True
    try:
        round_.plain.append(trials.run(PLAIN, unit))
        for arm in arms:
            if arm in ledger.failed:
                continue
            if trials.now() >= until:
                whole = False
                break
            try:
                round_.trials[arm] = trials.run(arm, unit)
            except ArmFailedError as error:
                ledger.failed[arm] = error.reason
                continue
            last.append(arm)
            after(arm)
            if len(last) == ARMS_BETWEEN:
                _pair(round_, last, trials.run(PLAIN, unit))
                last = []
        if last:
            _pair(round_, last, trials.run(PLAIN, unit))
            last = []
    finally:  # of an interrupt, too: what is known stays
        if last:
            _pair(round_, last, round_.plain[-1])
        if round_.trials:
            ledger.rounds.append(round_)
    return whole


def _pair(round_: Round, arms: Sequence[TuningArm], after: Trial) -> None:
    """Pair these arms with the mean of plain decoding before and after them."""
    before = round_.plain[-1]
    for arm in arms:
        round_.beside[arm] = (before.per_token + after.per_token) / 2
    if after is not before:
        round_.plain.append(after)
