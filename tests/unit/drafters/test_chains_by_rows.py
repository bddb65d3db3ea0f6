"""Chains that grow row by row are those that grow forward by forward."""

from __future__ import annotations

from typing import Any

import pytest

from families import make_family
from forerun import DraftModel, SamplingParams
from forerun.drafters import Binding
from forerun.drafters.base import Drafter
from forerun.drafters.eagle import Eagle
from forerun.drafters.models.base import DraftingModel
from forerun.drafters.models.eagle.model import EagleModel
from forerun.kernels.cpu import native
from forerun.models import Model, Rows, load_model
from forerun.models.draft_session import DeviceDraftSession, NativeDraftSession
from forerun.types import Sequence, Step
from heads import random_head

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "penalty": SamplingParams(temperature=0.0, repetition_penalty=1.5),
    "seeded": SamplingParams(temperature=1.0, seed=7),
    "drawn": SamplingParams(temperature=0.9),
}
K = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    if native() is None:
        pytest.skip("there are no native kernels here")
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    return load_model(make_family("llama", target)), load_model(make_family("qwen3", draft))


def drafts(drafter: Drafter, target: Model, params: list[SamplingParams], min_acceptance_prob: float) -> list[Any]:
    """Return the drafts of several steps; of each draft two tokens are accepted, so that the chains differ in
    uncomputed tokens."""
    drafter.bind(Binding(target, seed=1))
    layers = drafter.needs.layers
    sequences = [Sequence(i, list(range(2 + i, 12 + 3 * i)), 10 + 2 * i, each) for i, each in enumerate(params)]
    caches = [target.new_cache() for _ in sequences]
    found = []
    for sequence in sequences:
        drafter.start(sequence)
    for step in range(6):
        steps = []
        for sequence, cache in zip(sequences, caches, strict=True):
            fed = sequence.token_ids[cache.length : -1]
            if fed:
                hidden_outputs = target.forward([Rows(cache, fed)], layers).hidden_outputs
                cache.commit(range(len(fed)))
                steps.append(Step(sequence, None, None, cache.length, states=hidden_outputs if layers else None))
        drafter.commit(steps)
        budgets = [K - i % 2 for i in range(len(sequences))]
        made = drafter.draft(sequences, budgets, min_acceptance_prob)
        for sequence, draft in zip(sequences, made, strict=True):
            probs = None if draft.probs is None else draft.probs.tolist()
            found.append((draft.ids, probs))
            sequence.token_ids += [*draft.ids[: step % 3], 5 + step]
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("min_acceptance_prob", [0.0, 0.02])
@pytest.mark.parametrize("kind", ["draft-model", "eagle"])
@pytest.mark.parametrize(
    "picked", [["greedy"], ["greedy"] * 3, ["seeded", "seeded"], ["drawn"], [*PARAMS]], ids="+".join
)
def test_drafts_are_the_same(
    picked: list[str],
    kind: str,
    min_acceptance_prob: float,
    models: tuple[Model, Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = models
    head = random_head(target, draft_vocab_size=40)

    def made() -> Drafter:
        return DraftModel(draft) if kind == "draft-model" else Eagle(head)

    advanced: list[int] = []
    advance = NativeDraftSession.advance
    monkeypatch.setattr(NativeDraftSession, "advance", lambda self, *given: advanced.append(1) or advance(self, *given))
    params = [PARAMS[name] for name in picked]
    by_rows = drafts(made(), target, params, min_acceptance_prob)
    assert len(advanced) > 6
    monkeypatch.setattr(DraftingModel, "draft_session", lambda *_: None)
    advanced.clear()
    by_forwards = drafts(made(), target, params, min_acceptance_prob)
    assert by_rows == by_forwards and not advanced
    monkeypatch.undo()
    monkeypatch.setattr(Model, "draft_session", lambda self, caches, pick: DeviceDraftSession(self, caches, pick))
    monkeypatch.setattr(
        EagleModel, "draft_session", lambda self, caches, pick: DeviceDraftSession(self, caches, pick, self.token_ids)
    )
    ahead_of_the_reader = drafts(made(), target, params, min_acceptance_prob)
    assert [ids for ids, _ in ahead_of_the_reader] == [ids for ids, _ in by_rows]
    assert sum(len(ids) for ids, _ in by_rows) > len(by_rows)
