"""Rows computed ahead of the reader equal those computed one by one, and unused rows leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from families import make_family
from forerun.drafters.models.eagle.model import EagleModel
from forerun.models import LanguageModel, Rows, load_model
from forerun.models.draft_session import ROWS_AHEAD_WITH_PROBABILITIES, DeviceDraftSession, Pick
from heads import random_head

FIRST = [[7, 8], [9]]


def one_by_one(model: LanguageModel, names: list[int], states: Any, count: int) -> tuple[list[Any], list[Any]]:
    """Return the logits of each row, and the caches."""
    caches = [model.new_cache() for _ in FIRST]
    tokens, found = FIRST, []
    for step in range(count):
        parts: Any = [None] * len(FIRST) if states is None else states
        rows = [Rows(c, t, None, 1, states=s) for c, t, s in zip(caches, tokens, parts, strict=True)]
        result = model.forward(rows)
        states = None if result.hidden_outputs is None else list(result.hidden_outputs[:, 0].split(1))
        found.append(result.logits)
        tokens = [[names[column]] for column in result.logits.argmax(-1).tolist()]
        if step == 0 and states is not None:
            for cache, first in zip(caches, FIRST, strict=True):
                cache.commit(range(len(first)))
    return found, caches


@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_rows_ahead_are_those_of_forwards(kind: str, priced: bool, tmp_path: Path, monkeypatch: Any) -> None:
    target = load_model(make_family("llama", tmp_path))
    head = EagleModel(random_head(target, draft_vocab_size=40), target)
    model: LanguageModel = head if kind == "head" else target
    names = head.token_ids.tolist() if kind == "head" else list(range(target.vocab_size))
    width = len(names)
    states = None
    if kind == "head":
        states = [torch.randn(len(each), head.config.hidden_size) for each in FIRST]
    expected, alone = one_by_one(model, names, states, 7)

    forwards: list[int] = []
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *given: forwards.append(1) or forward(*given))
    caches = [model.new_cache() for _ in FIRST]
    pick = Pick(width, priced, 6)
    chains = DeviceDraftSession(model, caches, pick, head.token_ids if kind == "head" else None)
    tokens: list[list[int]] = FIRST
    read = None if states is None else torch.cat(states)
    for step in range(7):
        found = chains.advance(tokens, read if step == 0 else None)
        own = expected[step] if step < 3 else expected[step][1:]
        assert torch.equal(found.logits, own)
        assert found.columns == own.argmax(-1).tolist()
        if priced:
            assert found.probabilities == pytest.approx(own.softmax(-1).amax(-1).tolist(), rel=1e-5)
        ahead = ROWS_AHEAD_WITH_PROBABILITIES if priced else 6
        assert len(forwards) == (ahead if step < ahead else 6 if step < 6 else 7)
        if step == 0 and kind == "head":
            for cache, first in zip(caches, FIRST, strict=True):
                cache.commit(range(len(first)))
        if step == 2:
            chains.keep([1])
            caches[0].drop()
            found_columns = found.columns[1:]
        else:
            found_columns = found.columns
        tokens = [[names[column]] for column in found_columns]
        assert caches[1].scratch_parents == list(range(-1, len(caches[1].scratch_parents) - 1))
    assert caches[1].length + caches[1].num_scratch == alone[1].length + alone[1].num_scratch


def test_other_tokens_than_the_picked_ones_are_computed_anew(tmp_path: Path) -> None:
    model = load_model(make_family("llama", tmp_path))
    cache, alone = model.new_cache(), model.new_cache()
    chains = DeviceDraftSession(model, [cache], Pick(model.vocab_size, False, 4))
    for tokens in ([3, 1], [4], [1], [5]):
        found = chains.advance([tokens])
        assert torch.equal(found.logits, model.forward([Rows(alone, tokens, None, 1)]).logits)
        assert cache.num_scratch == alone.num_scratch


def test_what_is_no_number_is_said(tmp_path: Path) -> None:
    model = load_model(make_family("llama", tmp_path), "float64")
    model.decoder.norm.weight.fill_(torch.nan)  # type: ignore[attr-defined]
    found = DeviceDraftSession(model, [model.new_cache()], Pick(model.vocab_size, True, 2)).advance([[1]])
    assert found.columns == [-1] and found.probabilities == [0.0]
