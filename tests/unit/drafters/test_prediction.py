"""Drafting from the client's prediction: it is followed, left, and found again."""

from __future__ import annotations

import random

import pytest

from forerun.config import SamplingParams
from forerun.drafters import Prediction
from forerun.drafters.lookup.prediction import MAX_MATCH, PREDICTION_RATES, Follower
from forerun.types import Draft, Sequence, Step, Verdict

PROMPT = [900, 901]
TEXT = list(range(100, 160))


def begun(drafter: Prediction, prediction: list[int] | None, max_length: int = 2**62) -> Sequence:
    own = Sequence(0, list(PROMPT), len(PROMPT), SamplingParams(), max_length=max_length, prediction=prediction)
    drafter.start(own)
    return own


def drafted(drafter: Prediction, own: Sequence, budget: int = 4, min_acceptance_prob: float = 0.0) -> list[int]:
    (draft,) = drafter.draft([own], [budget], min_acceptance_prob)
    assert draft.is_chain and draft.probs is None
    assert draft.sources == ("prediction",) * len(draft)
    tokens: list[int] = draft.ids
    return tokens


def after(prediction: list[int], output: list[int], budget: int = 4) -> list[int]:
    """Return the draft after this output, whether it came at once or token by token."""
    slow, fast = Prediction(), Prediction()
    one, other = begun(slow, prediction), begun(fast, prediction)
    for token in output:
        drafted(slow, one)
        one.token_ids.append(token)
    other.token_ids += output
    tokens = drafted(fast, other, budget)
    assert drafted(slow, one, budget) == tokens
    return tokens


@pytest.mark.parametrize("said", [0, 1, 30, 58, 59, 60])
def test_the_prediction_is_copied_as_long_as_it_holds(said: int) -> None:
    assert after(TEXT, TEXT[:said]) == TEXT[said : said + 4]


@pytest.mark.parametrize(
    ("output", "following"),
    [
        ([*TEXT[:20], *TEXT[25:26]], 26),  # five tokens left out
        ([*TEXT[:20], 7, 8, 9, TEXT[20]], 21),  # three put in
        ([*TEXT[:20], 7, 8, 9, TEXT[23]], 24),  # three for three others
        ([*TEXT[:20], 7, TEXT[29]], 30),  # one for nine others
        ([*TEXT[:40], *TEXT[10:12]], 12),  # back to what had been
        ([7, 8, TEXT[0]], 1),  # something before the beginning
        ([*TEXT, 7, TEXT[3]], 4),  # beyond the end, and back
    ],
)
def test_it_is_found_again(output: list[int], following: int) -> None:
    assert after(TEXT, output) == TEXT[following : following + 4]


def test_an_unknown_token_is_taken_to_stand_for_a_predicted_one() -> None:
    assert after(TEXT, [*TEXT[:20], 7]) == TEXT[21:25]
    assert after(TEXT, [*TEXT[:20], 7, TEXT[21]]) == TEXT[22:26]
    assert after(TEXT, [*TEXT, 7, 8, 9]) == []


def test_of_equally_long_matches_the_next_ahead_goes_first() -> None:
    prediction = [5, 1, 40, 5, 2, 41, 9, 9, 5, 3, 42, 5, 4]
    assert after(prediction, [5, 1, 40, 5, 2, 41, 7, 5], 1) == [3]
    assert after(prediction, [5, 1, 40, 5, 2, 41, 9, 9, 5, 3, 42, 5, 4, 7, 5], 1) == [4]  # behind: the nearest


def test_a_longer_match_goes_before_a_nearer_one() -> None:
    prediction = [1, 2, 50, 51, 2, 60, 61, 3, 1, 2, 70, 71]
    assert after(prediction, [1, 2, 50, 51, 3, 1, 2], 1) == [70]
    assert after([8, 1, 2, 70, 9, 3, 2, 60, 4], [8, 1, 2, 70, 9, 3, 5, 1, 2], 1) == [70]


