"""The statistics under every figure. Nothing here is timed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.kernels.provenance import describe_machine, machine_facts
from forerun.lab.bench.measure import Interval, bootstrap, interleave, is_cost_padded, ratio


def test_methods_take_turns_after_the_warm_up() -> None:
    calls: list[str] = []
    counted: list[str] = []

    def method(name: str) -> str:
        calls.append(name)
        return name.upper()

    runs = interleave(
        {"a": lambda: method("a"), "b": lambda: method("b")},
        rounds=2,
        warmup=1,
        after=lambda name, _: counted.append(name),
    )
    assert calls == ["a", "b"] * 3
    assert counted == ["a", "b"] * 2
    assert [run.value for run in runs["b"]] == ["B", "B"]
    assert all(run.seconds >= 0 for run in runs["a"])


def test_a_median_lies_in_its_interval() -> None:
    interval = bootstrap([1.0, 2.0, 3.0, 4.0, 100.0])
    assert interval.median == 3
    assert 1 <= interval.low <= 3 <= interval.high <= 100
    assert interval == bootstrap([1.0, 2.0, 3.0, 4.0, 100.0])


def test_equal_values_have_no_width() -> None:
    assert bootstrap([2.5] * 4) == Interval(2.5, 2.5, 2.5)
    assert bootstrap([7.0]) == Interval(7, None, None)  # nothing is known of how it varies


def test_no_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="No values"):
        bootstrap([])


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(7)
    covered = 0
    for _ in range(200):
        interval = bootstrap(generator.normal(10, 1, size=30).tolist(), resamples=400)
        covered += interval.low <= 10 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_ratios_are_taken_within_a_round() -> None:
    # The machine slows down tenfold over the rounds, both methods alike.
    slow = [2.0, 20.0, 6.0]
    fast = [1.0, 10.0, 3.0]
    assert ratio(slow, fast) == Interval(2, 2, 2)
    with pytest.raises(ValueError):
        ratio(slow, fast[:2])


def test_an_interval_formats_itself() -> None:
    assert f"{Interval(1.534, 1.49, 1.577):.2f}" == "1.53 [1.49, 1.58]"
    assert f"{Interval(1.534, None, None):.2f}" == "1.53 [–]"


def test_the_machine_is_described() -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1
    assert facts["torch"] in describe_machine(facts)
    assert "(abc+)" in describe_machine({**facts, "commit": "abc+"})
    assert "None" not in describe_machine({**facts, "commit": None, "kernels": None})
    assert ", kernels native avx2, " in describe_machine({**facts, "kernels": "native avx2"})


def test_a_padded_model_is_known_by_its_configuration(tmp_path: Path) -> None:
    assert not is_cost_padded("bundled")
    assert not is_cost_padded(tmp_path)
    for text, expected in (("{}", False), ("not json", False), ('{"forerun_cost_padded": true}', True)):
        (tmp_path / "config.json").write_text(text)
        assert is_cost_padded(tmp_path) is expected
