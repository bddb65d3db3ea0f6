"""Copies of sorted answers are those that counting every place gives."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from forerun.drafters.lookup.remembered import sorted_answers
from forerun.drafters.lookup.remembered.sorted_answers import MOST_MATCH, SortedAnswers


def made(answers: list[list[int]], width: int = 4) -> SortedAnswers:
    return SortedAnswers([np.asarray(each, f">u{width}").tobytes() for each in answers], width)


def places(answers: list[list[int]], match: list[int]) -> list[tuple[int, int]]:
    """Answer and position after each occurrence, the oldest first."""
    size = len(match)
    return [
        (number, end)
        for number, answer in enumerate(answers)
        for end in range(size, len(answer) + 1)
        if answer[end - size : end] == match
    ]


def counted_copy(
    answers: list[list[int]], context: list[int], least: int, count: int
) -> list[tuple[int, int, int, int]]:
    """Token, match length, count and total of each copied token, by looking at all places."""
    longest = min(len(context), MOST_MATCH)
    size = next((size for size in range(longest, least - 1, -1) if places(answers, context[-size:])), 0)
    if not size:
        return []
    match = context[-size:]
    copied: list[tuple[int, int, int, int]] = []
    forks = 0
    share = 1.0
    while len(copied) < count:
        found = places(answers, match)
        following = [(answers[number][end], number, end) for number, end in found if end < len(answers[number])]
        if not following:
            break
        counts = Counter(token for token, _, _ in following)
        latest = {token: (number, end) for token, number, end in following}
        token = max(counts, key=lambda token: (counts[token], latest[token]))
        if counts[token] < len(found):
            forks += 1
            share *= counts[token] / len(found)
            if share < 0.1 or forks > 4:
                break
        copied.append((token, len(match), counts[token], len(found)))
        match = [*match, token]
    return copied


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("num_tokens", [2, 4, 12])
def test_drafts_are_those_of_all_places_counted(monkeypatch: pytest.MonkeyPatch, num_tokens: int, width: int) -> None:
    monkeypatch.setattr(sorted_answers, "_MOST_COUNTED", 10**6)
    draw = random.Random(num_tokens * width)
    for trial in range(60):
        answers = [[draw.randrange(num_tokens) for _ in range(draw.randrange(1, 40))] for _ in range(1 + trial // 6)]
        text = made(answers, width)
        context = [draw.randrange(num_tokens) for _ in range(draw.randrange(1, 12))]
        if trial % 3:  # as if an answer were said again
            context += draw.choice(answers)[: draw.randrange(1, 40)]
        expected = counted_copy(answers, context, 2, 12)
        for hint in (MOST_MATCH, len(context) + 3):
            match = text.find(context, 2, hint)
            copied = None if match is None else text.copy(match, 12)
            rows = [] if copied is None else zip(copied.token_ids, copied.lengths, copied.counts, copied.totals)
            assert list(rows) == expected


def test_a_match_grows_with_the_context_and_is_found_again_after_it_ended() -> None:
    answer = list(range(100))
    text = made([answer])
    match = text.find([7, 8, 9], 2, 3)
    assert match is not None
    assert match.length == 3
    assert text.copy(match, 5).token_ids == [10, 11, 12, 13, 14]
    assert text.find([50, 7, 8, 9], 2, 4) == match
    assert text.find([9, 50], 2, 4) is None
    assert text.find([8, 9], 3, 3) is None


def test_of_equal_places_the_last_goes_on_beyond_the_depth_of_sorting() -> None:
    common = list(range(200))
    text = made([[*common, 900], [*common, 901], [*common, 902]])
    match = text.find(common[:40], 2, MOST_MATCH)
    assert match is not None
    assert text.copy(match, 500).token_ids == [*common[40:], 902]


def test_many_places_are_counted_by_a_part_of_them() -> None:
    text = made([[1, 2, 3 if number % 4 else 4] for number in range(1000)])
    match = text.find([1, 2], 2, 2)
    assert match is not None
    copied = text.copy(match, 1)
    assert copied.token_ids == [3]
    assert copied.totals == [32]
    assert copied.counts[0] == pytest.approx(24, abs=1)
