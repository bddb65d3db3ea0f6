"""Drafts from a corpus: what is in them, in which order, what they learn, and which corpora are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from doubles import FakeModel, PieceTokenizer
from forerun.config import BUNDLED_INDEX, SamplingParams
from forerun.drafters import Binding, Rest, make_drafter
from forerun.drafters.lookup.rest.build import build_index
from forerun.drafters.lookup.rest.index import Index
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.models import load_tokenizer
from forerun.types import Draft, Sequence, Step

PARAMS = SamplingParams()
CORPUS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [9, 2, 3, 8], [5, 5]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    build_index(tmp_path / "i", CORPUS, 11)
    return tmp_path / "i"


def bound(path: Path, **options: Any) -> Rest:
    drafter = Rest(path, **options)
    drafter.bind(Binding(FakeModel(11)))  # type: ignore[arg-type]
    return drafter


def draft(
    drafter: Rest, tokens: list[int], budget: int = 64, min_acceptance_prob: float = 0.0, room: int = 100
) -> Draft:
    sequence = Sequence(0, list(tokens), 1, PARAMS, max_length=len(tokens) + 1 + room)
    drafter.start(sequence)
    (result,) = drafter.draft([sequence], [budget], min_acceptance_prob)
    drafter.stop(sequence)
    return result


def paths(result: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for node, (token_id, parent) in enumerate(zip(result.ids, result.parents)):
        assert -1 <= parent < node
        found.append((*(found[parent] if parent >= 0 else ()), token_id))
    assert len(set(found)) == len(found)  # no token twice below one parent
    return found


def test_the_longest_match(path: Path) -> None:
    drafter = bound(path, num_matches=1)
    assert paths(draft(drafter, [1, 2, 3])) == [(4,), (7,), (4, 5), (4, 6)]  # 2 of 3, 1 of 3, then 1 of 2 each
    assert paths(draft(drafter, [0, 2, 3])) == [(4,), (7,), (8,), (4, 5), (4, 6)]
    assert paths(draft(drafter, [3, 1])) == []
    assert paths(draft(drafter, [2])) == []  # min_ngram is 2
    assert paths(draft(bound(path, min_ngram=1, num_matches=1), [0, 9])) == [(2,), (2, 3), (2, 3, 8)]


def test_shorter_matches_add_what_the_longest_lacks(path: Path) -> None:
    one, more = bound(path, num_matches=1), bound(path, num_matches=2)
    assert paths(draft(one, [9, 2, 3])) == [(8,)]
    found = paths(draft(more, [9, 2, 3]))
    assert found[0] == (8,) and set(found) == {(8,), (4,), (7,), (4, 5), (4, 6)}
    assert paths(draft(more, [9, 2, 3], 2)) == [(8,), (4,)]


def test_what_only_a_shorter_match_knows_is_learned_apart(path: Path) -> None:
    drafter = bound(path)
    levels = []
    for first in (9, 0):
        sequence = Sequence(0, [first, 2, 3], 1, PARAMS)
        (result,) = drafter.draft([sequence], [64])
        levels.append(drafter._pending[sequence][1].levels[paths(result).index((4,))])
    assert levels[0] != levels[1]  # the same match, the same share; the first after a longer match


def test_nothing_follows_a_documents_end(path: Path) -> None:
    assert paths(draft(bound(path), [4, 5])) == []
    assert paths(draft(bound(path, min_ngram=1), [5])) == [(5,)]


@pytest.mark.parametrize("seed", range(6))
def test_budget_room_order_and_origin(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    documents = [[rng.randrange(3) for _ in range(rng.randint(2, 40))] for _ in range(6)]
    build_index(tmp_path / "i", documents, 11)
    drafter = bound(tmp_path / "i", continuation=rng.randint(1, 6), num_matches=rng.randint(1, 4))
    for _ in range(40):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        budget, room = rng.randint(1, 30), rng.randint(0, 5)
        found = paths(draft(drafter, tokens, budget, room=room))
        assert len(found) <= budget
        assert all(len(nodes) <= min(room, drafter._continuation) for nodes in found)
        for nodes in found:  # the path follows at least two of the last tokens somewhere
            wanted = [*tokens[-2:], *nodes]
            assert any(doc[at : at + len(wanted)] == wanted for doc in documents for at in range(len(doc)))


def test_the_price_cuts_what_is_not_worth_it(path: Path) -> None:
    drafter = bound(path)
    everything = draft(drafter, [9, 2, 3])
    rates = drafter._rates
    for min_acceptance_prob in (0.01, 0.05, 0.2, 0.5, 0.99):
        sequence = Sequence(0, [9, 2, 3], 1, PARAMS)
        (result,) = drafter.draft([sequence], [64], min_acceptance_prob)
        kept = paths(result)
        assert kept == paths(everything)[: len(kept)]
        pending = drafter._pending.get(sequence)
        accept_probs: list[float] = []
        for level, parent in zip(pending[1].levels, pending[1].parents) if pending else ():
            accept_probs.append(rates.rate(level) * (accept_probs[parent] if parent >= 0 else 1))
        assert all(accept_prob > min_acceptance_prob for accept_prob in accept_probs) and accept_probs == sorted(
            accept_probs, reverse=True
        )
    assert kept == [] and len(everything) == 5


def test_it_learns_what_is_accepted(path: Path) -> None:
    drafter = bound(path, num_matches=1)
    min_acceptance_prob = 0.3
    assert paths(draft(drafter, [0, 1, 2, 3], min_acceptance_prob=min_acceptance_prob)) == []
    for _ in range(20):
        sequence = Sequence(0, [1, 2, 3], 1, PARAMS)
        (result,) = drafter.draft([sequence], [64])
        sequence.token_ids += [4, 6, 0]
        drafter.commit([Step(sequence, result, None, 5)])
        assert not drafter._pending
    # 4 always came and 7 never; below 4, which came, 5 never did and 6 always, and both are of one kind
    assert paths(draft(drafter, [0, 1, 2, 3], min_acceptance_prob=min_acceptance_prob)) == [(4,), (4, 5), (4, 6)]


def test_only_what_could_have_been_accepted_is_a_trial(path: Path) -> None:
    drafter = bound(path, num_matches=1)
    sequence = Sequence(0, [1, 2, 3], 1, PARAMS)
    drafter.draft([sequence], [64])
    four, seven, *below = drafter._pending[sequence][1].levels
    assert len({four, seven, *below}) == 3
    rates = drafter._rates
    before = rates.rate(four), rates.rate(seven)
    sequence.token_ids += [7, 0, 4]  # what comes after the draft was left says nothing of it
    for _ in range(2):  # the second time nothing is pending
        drafter.commit([Step(sequence, None, None, 3)])
        assert [rates._tried[level] for level in (four, seven, *below)] == [1, 1, 0, 0]
    assert rates.rate(four) < before[0] and rates.rate(seven) > before[1]


def test_no_budget_no_search(path: Path) -> None:
    drafter = bound(path)
    drafter._index.find = None  # type: ignore[union-attr, assignment, method-assign]
    assert len(draft(drafter, [1, 2, 3], 0)) == 0
    assert len(draft(drafter, [1, 2, 3], 5, room=0)) == 0
    assert len(draft(drafter, [1, 2, 3], 5, room=-1)) == 0


def test_together_as_alone_and_nothing_is_kept(path: Path) -> None:
    drafter = bound(path)
    tokens = [[1, 2, 3], [9, 2, 3], [7, 7], [2, 3, 4], [1, 2]]
    budgets = [3, 64, 5, 0, 9]
    sequences = [Sequence(i, list(ids), 1, PARAMS) for i, ids in enumerate(tokens)]
    for sequence in sequences:
        drafter.start(sequence)
    together = drafter.draft(sequences, budgets)
    assert [paths(d) for d in together] == [paths(draft(drafter, t, b)) for t, b in zip(tokens, budgets)]
    assert len(drafter._pending) == 3
    for sequence in sequences:
        drafter.stop(sequence)
        drafter.stop(sequence)
    assert not drafter._pending


def test_memory_is_the_file(path: Path) -> None:
    assert Rest(path).nbytes == 0
    assert bound(path).nbytes == path.stat().st_size - 4096


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_ngram": 3, "max_ngram": 2}, "min_ngram is 3"),
        ({"min_ngram": 0}, "min_ngram is 0"),
        ({"num_matches": 0}, "num_matches is 0"),
        ({"max_places": 0}, "max_places 0"),
        ({"continuation": 0}, "continuation 0"),
    ],
)
def test_impossible_options(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Rest(**options)  # type: ignore[arg-type]


def test_an_index_that_is_not_deep_enough(path: Path) -> None:
    bound(path, max_ngram=22)
    with pytest.raises(ConfigError, match=r"sorted by 32 tokens only.*the key depth at 33"):
        bound(path, max_ngram=23)


def test_before_it_is_bound(path: Path) -> None:
    with pytest.raises(DrafterError, match="not bound"):
        draft(Rest(path), [1, 2, 3])


def test_other_tokens_are_refused(path: Path) -> None:
    tokenizer = PieceTokenizer.of_bytes()
    words = r"tokens of another tokenizer \(unnamed\).*forerun index build corpus.index SOURCES... --tokenizer fake"
    for binding in (Binding(FakeModel(11), tokenizer), Binding(FakeModel(10))):  # type: ignore[arg-type]
        for source in (path, Index(path)):
            with pytest.raises(IncompatibleDrafterError, match=words):
                Rest(source).bind(binding)
    with pytest.raises(IncompatibleDrafterError, match=r"The bundled index .*\(bundled\).*rest:index=corpus.index"):
        Rest().bind(Binding(FakeModel(256), tokenizer))  # type: ignore[arg-type]


def test_a_damaged_index_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="damaged"):
        bound(path)


def test_by_name(path: Path) -> None:
    drafter, k = make_drafter(f"rest:index={path},num_draft_tokens=3,num_matches=1", Binding(FakeModel(11)))  # type: ignore[arg-type]
    assert isinstance(drafter, Rest)
    assert k == 3
    assert paths(draft(drafter, [1, 2, 3])) == [(4,), (7,), (4, 5), (4, 6)]


def test_the_bundled_index() -> None:
    tokenizer = load_tokenizer("bundled")
    drafter = Rest()
    drafter.bind(Binding(FakeModel(4096), tokenizer))  # type: ignore[arg-type]
    assert drafter.index.header.num_tokens > 150_000
    assert BUNDLED_INDEX.stat().st_size <= 2_000_000
    prompt = tokenizer("import unittest\n\n\nif __name__ == '__main__':\n    unittest")["input_ids"]
    found = paths(draft(drafter, prompt, 16))
    assert any(tokenizer.decode(nodes).startswith(".main()") for nodes in found)
