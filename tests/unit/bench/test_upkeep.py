"""Drafters without a model, driven over a text."""

from __future__ import annotations

from doubles import FakeModel
from forerun.bench.upkeep import long_text, measure_upkeep
from forerun.drafters import DRAFTERS, Binding, PromptLookup, make_drafter


def test_a_text_that_repeats_itself_is_drafted() -> None:
    text = long_text(lambda piece: [ord(c) for c in piece], ["abcdefgh", "ijk"], 1000)
    assert len(text) == 1000 and text[11:22] == text[:11]
    row = measure_upkeep("lookup", PromptLookup(), text, 512, 8, 20, forward=1.0)
    assert (row.context, row.nodes) == (512, 8)
    assert 0 < row.step <= row.slowest
    assert row.share == row.step / 1e3


def test_every_drafter_without_a_model_can_be_driven() -> None:
    model = FakeModel(vocab_size=11)
    text = [i * i % 11 for i in range(800)]
    for name, entry in DRAFTERS.items():
        if entry.kind != "model" and name not in ("rest", "early-exit", "hybrid"):
            drafter, _ = make_drafter(name, Binding(model, None, 0))  # type: ignore[arg-type]
            row = measure_upkeep(name, drafter, text, 512, 30, 20, forward=1.0)
            assert row.step > 0, name
