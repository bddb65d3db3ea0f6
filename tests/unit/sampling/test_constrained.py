"""A sequence's constraint tells what a fresh matcher would tell, wherever it was moved before."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from forerun import SamplingParams
from forerun.errors import GrammarDeadEndError
from forerun.sampling import LogitsPipeline, LogitsRow, SequenceConstraint, grammar as constrained, takes_argmax
from forerun.types import Sequence, is_allowed
from forerun.utils.tree import Tree
from grammars import ANY, Automaton, AutomatonMatcher, random_automaton

VOCAB = 11
END = 0


def new(automaton: Automaton, prompt: int = 2, **options: Any) -> tuple[Sequence, SequenceConstraint]:
    params = SamplingParams(**{"grammar": ANY, **options})
    constraint = SequenceConstraint(automaton.matcher, {END}, VOCAB)
    return Sequence(0, [5] * prompt, prompt, params, constraint=constraint), constraint


def told(automaton: Automaton, output: list[int], path: list[int]) -> set[int] | type[Exception] | None:
    """What an automaton asked for the first time tells."""
    if END in path:
        return None
    state = automaton.state_after([*output, *path])
    if state is None or state in automaton.broken:
        return GrammarDeadEndError
    return set(automaton.edges[state]) | ({END} if state in automaton.ends else set()) or GrammarDeadEndError


def shown(allowed: Any) -> set[int] | type[Exception] | None:
    if isinstance(allowed, np.ndarray):
        return {token for token in range(VOCAB) if is_allowed(allowed, token)}
    return None if allowed is None else type(allowed)


@pytest.mark.parametrize("seed", range(30))
def test_it_tells_what_a_fresh_matcher_tells(seed: int) -> None:
    """Of random trees along a growing sequence, whether the path drafted was the one that came."""
    rng = random.Random(seed)
    automaton = random_automaton(seed, VOCAB, end_id=END)
    sequence, constraint = new(automaton)
    output: list[int] = []
    for _ in range(12):
        tree = Tree()
        for node in range(rng.randrange(7)):
            tree.add(rng.randrange(VOCAB), rng.randrange(-1, node) if node else -1)
        paths = [[tree.ids[node] for node in path] for path in ([], *tree.paths())]
        expected = [told(automaton, output, path) for path in paths]
        viable = constraint.viable(sequence, tree) if rng.random() < 0.7 else None
        assert [shown(each) for each in constraint.allowed(sequence, paths)] == expected
        if viable is not None:
            assert viable == [
                isinstance(before := told(automaton, output, path[:-1]), set) and path[-1] in before
                for path in paths[1:]
            ]
        forced = constraint.forced(sequence, 3)
        for at, token_id in enumerate(forced):
            assert told(automaton, output, forced[:at]) == {token_id}
        here = told(automaton, output, [])
        assert isinstance(here, set)
        if here == {END}:
            break
        token_id = rng.choice(sorted(here - {END}))
        output.append(token_id)
        sequence.token_ids.append(token_id)
    assert automaton.num_made == 1


def test_nothing_follows_a_token_that_ends_the_output() -> None:
    """Though the grammar has it in the middle of a text, as where `stop_token_ids` names it."""
    automaton = Automaton({0: {1: 0, END: 0}}, frozenset({0}), VOCAB)
    sequence, constraint = new(automaton)
    tree = Tree([END, 1, END, 1, END], [-1, 0, 0, -1, 3])
    assert constraint.viable(sequence, tree) == [True, False, False, True, True]


def test_an_interrupt_at_any_call_of_the_matcher_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(BaseException): ...

    automaton = random_automaton(1, VOCAB, end_id=END, density=0.8)
    fuse = [10**9]

    def burning(name: str) -> Any:
        original = getattr(AutomatonMatcher, name)

        def call(self: AutomatonMatcher, *arguments: Any) -> Any:
            result = original(self, *arguments)
            fuse[0] -= 1
            if fuse[0] == 0:
                raise Stop
            return result

        return call

    for name in ("accept", "undo", "allowed"):
        monkeypatch.setattr(AutomatonMatcher, name, burning(name))
    first, second = *automaton.edges[0], *automaton.edges[1]
    third = next(iter(automaton.edges[2]))
    paths = [[], [third], [third, 1], [second], [third, 2]]
    for count in range(1, 25):
        sequence, constraint = new(automaton)
        sequence.token_ids += [first]
        constraint.allowed(sequence, [[], [second]])
        sequence.token_ids += [second]
        fuse[0] = count
        with contextlib.suppress(Stop):
            constraint.allowed(sequence, paths)
        fuse[0] = 10**9
        output = [first, second]
        assert [shown(each) for each in constraint.allowed(sequence, paths)] == [
            told(automaton, output, path) for path in paths
        ]


def test_a_matcher_that_cannot_undo_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutomatonMatcher, "undo", lambda *_: False)
    automaton = Automaton({0: {1: 1, 2: 2}, 1: {3: 0}, 2: {4: 0}}, frozenset({0}), VOCAB)
    sequence, constraint = new(automaton)
    sequence.token_ids += [1, 3]
    assert [shown(each) for each in constraint.allowed(sequence, [[1], [2], [2, 4], []])] == [
        {3},
        {4},
        *[{END, 1, 2}] * 2,
    ]
    assert automaton.num_made > 1


def test_a_refused_token_is_a_dead_end_from_there_on() -> None:
    automaton = Automaton({0: {1: 1}, 1: {2: 1, 3: 1}}, frozenset({1}), VOCAB, refused=frozenset({(1, 3)}))
    sequence, constraint = new(automaton)
    assert constraint.viable(sequence, Tree([1, 3, 2], [-1, 0, 0])) == [True, False, True]
    assert shown(constraint.allowed(sequence, [[1]])[0]) == {END, 2, 3}
    assert shown(constraint.allowed(sequence, [[1, 3]])[0]) is GrammarDeadEndError
    sequence.token_ids += [1, 3]
    assert shown(constraint.allowed(sequence, [[]])[0]) is GrammarDeadEndError
    assert constraint.forced(sequence, 4) == []
    assert constraint.viable(sequence, Tree([2], [-1])) == [False]


def test_a_matcher_that_fails_at_one_path_serves_the_others() -> None:
    automaton = Automaton({0: {1: 1, 2: 2}, 1: {1: 1}, 2: {2: 2}}, frozenset(), VOCAB, broken=frozenset({1}))
    sequence, constraint = new(automaton)
    kinds = [shown(each) for each in constraint.allowed(sequence, [[], [1], [2], [2, 2]])]
    assert kinds == [{1, 2}, GrammarDeadEndError, {2}, {2}]


def test_a_grammar_that_takes_too_long_is_a_dead_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.4
        return now[0]

    monkeypatch.setattr(constrained, "thread_time", clock)
    automaton = Automaton({0: {1: 0, 2: 0}}, frozenset({0}), VOCAB)
    sequence, constraint = new(automaton)
    assert shown(constraint.allowed(sequence, [[]])[0]) == {END, 1, 2}
    error = constraint.allowed(sequence, [[1]])[0]
    assert isinstance(error, GrammarDeadEndError)
    assert "too long" in str(error)


@pytest.mark.parametrize(("seconds", "is_too_long"), [(0.018, False), (0.03, True)])
def test_time_is_granted_by_the_position(monkeypatch: pytest.MonkeyPatch, seconds: float, is_too_long: bool) -> None:
    """Long texts may take longer. For a position the matcher is moved twice and asked once."""
    now = [0.0]

    def clock() -> float:
        now[0] += seconds / 3
        return now[0]

    monkeypatch.setattr(constrained, "thread_time", clock)
    sequence, constraint = new(Automaton({0: {1: 0, 2: 0}}, frozenset({0}), VOCAB))
    kinds = []
    for _ in range(200):
        kinds.append(shown(constraint.allowed(sequence, [[]])[0]))
        sequence.token_ids.append(1)
    assert (GrammarDeadEndError in kinds) == is_too_long
    assert kinds[0] == {END, 1, 2}


class TestPipeline:
    """The grammar among the other options."""

    automaton = Automaton({0: {1: 1, 2: 1, 3: 1}, 1: {4: 2}, 2: {}}, frozenset({2}), VOCAB)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def rows(self, **options: Any) -> list[LogitsRow]:
        sequence, _ = new(self.automaton, **options)
        return [LogitsRow(sequence, path) for path in ([], [2], [2, 4], [2, 4, END])]

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"top_k": 2},
            {"top_p": 0.5},
            {"min_p": 0.4},
            {"logit_bias": {5: 90.0, 2: 1.0}},
            {"frequency_penalty": 1.0},
        ],
        ids=str,
    )
    def test_probabilities_are_those_of_the_allowed_tokens(self, options: Any) -> None:
        """As if the others' logits had been -inf, whatever is done to the logits."""
        pipeline = LogitsPipeline(VOCAB, {END})
        rows = self.rows(**options)
        given = pipeline.process(self.logits, rows)
        masked = self.logits.clone()
        for row, kept in enumerate(([1, 2, 3], [4], [END])):
            masked[row, [token for token in range(VOCAB) if token not in kept]] = -torch.inf
        params = SamplingParams(**options)
        free = Sequence(1, [5, 5], 2, params)
        expected = LogitsPipeline(VOCAB, {END}).process(masked, [LogitsRow(free, row.path) for row in rows])
        assert torch.equal(given, expected)
        assert torch.equal(pipeline.probabilities(self.logits, rows), expected.exp())

    def test_greedy(self) -> None:
        pipeline = LogitsPipeline(VOCAB, {END})
        params = SamplingParams(temperature=0, grammar=ANY)
        assert not pipeline.is_identity(params)
        assert takes_argmax(params)
        given = pipeline.process(self.logits, self.rows(temperature=0)).argmax(-1).tolist()
        assert given[0] == 1 + int(self.logits[0, 1:4].argmax())
        assert given[1:3] == [4, END]

    def test_min_tokens_against_the_end_is_a_dead_row(self) -> None:
        dead: dict[int, GrammarDeadEndError] = {}
        given = LogitsPipeline(VOCAB, {END}).process(self.logits, self.rows(min_tokens=4), dead)
        assert list(dead) == [2]
        assert not given.isnan().any()

    def test_logits_that_are_masked_already(self) -> None:
        """Of a target whose logits are -inf for all that the grammar allows."""
        logits = self.logits.clone()
        logits[0, 1:4] = -torch.inf
        dead: dict[int, GrammarDeadEndError] = {}
        given = LogitsPipeline(VOCAB, {END}).process(logits, self.rows(), dead)
        assert list(dead) == [0]
        assert not given.isnan().any()

    def test_others_are_left_alone(self) -> None:
        pipeline = LogitsPipeline(VOCAB, {END})
        free = Sequence(1, [5, 5], 2, SamplingParams())
        mixed = [*self.rows()[:2], LogitsRow(free), LogitsRow(free, [1])]
        given = pipeline.process(self.logits, mixed)
        assert torch.equal(given[2:], pipeline.process(self.logits[2:], mixed[2:]))
        assert pipeline.adjust(self.logits, mixed[2:]) is self.logits
