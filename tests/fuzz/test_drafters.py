"""Drafters that answer anything at all, beside two good requests: these are as without them, and the engine goes on."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch
from hypothesis import given, strategies as st

from doubles import FakeModel, Scripted
from forerun import SamplingParams
from forerun.config import EngineConfig
from forerun.drafters import Hybrid
from forerun.engine import Engine, StepOutput
from forerun.types import Draft, Sequence, Step
from fuzzing import examples

VOCAB = 7
GOOD = ([1, 2, 3], [4])
BAD = [5, 5]
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"seed": 1}, "drawn": {}}

tokens = st.one_of(st.integers(0, VOCAB - 1), st.integers(-2, VOCAB + 2), st.sampled_from([1.0, None, "1", True]))
numbers = st.one_of(
    st.floats(0, 1), st.floats(), st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf"), -float("inf"), 1e-45])
)


@st.composite
def probs(draw: Any, rows: int) -> Any:
    """A tensor for so many nodes, more often sound than not; or something else."""
    kind = draw(st.sampled_from(["sound", "sound", "numbers", "shape", "type", "odd"]))
    count = rows + 1 + (draw(st.integers(-1, 1)) if kind == "shape" else 0)
    width = VOCAB + (draw(st.integers(-1, 1)) if kind == "shape" else 0)
    if kind == "odd":
        return draw(st.sampled_from([7, "p", [[1.0]], torch.tensor(0.5), torch.zeros(0)]))
    if kind == "numbers":
        values = torch.tensor([[draw(numbers) for _ in range(width)] for _ in range(count)])
    else:
        values = torch.tensor([[draw(st.floats(0.01, 1)) for _ in range(width)] for _ in range(count)])
        values = values / values.sum(-1, keepdim=True)
    return values.to(draw(st.sampled_from([torch.int64, torch.float16, torch.bfloat16]))) if kind == "type" else values


@st.composite
def sound_tokens(draw: Any, parents: list[int]) -> list[int]:
    return [draw(st.integers(0, VOCAB - 1)) for _ in parents]


@st.composite
def drafts(draw: Any) -> Any:
    kind = draw(st.sampled_from(["chain", "tree", "tree", "any", "none"]))
    if kind == "none":
        return draw(st.sampled_from([None, 3, [1, 2], "draft", Draft, Draft.empty()]))
    count = draw(st.integers(0, 5))
    parents: list[Any] = [i - 1 if kind == "chain" else draw(st.integers(-1, i - 1)) for i in range(count)]
    if kind == "any":
        parents = [draw(st.one_of(st.integers(-2, 5), st.sampled_from([0.5, None]))) for _ in range(count)]
        ids = [draw(tokens) for _ in range(draw(st.integers(0, 5)))]
    else:
        ids = draw(sound_tokens(parents))
    try:
        return Draft(
            ids,
            parents,
            draw(st.one_of(st.none(), probs(count))),
            draw(st.booleans()),
            draw(st.sampled_from([-1, -1, -1, 0, 1, 9])),
            draw(st.sampled_from([(), (), ("a",)])),
            draw(st.sampled_from([None, None, None, torch.zeros(count + 1, 2), 3])),
        )
    except Exception:
        return None


class Anything(Scripted):
    """Answers the bad sequence with what was drawn, in turn, and changes what it is handed; others get right drafts."""

    def __init__(self, answers: list[Any], right: FakeModel, meddle: str) -> None:
        super().__init__(lambda *_: [])
        self._answers, self._right, self._meddle, self._turn = answers, right, meddle, 0

    def draft(self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0) -> Any:
        found: list[Any] = []
        for sequence, most in zip(sequences, num_draft_tokens):
            if sequence.token_ids[0] != BAD[0]:
                count = max(min(most, sequence.room), 0)
                found.append(Draft.chain(self._right.greedy(sequence.token_ids, count)))
                continue
            self._turn += 1
            meddle(self._meddle, sequence)
            found.append(self._answers[self._turn % len(self._answers)])
        return found

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            if step.sequence.token_ids[0] == BAD[0] and self._meddle == "commit":
                step.sequence.token_ids.append(0)


def meddle(how: str, sequence: Any) -> None:
    if how == "tokens":
        sequence.token_ids[-1] = 0
    elif how == "list":
        sequence.token_ids = [0]
    elif how == "length":
        sequence.max_length = 2


def run(engine: Engine) -> dict[int, StepOutput]:
    last: dict[int, StepOutput] = {}
    for _ in range(200):
        if not engine.has_work:
            return last
        for output in engine.step():
            last[output.request_id] = output
    raise AssertionError("the engine does not come to an end")


@cache
def target() -> Any:
    return FakeModel(VOCAB, order=2)


def params(kind: str) -> SamplingParams:
    return SamplingParams(max_tokens=9, **KINDS[kind])


@cache
def plain(kind: str, index: int) -> list[int]:
    engine = Engine(target())
    engine.add(list(GOOD[index]), params(kind))
    choice = next(iter(run(engine).values())).choice
    assert choice is not None
    return choice.token_ids


@examples(60)
@given(
    answers=st.lists(drafts(), min_size=1, max_size=3),
    kind=st.sampled_from(list(KINDS)),
    good=st.sampled_from(["greedy", "seeded"]),
    k=st.sampled_from([1, 4, "auto"]),
    rule=st.sampled_from([None, None, "token", "multi-step", "typical"]),
    how=st.sampled_from(["no", "no", "no", "tokens", "list", "length", "commit"]),
    inside=st.sampled_from(["", "", "first", "merge"]),
)
def test_others_are_as_without_it(
    answers: list[Any], kind: str, good: str, k: Any, rule: str | None, how: str, inside: str
) -> None:
    fake = target()
    fake.caches.clear()
    culprit: Any = Anything(answers, fake, how)
    drafter = Hybrid([culprit], inside) if inside else culprit
    engine = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=k, acceptance=rule, seed=0))
    for _ in range(2):
        ids = [engine.add(list(prompt), params(good)) for prompt in GOOD]
        bad = engine.add(BAD, params(kind))
        last = run(engine)
        for index, request_id in enumerate(ids):
            choice = last[request_id].choice
            assert choice is not None, last[request_id].error
            assert choice.token_ids == plain(good, index)
        assert (last[bad].choice is None) == (last[bad].error is not None)
        if last[bad].choice is not None and kind == "greedy":
            assert last[bad].choice.token_ids == fake.greedy(BAD, 9)
        error = last[bad].error
        assert error is None or type(error).__module__ == "forerun.errors", repr(error)
    assert all(cache.freed for cache in fake.caches)
    assert not culprit.active
    for owner in (engine._loop._verifying.pipeline, engine._loop._policy, drafter):
        for name, value in vars(owner).items():
            keys = value if isinstance(value, dict) else ()
            assert not any(isinstance(key, Sequence) for key in keys), name
