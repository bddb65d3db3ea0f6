"""The methods that the bench times do the same work. What they took is not looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from doubles import FakeModel
from families import make_family
from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from forerun.kernels.cpu import native
from forerun.lab.bench.compare import HF_PLAIN, PLAIN, MethodRun, assisted_name, reduce_runs
from forerun.lab.bench.forward import REFERENCE, TRANSFORMERS, time_forwards
from forerun.lab.bench.generate import UNNAMED, Methods, position_table, reduce_by_category, run_methods, tables
from forerun.lab.bench.measure import Timed
from forerun.lab.bench.methods import Reference, beside, generate_once, method_name
from forerun.lab.bench.prompts import BenchPrompt

PROMPT = [5, 3, 8, 5, 3, 8, 5, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def llm(model: FakeModel, drafter: str | None = None) -> LLM:
    return LLM(model, drafter, num_draft_tokens=4)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("bench"))


def test_a_generation_says_what_was_drafted() -> None:
    model = FakeModel(order=1, eos_token_ids=range(11))  # order 1 soon repeats itself
    expected = model.greedy(PROMPT, 40)
    run = generate_once(
        llm(model, "prompt-lookup"), PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    )
    assert run.token_ids == expected
    assert 0 < run.num_accepted <= run.num_drafted
    assert run.num_forwards < 40


def test_transformers_and_forerun_say_the_same_in_float64(folder: Path) -> None:
    own = LLM(str(folder), None, dtype="float64", tokenizer=None)
    target, draft = Reference(folder, "float64"), Reference(folder, "float64")
    engines = {PLAIN: own, method_name("draft-model", 3): LLM(own.target, folder, num_draft_tokens=3)}
    requests = [BenchPrompt("a", "", PROMPT), BenchPrompt("b", "", [5, 3])]
    runs = run_methods(Methods(engines, target, draft, [3]), requests, GREEDY, 2)
    names = [PLAIN, method_name("draft-model", 3), HF_PLAIN, assisted_name(3)]
    assert list(runs) == names
    for name in names:
        assert [list(run.value.token_ids) for run in runs[name]] == [list(run.value.token_ids) for run in runs[PLAIN]]
        assert [len(run.value.token_ids) for run in runs[name]] == [12] * 4
        assert all(run.value.first_seconds is not None for run in runs[name])
    assert runs[method_name("draft-model", 3)][0].value.num_accepted > 0


def test_all_stop_at_the_end_of_text_if_asked(folder: Path) -> None:
    own = LLM(str(folder), None, dtype="float64", tokenizer=None)
    said = own.generate(PROMPT, GREEDY).token_ids
    own.target.eos_token_ids = frozenset(said[4:5])  # type: ignore[misc]
    methods = Methods({PLAIN: own}, Reference(folder, "float64"))
    runs = run_methods(methods, [BenchPrompt("a", "", PROMPT)], replace(GREEDY, ignore_eos=False), 1)
    assert {len(run.value.token_ids) for each in runs.values() for run in each} == {said.index(said[4]) + 1}


def test_rows_by_category_with_acceptance_by_position() -> None:
    model = FakeModel(order=1)
    engines = {PLAIN: llm(model), "drafting": llm(model, "prompt-lookup")}
    requests = [BenchPrompt("a", "x", PROMPT), BenchPrompt("b", "", PROMPT[2:]), BenchPrompt("c", "x", PROMPT[1:])]
    rows = reduce_by_category(run_methods(Methods(engines), requests, GREEDY, 2), requests, 2)
    assert list(rows) == ["", "x", UNNAMED]
    plain, drafting = rows["x"]
    assert plain.method == PLAIN
    assert (plain.acceptance_per_position, plain.over_plain.median) == ([], 1)
    assert drafting.acceptance_per_position and all(0 <= rate <= 1 for rate in drafting.acceptance_per_position)
    assert drafting.first_token is not None and drafting.first_token_p90 is not None
    assert drafting.first_token <= drafting.first_token_p90
    table = position_table("", rows["x"])
    assert table is not None and [row[0] for row in table.rows] == ["drafting"]
    assert all(len(row) == len(table.header) for row in table.rows)
    assert position_table("", rows["x"][:1]) is None


def test_acceptance_by_position_is_of_the_drafts_that_reached_it() -> None:
    one = MethodRun([1], 1, reached=[4, 2], accepted=[3, 1])
    two = MethodRun([1], 1, reached=[4], accepted=[3])
    (row,) = reduce_runs({PLAIN: [Timed(1.0, one), Timed(1.0, two), Timed(1.0, MethodRun([1]))]})
    assert row.acceptance_per_position == [0.75, 0.5]


def test_the_parts_of_a_step_are_told(folder: Path) -> None:
    own = LLM(str(folder), None, dtype="float32")
    methods = Methods({PLAIN: own, "drafted": LLM(own.target, folder, num_draft_tokens=3)})
    plain, drafted = reduce_runs(run_methods(methods, [BenchPrompt("a", "", PROMPT)], GREEDY, 1))
    for row in (plain, drafted):
        step, target, draft = row.step
        assert step > target + draft and target > 0
    assert plain.step[2] == 0 and drafted.step[2] > 0
    (_, times, _) = tables("", "x", [plain, drafted], details=True)
    assert times.title == "Time per step in ms, x" and len(times.rows) == 2
    assert len(tables("", "x", [plain, drafted], details=False)) == 2


def test_an_engine_beside_another_shares_its_target() -> None:
    plain = llm(FakeModel())
    assert beside(plain, "prompt-lookup", 2).target is plain.target


def test_forwards_are_measured_for_every_path_and_number_of_rows(folder: Path) -> None:
    rows = time_forwards(str(folder), ["float64"], [1, 3], 9, rounds=2, others=True)
    assert [(row.method, row.rows) for row in rows] == [
        (method, k) for method in (TRANSFORMERS, "fused", "general") for k in (1, 3)
    ]
    assert rows[0].over_transformers is None and rows[2].over_transformers is not None
    assert rows[2].growth is None and rows[3].growth is not None


def test_forwards_beside_reference_kernels_and_of_codes(folder: Path) -> None:
    rows = time_forwards(str(folder), ["bfloat16"], [3], 9, rounds=1, others=True)
    assert [row.method for row in rows if row.method != REFERENCE] == [TRANSFORMERS, "fused", "general"]
    assert (REFERENCE in [row.method for row in rows]) == (native() is not None)
    (llama,) = time_forwards(str(folder), ["int8"], [20], 1, rounds=1)
    assert llama.over_transformers is None and llama.growth is None
    assert llama.seconds.median > 0


def test_rows_that_do_not_fit_the_context_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="1024"):
        time_forwards(str(folder), ["float32"], [5], 1020, rounds=1)
