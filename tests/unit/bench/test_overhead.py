"""Drafters without a model, driven over a text."""

from __future__ import annotations

import pytest

from doubles import FakeModel
from forerun.bench.overhead import bundled_drafters, follow, long_text, measure
from forerun.drafters import DRAFTERS, Binding, EarlyExit, PromptLookup, make_drafter
from forerun.errors import ConfigError
from forerun.types import Draft


def test_a_text_that_repeats_itself_is_drafted() -> None:
    text = long_text(lambda piece: [ord(c) for c in piece], ["abcdefgh", "ijk"], 1000)
    assert len(text) == 1000 and text[11:22] == text[:11]
    (row,) = measure({"lookup": PromptLookup()}, text, 512, 8, 20, forward=1.0)
    assert (row.context, row.nodes) == (512, 8)
    assert 0 < row.step <= row.slowest
    assert row.share == row.step / 1e3


def test_every_drafter_without_a_model_can_be_driven() -> None:
    model = FakeModel(vocab_size=11)
    text = [i * i % 11 for i in range(800)]
    for name, entry in DRAFTERS.items():
        if entry.kind in ("target", "lookup") and name not in ("rest", "early-exit", "hybrid"):
            drafter, _ = make_drafter(name, Binding(model, None, 0))
            (row,) = measure({name: drafter}, text, 512, 30, 20, forward=1.0)
            assert row.step > 0, name


def test_a_drafter_that_needs_the_targets_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="early"):
        measure({"early": EarlyExit()}, [1] * 600, 512, 8, 10, forward=1.0)


def test_all_drafters_that_can_be_measured_are_chosen() -> None:
    drafters, text = bundled_drafters([], None, "float32", 900)
    assert len(text) == 900
    kinds = {name: row.kind for name, row in DRAFTERS.items() if name != "early-exit"}
    assert list(drafters) == [name for name, kind in kinds.items() if kind in ("target", "lookup")]
    assert list(bundled_drafters(["early-exit"], None, "float32", 10)[0]) == ["early-exit"]


def test_the_text_accepts_a_path_of_candidates_and_answers_every_row() -> None:
    text = list(range(100, 140))
    tree = Draft([7, 110, 111, 112], [-1, -1, 1, 2])
    path, answers = follow(tree, text, 10)
    assert path == [1, 2, 3]
    assert [answers[0], *answers[2:]] == [110, 111, 112, 113] and len(answers) == 5
    probes = Draft([110, 111, 112], [-1, 0, 1], num_candidates=1)
    assert follow(probes, text, 10)[0] == [0]
    assert follow(Draft.empty(), text, 10) == ([], [110])
