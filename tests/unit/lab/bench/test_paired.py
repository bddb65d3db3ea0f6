"""Old and new results, prompt by prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.errors import ConfigError
from forerun.lab.bench import compare_results as paired
from forerun.lab.bench.compare_results import compare_results, median_interval, verdict
from forerun.lab.bench.measure import Interval
from measured import PLAIN, QUIET, SUFFIX, forwards, generated


def verdicts(rows: list[paired.ComparedFigure]) -> dict[tuple[str, str], str]:
    return {(row.method, row.what): row.verdict for row in rows}


def test_the_same_results_are_the_same() -> None:
    found = compare_results(generated(), generated())
    assert verdicts(found) == {
        (PLAIN, "speed"): "same",
        (SUFFIX, "speed"): "same",
        (SUFFIX, "gain"): "same",
        (SUFFIX, "acceptance"): "same",
    }
    assert all(row.num_prompts == 12 and row.ratio == Interval(1, 1, 1) for row in found)


def test_a_slower_method_is_worse_and_a_faster_one_better() -> None:
    found = verdicts(compare_results(generated(), generated(slower={SUFFIX: 1.1})))
    assert found[PLAIN, "speed"] == "same"
    assert found[SUFFIX, "speed"] == found[SUFFIX, "gain"] == "worse" and found[SUFFIX, "acceptance"] == "same"
    assert verdicts(compare_results(generated(slower={SUFFIX: 1.1}), generated()))[SUFFIX, "speed"] == "better"
    assert (
        verdicts(compare_results(generated(), generated(slower={SUFFIX: 1.1}), tolerance=0.2))[SUFFIX, "speed"]
        == "same"
    )


def test_a_slow_machine_does_not_change_the_gain() -> None:
    found = compare_results(generated(), generated(slower={SUFFIX: 1.5, PLAIN: 1.5}))
    assert verdicts(found)[SUFFIX, "speed"] == "worse" and verdicts(found)[SUFFIX, "gain"] == "same"


def test_fewer_accepted_tokens_are_worse() -> None:
    (row,) = compare_results(generated(), generated(accepted=2), ["acceptance"])
    assert (row.method, row.verdict) == (SUFFIX, "worse") and row.ratio.median == pytest.approx(0.5)


def test_noise_and_few_prompts_are_inconclusive() -> None:
    assert verdicts(compare_results(generated(), generated(noise=0.3)))[SUFFIX, "speed"] == "inconclusive"
    found = compare_results(generated(4), generated(4, slower={SUFFIX: 3.0}))
    assert {row.verdict for row in found} == {"inconclusive"} and found[1].ratio.low is None


def test_times_of_another_machine_are_shown_and_not_judged() -> None:
    other = replace(generated(slower={SUFFIX: 2.0}), environment=replace(QUIET, processor="Other"))
    found = verdicts(compare_results(generated(), other))
    assert found[SUFFIX, "speed"] == found[SUFFIX, "gain"] == "not judged" and found[SUFFIX, "acceptance"] == "same"


def test_prompts_are_paired_by_what_they_are() -> None:
    old = generated()
    turned = replace(
        old,
        prompts=old.prompts[::-1],
        rows=[replace(row, prompt=len(old.prompts) - 1 - row.prompt) for row in reversed(old.rows)],
    )
    assert {row.verdict for row in compare_results(old, turned)} == {"same"}
    others = replace(old, prompts=[replace(each, digest=f"other {each.id}") for each in old.prompts])
    with pytest.raises(ConfigError, match="no prompt and method in common"):
        compare_results(old, others)
    with pytest.raises(ConfigError, match="no runs of single prompts"):
        compare_results(old, forwards())


def test_the_interval_of_a_median() -> None:
    """Of ten values the second and the ninth hold the median with 1 - 22/1024 (David and Nagaraja 2003)."""
    values = [float(each) for each in range(10)]
    assert median_interval(values, 0.97) == Interval(4.5, 1, 8)
    assert median_interval(values, 0.99) == Interval(4.5, 0, 9)
    assert median_interval(values, 0.999) == Interval(4.5, None, None)


def test_verdicts() -> None:
    assert verdict(Interval(0.9, 0.8, 0.99), 0) == "worse"
    assert verdict(Interval(0.9, 0.8, 0.99), 0.05) == "inconclusive"
    assert verdict(Interval(0.99, 0.98, 1.01), 0.05) == "same"
    assert verdict(Interval(1.0, 0.9, 1.1), 0) == "inconclusive"
