"""What a drafter may not do: it is told so by an error that names it, and nobody else is harmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from doubles import FakeModel, Scripted
from forerun import LLM, Drafter, SamplingParams
from forerun.config import EngineConfig
from forerun.drafters import DraftModel, Hybrid, PromptLookup, Staged, build_drafter
from forerun.engine import Engine
from forerun.errors import DrafterError
from forerun.types import Draft, Sequence, Step, TokenIds, Verdict
from forerun.verification import VERIFIERS, UnsoundProbsError

GREEDY = SamplingParams(temperature=0, max_tokens=8)
DRAWN = SamplingParams(temperature=1, max_tokens=8)
BAD, GOOD = [5, 5], [1, 2, 3]


class Culprit(Scripted):
    """Misbehaves for the sequence whose prompt begins with 5."""

    def __init__(self, draft: Callable[[Sequence], Any]) -> None:
        super().__init__(lambda *_: [])
        self._bad = draft

    def draft(self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0) -> Any:
        return [self._bad(each) if each.token_ids[0] == 5 else Draft.chain([0]) for each in sequences]


def outputs(drafter: Drafter, params: SamplingParams) -> tuple[Any, Any, FakeModel]:
    fake = FakeModel()
    engine = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=4))  # type: ignore[arg-type]
    ids = [engine.add(prompt, params) for prompt in (BAD, GOOD)]
    last = {}
    while engine.has_work:
        last.update({output.request_id: output for output in engine.step()})
    assert all(cache.freed for cache in fake.caches)
    return last[ids[0]], last[ids[1]], fake


def uniform(rows: int, width: int = 11) -> torch.Tensor:
    return torch.full((rows, width), 1 / width)


def altered(row: int, token: int, value: float) -> Draft:
    probs = uniform(3)
    probs[row, token] = value
    return Draft.chain([1, 2], probs)


SHAPES: dict[str, Any] = {
    "None": None,
    "a list of tokens": [1, 2],
    "float ids": Draft([1.0, 2.0], [-1, 0]),  # type: ignore[list-item]
    "float ids in a tensor": Draft(torch.tensor([1.0]), [-1]),
    "ids of another type": Draft(["1"], [-1]),  # type: ignore[list-item]
    "float parents": Draft([1], [-1.0]),  # type: ignore[list-item]
    "an id above the vocabulary": Draft.chain([11]),
    "a negative id": Draft.chain([-1]),
    "more than the budget": Draft.chain([1] * 5),
    "parents that are no tree": Draft([1, 2], [0, 0]),
    "parents too few": Draft([1, 2], [-1]),
    "tokens too few": Draft([], [-1]),
    "candidates too many": Draft([1], [-1], num_candidates=2),
    "candidates of no tokens": Draft([], [], num_candidates=1),
    "sources of no tokens": Draft([], [], sources=("a",)),
    "hidden states of no tokens": Draft([], [], hidden=torch.zeros(2, 4)),
    "sources too few": Draft([1, 2], [-1, 0], sources=("a",)),
    "hidden states too few": Draft([1], [-1], hidden=torch.zeros(1, 4)),
}
PROBS: dict[str, Any] = {
    "of another width": Draft.chain([1], uniform(2, 10)),
    "for no tokens": Draft([], [], uniform(2, 10)),
    "too few": Draft.chain([1, 2], uniform(2)),
    "a list": Draft([1], [-1], [[1.0] * 11] * 2),  # type: ignore[arg-type]
    "whole numbers": Draft.chain([1], torch.ones(2, 11, dtype=torch.int64)),
    "zeros": Draft.chain([1, 2], torch.zeros(3, 11)),
    "logits": Draft.chain([1, 2], torch.randn(3, 11)),
    "NaN": Draft.chain([1, 2], torch.full((3, 11), torch.nan)),
    "one NaN": altered(1, 7, torch.nan),
    "infinite": altered(0, 3, torch.inf),
    "negative": altered(1, 7, -0.1),
    "too much": altered(1, 7, 0.2),
    "nothing for its token": Draft.chain([1], torch.eye(11)[:2]),
    "nothing for a child": Draft([2, 0], [-1, -1], torch.eye(11)[[0, 0, 0]], replacement=False),
    "NaN in a tree": Draft([1, 2], [-1, -1], torch.full((3, 11), torch.nan)),
}


@pytest.mark.parametrize("wrong", SHAPES)
@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, SamplingParams(seed=1, max_tokens=8)], ids=["greedy", "drawn", "seed"]
)
def test_a_broken_draft_ends_its_own_request(wrong: str, params: SamplingParams) -> None:
    bad, good, fake = outputs(Culprit(lambda _: SHAPES[wrong]), params)
    assert isinstance(bad.error, DrafterError)
    assert "Culprit" in str(bad.error)
    assert good.error is None and len(good.choice.token_ids) == 8
    if params.greedy:
        assert good.choice.token_ids == fake.greedy(GOOD, 8)


@pytest.mark.parametrize("wrong", PROBS)
def test_unsound_distributions_are_refused(wrong: str) -> None:
    for params in (DRAWN, GREEDY):
        bad, good, _ = outputs(Culprit(lambda _: PROBS[wrong]), params)
        assert good.error is None
        if params is DRAWN:
            assert isinstance(bad.error, DrafterError)
            assert "Culprit" in str(bad.error)


@pytest.mark.parametrize("inside", [lambda drafter: Hybrid([drafter]), lambda drafter: Hybrid([drafter], "merge")])
@pytest.mark.parametrize("wrong", ["logits", "NaN", "negative"])
def test_inside_a_hybrid_too(inside: Callable[[Drafter], Drafter], wrong: str) -> None:
    bad, good, _ = outputs(inside(Culprit(lambda _: PROBS[wrong])), DRAWN)
    assert isinstance(bad.error, DrafterError)
    assert "Culprit" in str(bad.error)
    assert good.error is None


@pytest.mark.parametrize("name", ["block", "token", "traversal", "multi-step"])
@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan])
def test_verification_looks_at_the_tokens_own_probability(name: str, value: float) -> None:
    from forerun.types import PackedDrafts

    class Half:
        def uniform(self, size: int) -> torch.Tensor:
            return torch.full((size,), 0.5, dtype=torch.float64)

    packed = PackedDrafts.of([altered(0, 1, value)])
    noise: Any = Half()
    with pytest.raises(UnsoundProbsError):
        VERIFIERS[name].verify(packed, uniform(3).log(), noise)


def test_whole_numbers_of_numpy_are_taken() -> None:
    bad, _, fake = outputs(Culprit(lambda _: Draft(list(np.array([1])), list(np.array([-1])))), GREEDY)
    assert bad.choice.token_ids == fake.greedy(BAD, 8)


class Lazy(Scripted):
    def draft(  # type: ignore[override]
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> Iterator[Draft]:
        yield from ()


def test_a_generator_is_no_list_of_drafts() -> None:
    bad, good, _ = outputs(Lazy(lambda *_: []), GREEDY)
    for output in (bad, good):
        assert isinstance(output.error, DrafterError)
        assert "Lazy gave an object of type generator" in str(output.error)


class Half:
    """A drafter in all but its class, and without commit."""

    def start(self, sequence: Sequence) -> None: ...
    def stop(self, sequence: Sequence) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (PromptLookup, r"Write PromptLookup\(\)"),
        (Half(), "derive.? from forerun.Drafter"),
        (7, "derive.? from forerun.Drafter"),
    ],
)
def test_what_is_no_drafter_is_refused_at_once(wrong: Any, words: str) -> None:
    fake: Any = FakeModel()
    for make in (
        lambda: build_drafter(wrong),
        lambda: LLM(fake, wrong),
        lambda: Engine(fake, wrong),
        lambda: Hybrid([wrong]),
        lambda: Staged(fake, wrong),
    ):
        with pytest.raises(DrafterError, match=words):
            make()


def changes(name: str, sequence: Any) -> None:
    ids = sequence.token_ids
    {
        "append": lambda: ids.append(1),
        "+=": lambda: setattr(sequence, "token_ids", ids.__iadd__([1])),
        "[0] =": lambda: ids.__setitem__(0, 1),
        "del": lambda: ids.__delitem__(0),
        "clear": lambda: ids.clear(),
        "sort": lambda: ids.sort(),
        "reverse": lambda: ids.reverse(),
        "token_ids": lambda: setattr(sequence, "token_ids", [1, *ids]),
        "params": lambda: setattr(sequence, "params", DRAWN),
        "max_length": lambda: setattr(sequence, "max_length", 4),
        "num_prompt": lambda: setattr(sequence, "num_prompt", 0),
    }[name]()


CHANGES = [
    "append",
    "+=",
    "[0] =",
    "del",
    "clear",
    "sort",
    "reverse",
    "token_ids",
    "params",
    "max_length",
    "num_prompt",
]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("place", ["start", "draft", "commit"])
def test_a_sequence_is_for_reading(name: str, place: str) -> None:
    """Check that a request for which the drafter changes something ends with an error; others are unaffected."""

    def propose(sequence: Sequence) -> Draft:
        if place == "draft":
            changes(name, sequence)
        return Draft.chain([0])

    class Meddler(Culprit):
        def start(self, sequence: Sequence) -> None:
            super().start(sequence)
            if place == "start" and sequence.token_ids[0] == 5:
                changes(name, sequence)

        def commit(self, steps: Seq[Step]) -> None:
            for step in steps:
                if place == "commit" and step.sequence.token_ids[0] == 5:
                    changes(name, step.sequence)

    bad, good, fake = outputs(Meddler(propose), GREEDY)
    assert isinstance(bad.error, DrafterError)
    assert good.choice.token_ids == fake.greedy(GOOD, 8)


def test_lists_of_a_call_are_its_own() -> None:
    """Check that lists of sequences, steps and verdicts may be changed without harm."""

    class Messy(Scripted):
        def draft(self, sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> list[Draft]:
            assert isinstance(num_draft_tokens, tuple)
            drafts = [Draft.chain([0]) for _ in sequences]
            sequences.clear()
            return drafts

        def commit(self, steps: Any) -> None:
            for step in steps:
                if isinstance(step.verdict, Verdict):
                    step.verdict.path.clear()
            steps.clear()

    bad, good, fake = outputs(Messy(lambda *_: []), GREEDY)
    assert good.choice.token_ids == fake.greedy(GOOD, 8)
    assert bad.choice.token_ids == fake.greedy(BAD, 8)


def test_token_ids_read_as_a_list() -> None:
    ids = TokenIds([1, 2, 3])
    list.extend(ids, [4])
    assert ids == [1, 2, 3, 4] and type(ids[1:]) is list and type(list(ids)) is list
    assert torch.tensor(ids).tolist() == ids
    import copy

    assert type(copy.deepcopy(ids)) is list


def test_a_draft_model_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(DrafterError, match="Write DraftModel"):
        build_drafter(DraftModel)  # type: ignore[arg-type]