def naive_find(prediction: list[int], output: list[int], at: int) -> tuple[int, int] | None:
    best = None
    for place in range(len(prediction) - 1):
        length = 0
        while length < min(place + 1, len(output), MAX_MATCH):
            if prediction[place - length] != output[len(output) - 1 - length]:
                break
            length += 1
        key = (length, place >= at, -abs(place - at))
        if length and (best is None or key > best[0]):
            best = key, place + 1
    return None if best is None else (best[1], best[0][0])


def test_the_search_against_its_definition() -> None:
    rng = random.Random(0)
    searched = 0
    for _ in range(200):
        prediction = [rng.randrange(4) for _ in range(rng.randint(1, 50))]
        follower = Follower(prediction)
        output: list[int] = []
        for _ in range(40):
            at = follower.at
            holds = at < len(prediction) and rng.random() < 0.6
            output.append(prediction[at] if holds else rng.randrange(5))
            expected = naive_find(prediction, output, at)
            follower.follow(output)
            if at < len(prediction) and output[-1] == prediction[at]:
                assert follower.at == at + 1
            elif expected is None:
                assert (follower.at, follower.matched) == (min(at + 1, len(prediction)), 0)
            else:
                searched += 1
                assert (follower.at, follower.matched) == expected
    assert searched > 500


class Read(list[int]):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        self.reads += 1
        return super().__getitem__(index)  # type: ignore[index]


def test_a_search_is_bounded_in_a_prediction_of_one_token() -> None:
    prediction = Read([5, 6] * 4000)
    follower = Follower(prediction)
    follower.at, prediction.reads = 4001, 0
    follower.follow([7] * 20 + [5])
    assert 0 < prediction.reads < 200
    assert follower.matched == 1


def test_a_match_is_measured_no_further_than_it_need_be() -> None:
    prediction = Read([5] * 8000)
    follower = Follower(prediction)
    follower.at, prediction.reads = 8000, 0
    follower.follow([5] * 100)
    assert (follower.at, follower.matched) == (7999, MAX_MATCH)
    assert 0 < prediction.reads < 2 * MAX_MATCH + 4


def test_without_a_prediction_nothing_is_drafted() -> None:
    drafter = Prediction()
    sequences = [begun(drafter, None), begun(drafter, []), begun(drafter, TEXT)]
    assert [len(draft) for draft in drafter.draft(sequences, [3, 3, 3])] == [0, 0, 3]


def test_budget_and_room_bound_the_draft() -> None:
    drafter = Prediction()
    for room, budget, length in ((2, 5, 2), (5, 2, 2), (0, 3, 0), (-1, 3, 0), (9, 0, 0)):
        own = begun(drafter, TEXT, max_length=len(PROMPT) + 1 + room)
        assert own.room == room
        assert len(drafted(drafter, own, budget)) == length


def test_a_token_must_be_worth_its_price() -> None:
    drafter = Prediction()
    accept_prob, count = 1.0, 0
    for length in range(5):
        accept_prob *= PREDICTION_RATES[length.bit_length()]
        count += accept_prob > 0.35
    assert 0 < count < 5
    assert drafted(drafter, begun(drafter, TEXT), 5, 0.35) == TEXT[:count]
    own = begun(drafter, TEXT)
    own.token_ids += TEXT[:20]
    assert len(drafted(drafter, own, 5, 0.35)) == 5  # a long match is trusted


def test_a_useless_prediction_prices_itself_out() -> None:
    drafter = Prediction()
    own = begun(drafter, TEXT)
    for token in range(1000, 1040):
        draft = drafter.draft([own], [4], 0.2)[0]
        own.token_ids.append(token)
        drafter.commit([Step(own, draft, Verdict([], token), len(own.token_ids) - 1)])
    other = begun(drafter, TEXT)
    assert drafted(drafter, other, 4, 0.2) == []
    assert drafted(drafter, other, 4) == TEXT[:4]


def test_what_a_sequence_held_is_freed() -> None:
    drafter = Prediction()
    sequences = [begun(drafter, TEXT), begun(drafter, None)]
    drafter.draft(sequences, [3, 3])
    drafter.commit([Step(own, Draft.empty(), Verdict([], 1), 2) for own in sequences])
    drafter.draft(sequences, [3, 3])
    for own in (*sequences, *sequences):
        drafter.stop(own)
    assert not drafter._followers and not drafter._copied
