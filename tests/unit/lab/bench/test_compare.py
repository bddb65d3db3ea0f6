"""From runs to rows."""

from __future__ import annotations

from forerun.lab.bench.compare import HF_PLAIN, PLAIN, MethodRun, assisted_name, reduce_runs
from forerun.lab.bench.measure import Timed
from forerun.lab.bench.methods import method_name


def test_rows_against_the_reference() -> None:
    plain = [Timed(4.0, MethodRun([1, 2, 3, 4], 4)), Timed(2.0, MethodRun([5, 6], 2))]
    fast = [Timed(2.0, MethodRun([1, 2, 3, 4], 2, 6, 2)), Timed(0.5, MethodRun([5, 6], 1, 2, 1))]
    first, second = reduce_runs({"plain": plain, "fast": fast}, "plain")
    assert (first.method, first.over_plain.median, first.tokens_per_second.median) == ("plain", 1, 1)
    assert (first.mean_acceptance_length, first.acceptance_rate, first.same_text) == (1, None, 1)
    assert second.over_plain.median == 3
    assert second.tokens_per_second.median == 3
    assert second.mean_acceptance_length == 2
    assert second.acceptance_rate == 3 / 8
    assert second.same_text == 1


def test_one_other_token_is_not_identical() -> None:
    plain = [Timed(1.0, MethodRun([1, 2], 2))] * 2
    other = [Timed(1.0, MethodRun([1, 2], 2)), Timed(1.0, MethodRun([1, 3], 2))]
    assert reduce_runs({"plain": plain, "other": other}, "plain")[1].same_text == 0.5


def test_stopping_early_does_not_look_fast() -> None:
    plain = [Timed(4.0, MethodRun([1, 2, 3, 4], 4))]
    short = [Timed(1.0, MethodRun([1], 1))]
    row = reduce_runs({"plain": plain, "short": short}, "plain")[1]
    assert row.over_plain.median == 1
    assert row.same_text == 0


def test_methods_are_compared_with_plain_transformers_and_its_best_assisted_run() -> None:
    tokens = [1, 2, 3, 4]
    runs = {
        PLAIN: [Timed(2.0, MethodRun(tokens, 4))],
        method_name("draft-model", 4): [Timed(1.0, MethodRun(tokens, 2, 8, 2))],
        HF_PLAIN: [Timed(4.0, MethodRun([1, 2, 3, 9]))],
        assisted_name(2): [Timed(5.0, MethodRun(tokens))],
        assisted_name(4): [Timed(3.0, MethodRun(tokens))],
    }
    rows = {row.method: row for row in reduce_runs(runs)}
    own = rows[method_name("draft-model", 4)]
    assert (own.over_plain.median, own.tokens_per_second.median) == (2, 4)
    assert own.over_transformers is not None
    assert own.over_transformers.median == 4
    assert own.over_assisted is not None
    assert own.over_assisted.median == 3
    assert (own.mean_acceptance_length, own.acceptance_rate) == (2, 0.25)
    assert rows[HF_PLAIN].same_text == 0
    assert rows[assisted_name(2)].mean_acceptance_length is None


def test_without_transformers_there_is_nothing_to_compare_with() -> None:
    [row] = reduce_runs({PLAIN: [Timed(1.0, MethodRun([1], 1))]})
    assert row.over_transformers is None
    assert row.over_assisted is None
