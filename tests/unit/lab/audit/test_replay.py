"""Near-ties are told from bugs where a model is not exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from doubles import FakeCache, FakeModel
from faults import a_row_that_is_not_rolled_back
from forerun import SamplingParams
from forerun.lab.audit.bits_layer import bits_layer, unexplained
from forerun.lab.audit.engine_layer import AuditRequest, AuditRun
from forerun.lab.audit.settings import AuditOptions
from forerun.models import Exactness, Forward

from .conftest import PROMPTS, World, make_world

SMALL = AuditOptions(max_tokens=12)
ROUNDING = 2e-3
"""By which logits of forwards of several rows differ here."""


def rounding_world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = make_world()
    target = world.target
    best = target.table.max(1).values
    target.table[:, 0], target.table[:, 1] = best + ROUNDING / 4, best + ROUNDING / 2  # they nearly tie everywhere
    target.exactness = Exactness(False, "rows of several are others")
    monkeypatch.setattr(FakeModel, "forward", _rounded(FakeModel.forward, target))
    return world


def _rounded(forward: Any, target: Any) -> Any:
    def rounded(self: Any, batch: Any, layers: Any = ()) -> Forward:
        result = forward(self, batch, layers)
        if self is not target or max(len(rows.token_ids) for rows in batch) < 2:
            return result
        logits = result.logits.clone()
        logits[:, ::2] += ROUNDING
        return Forward(logits, result.hidden_outputs)

    return rounded


def test_near_ties_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = bits_layer(rounding_world(monkeypatch).audited, PROMPTS[:1], SMALL)
    assert layer.verdict == "pass", (layer.tests, layer.findings)
    assert any("near-ties" in test.note for test in layer.tests)
    assert "not exact" in layer.notes[0]


def test_the_same_differences_fail_where_the_model_claims_to_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    world = rounding_world(monkeypatch)
    world.target.exactness = Exactness(True)
    assert bits_layer(world.audited, PROMPTS[:1], SMALL).verdict == "fail"


def test_bugs_beside_near_ties_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    world = rounding_world(monkeypatch)
    a_row_that_is_not_rolled_back(monkeypatch, world.target)
    layer = bits_layer(world.audited, PROMPTS[:1], SMALL)
    assert layer.verdict == "fail"
    assert any("rounding" in finding for finding in layer.findings)


@pytest.mark.parametrize("seed", [None, 3])
def test_another_token_than_any_rounding_chooses_is_a_bug(seed: int | None) -> None:
    world = make_world()
    params = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=6)
    answers = world.audited.answers([AuditRequest(PROMPTS[0], params)], AuditRun("plain"), 0)
    assert isinstance(answers[0], list)
    plain = answers[0][0]
    assert unexplained(world.target, PROMPTS[0], params, plain, plain) is None
    other = replace(plain, token_ids=[*plain.token_ids[:3], (plain.token_ids[3] + 1) % 11, *plain.token_ids[4:]])
    reason = unexplained(world.target, PROMPTS[0], params, plain, other)
    assert reason is not None and "token 3" in reason
    shorter = replace(plain, token_ids=plain.token_ids[:4])
    assert "end differently" in str(unexplained(world.target, PROMPTS[0], params, plain, shorter))


def test_a_log_probability_that_is_off_is_a_bug() -> None:
    world = make_world()
    params = SamplingParams(temperature=0, logprobs=0, max_tokens=6)
    answers = world.audited.answers([AuditRequest(PROMPTS[0], params)], AuditRun("plain"), 0)
    assert isinstance(answers[0], list)
    plain = answers[0][0]
    assert plain.logprobs is not None
    off = [replace(entry, logprob=entry.logprob - 0.01) for entry in plain.logprobs]
    reason = unexplained(world.target, PROMPTS[0], params, plain, replace(plain, logprobs=off))
    assert reason is not None and "token 0" in reason


def test_nothing_is_left_of_a_replay() -> None:
    world = make_world()
    params = SamplingParams(temperature=0, max_tokens=6)
    answers = world.audited.answers([AuditRequest(PROMPTS[0], params)], AuditRun("plain"), 0)
    assert isinstance(answers[0], list)
    unexplained(world.target, PROMPTS[0], params, answers[0][0], answers[0][0])
    caches: list[FakeCache] = world.target.caches
    assert all(cache.freed for cache in caches)
