"""Two results of the same prompts, old and new: ratios paired by prompt, and whether the new ones are worse.

A ratio is the median over prompts of new over old, after the median over each prompt's rounds. Its interval is that of
order statistics: the binomial distribution says which of the sorted ratios hold the median between them, whatever the
ratios' distribution is. All intervals of one comparison hold together with 95 % (Bonferroni), so that many methods do
not make a false alarm likely. With too few prompts for that, there is no interval, and the verdict is inconclusive.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from forerun.errors import ConfigError
from forerun.lab.bench.compare import PLAIN
from forerun.lab.bench.measure import LEVEL, Interval
from forerun.lab.bench.tables import Columns
from forerun.lab.results.schema import Results, RunRow

SPEED = "speed"
GAIN = "gain"
ACCEPTANCE = "acceptance"
WHAT = (SPEED, GAIN, ACCEPTANCE)
"""Tokens per second; those over plain decoding's in the same file, which another machine changes less; tokens per
forward."""
WORSE = "worse"
BETTER = "better"
SAME = "same"
INCONCLUSIVE = "inconclusive"
NOT_JUDGED = "not judged"

_Key = tuple[str, str, float, str]
"""Workload, prompt, temperature, method."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of one method.

    Attributes:
        method: its name, with the temperature where it is not greedy.
        what: of WHAT.
        ratio: new over old, above 1 where the new one is better; without bounds where there are too few prompts.
        num_prompts: that both hold.
        verdict: WORSE, BETTER, SAME, INCONCLUSIVE, or NOT_JUDGED where the machines differ.
    """

    method: str
    what: str
    ratio: Interval
    num_prompts: int
    verdict: str


COLUMNS: Columns[ComparedFigure] = {
    "method, figure": lambda row: f"{row.method}: {row.what}",
    "new / old": lambda row: f"{row.ratio:.3f}",
    "prompts": lambda row: str(row.num_prompts),
    "verdict": lambda row: row.verdict,
}


def compare_results(
    old: Results, new: Results, figures: Sequence[str] = WHAT, tolerance: float = 0.0
) -> list[ComparedFigure]:
    """Compare each method and figure that both files have.

    Args:
        figures: of WHAT.
        tolerance: a share by which a figure may be worse.

    Raises:
        ConfigError: they are not of generations, or have no prompt and method in common.
    """
    for each in (old, new):
        if not each.rows:
            raise ConfigError(
                f"{each.source or each.kind}: it holds no runs of single prompts, which are what is compared. Give two "
                "files of `forerun bench generate --json FILE`."
            )
    pairs = _pairs(_by_key(old), _by_key(new))
    if not pairs:
        raise ConfigError(
            f"{old.source or 'The first'} and {new.source or 'the second'} have no prompt and method in common. "
            "Measure the same prompts with the same methods."
        )
    judged = old.environment.machine == new.environment.machine
    ratios: dict[tuple[str, str], list[float]] = {}
    for what in figures:
        for method, (before, after) in pairs.items():
            if found := _RATIOS[what](method, before, after, pairs):
                ratios[method, what] = found
    level = 1 - (1 - LEVEL) / max(1, len(ratios))
    return [
        ComparedFigure(
            method,
            what,
            (interval := median_interval(found, level)),
            len(found),
            verdict(interval, tolerance) if judged or what == ACCEPTANCE else NOT_JUDGED,
        )
        for (method, what), found in ratios.items()
    ]


def median_interval(values: Sequence[float], level: float) -> Interval:
    """Return the median and the two sorted values that hold the true one between them with at least that probability;
    without bounds where there are too few values."""
    ordered = sorted(values)
    count = len(values)
    cut = 0
    below = 0.0
    while cut < count // 2:
        below += comb(count, cut) / 2**count
        if 2 * below > 1 - level:
            break
        cut += 1
    median = statistics.median(ordered)
    if cut == 0:
        return Interval(median, None, None)
    return Interval(median, ordered[cut - 1], ordered[count - cut])


def verdict(ratio: Interval, tolerance: float) -> str:
    """Judge a ratio that is above 1 where the new result is better."""
    if ratio.low is None or ratio.high is None:
        return INCONCLUSIVE
    if ratio.high < 1 - tolerance:
        return WORSE
    if ratio.low > 1 + tolerance:
        return BETTER
    return SAME if ratio.low >= 1 - tolerance and ratio.high <= 1 + tolerance else INCONCLUSIVE


_Runs = dict[tuple[str, str, float], list[RunRow]]
_Pair = tuple[_Runs, _Runs]
"""A method's runs by prompt, in both files, of the prompts that both have."""


def _by_key(results: Results) -> dict[_Key, list[RunRow]]:
    found: dict[_Key, list[RunRow]] = defaultdict(list)
    for row in results.rows:
        prompt = results.prompts[row.prompt]
        found[prompt.workload, prompt.digest or prompt.id, row.temperature, row.method].append(row)
    return found


def _pairs(old: Mapping[_Key, list[RunRow]], new: Mapping[_Key, list[RunRow]]) -> dict[str, _Pair]:
    found: dict[str, _Pair] = {}
    for workload, prompt, temperature, method in old:
        key = workload, prompt, temperature, method
        if key in new:
            name = method if temperature == 0 else f"{method}, temperature {temperature:g}"
            before, after = found.setdefault(name, ({}, {}))
            before[key[:3]] = old[key]
            after[key[:3]] = new[key]
    return found


def _speed(method: str, before: _Runs, after: _Runs, _: Mapping[str, _Pair]) -> list[float]:
    return [_seconds(before[key]) / _seconds(after[key]) for key in before]


def _gain(method: str, before: _Runs, after: _Runs, pairs: Mapping[str, _Pair]) -> list[float]:
    plain = pairs.get(method.replace(method.partition(", temperature ")[0], PLAIN))
    if plain is None or method.startswith(PLAIN):
        return []
    shared = [key for key in before if key in plain[0]]
    return [
        (_seconds(plain[1][key]) / _seconds(after[key])) / (_seconds(plain[0][key]) / _seconds(before[key]))
        for key in shared
    ]


def _acceptance(method: str, before: _Runs, after: _Runs, _: Mapping[str, _Pair]) -> list[float]:
    if not any(row.num_drafted for rows in (*before.values(), *after.values()) for row in rows):
        return []
    return [_length(after[key]) / _length(before[key]) for key in before]


_RATIOS: Mapping[str, Callable[[str, _Runs, _Runs, Mapping[str, _Pair]], list[float]]] = {
    SPEED: _speed,
    GAIN: _gain,
    ACCEPTANCE: _acceptance,
}


def _seconds(rows: Iterable[RunRow]) -> float:
    return max(statistics.median(row.seconds_per_token for row in rows), 1e-12)


def _length(rows: Iterable[RunRow]) -> float:
    return statistics.fmean(row.acceptance_length or 1.0 for row in rows)
