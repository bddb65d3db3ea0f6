"""The automaton against its definition: search all texts anew."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from forerun.drafters.lookup.suffix_automaton import ROOT, SuffixAutomaton

ALL = 10**9


def built(texts: list[list[int]], interleaved: random.Random | None = None) -> tuple[SuffixAutomaton, list[int]]:
    """Build an automaton of texts written one after the other, or in turns, and return it with the states in which they
    end."""
    automaton = SuffixAutomaton(ALL)
    ends = [ROOT] * len(texts)
    at = [0] * len(texts)
    while open_texts := [i for i, text in enumerate(texts) if at[i] < len(text)]:
        i = interleaved.choice(open_texts) if interleaved else open_texts[0]
        ends[i] = automaton.add(ends[i], texts[i][at[i]])
        at[i] += 1
    return automaton, ends


def walk(automaton: SuffixAutomaton, string: list[int]) -> int:
    state = ROOT
    for token in string:
        state = automaton.follow(state, token)
        if state < 0:
            return -1
    return state


def occurrences(texts: list[list[int]]) -> Counter[tuple[int, ...]]:
    """Count how often each string occurs in the texts. A common beginning of texts is one occurrence."""
    places = {tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)}
    found: Counter[tuple[int, ...]] = Counter()
    for text in places:
        found.update(text[start:] for start in range(len(text)))
    return found


def random_texts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(3) for _ in range(rng.randint(1, 18))] for _ in range(count)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("in_turns", [False, True])
def test_it_knows_every_string_of_its_texts_and_no_other(count: int, in_turns: bool) -> None:
    rng = random.Random(count)
    for _ in range(60):
        texts = random_texts(rng, count)
        automaton, ends = built(texts, rng if in_turns else None)
        known = occurrences(texts)
        for string in known:
            assert walk(automaton, list(string)) > ROOT
            for token in range(4):
                assert (walk(automaton, [*string, token]) > ROOT) == ((*string, token) in known)
        for text, end in zip(texts, ends, strict=True):
            assert walk(automaton, text) == end
            assert automaton._length[end] == len(text)


def test_a_state_stands_for_the_strings_that_end_at_the_same_places() -> None:
    rng = random.Random(2)
    for _ in range(60):
        (text,) = random_texts(rng, 1)
        automaton, _ = built([text])
        endings: dict[int, set[frozenset[int]]] = {}
        for start in range(len(text)):
            for end in range(start + 1, len(text) + 1):
                size = end - start
                places = frozenset(i for i in range(size, len(text) + 1) if text[i - size : i] == text[start:end])
                state = walk(automaton, text[start:end])
                endings.setdefault(state, set()).add(places)
                assert automaton._count[state] == len(places)
                assert automaton._length[state] >= size
        assert all(len(places) == 1 for places in endings.values())
        assert len({next(iter(places)) for places in endings.values()}) == len(endings) == len(automaton) - 1


def test_counts_over_several_texts() -> None:
    rng = random.Random(3)
    for _ in range(60):
        texts = random_texts(rng, 3)
        automaton, _ = built(texts)
        every = Counter(
            tuple(text[start:end]) for text in texts for end in range(1, len(text) + 1) for start in range(end)
        )
        for string, times in every.items():
            assert automaton._count[walk(automaton, list(string))] == times


@pytest.mark.parametrize("seed", range(4))
def test_the_match_is_the_longest_suffix_that_stands_in_a_text(seed: int) -> None:
    rng = random.Random(seed)
    automaton = SuffixAutomaton(ALL)
    texts: list[list[int]] = [[], []]
    ends = [ROOT, ROOT]
    string: list[int] = []
    state, length = ROOT, 0
    for _ in range(150):
        if rng.random() < 0.4:  # the texts grow while they are read
            i = rng.randrange(2)
            texts[i].append(rng.randrange(3))
            ends[i] = automaton.add(ends[i], texts[i][-1])
        token = rng.randrange(3)
        before, string = string[len(string) - length :], [*string, token]
        state, length = automaton.match(state, length, token)
        known = occurrences(texts)
        tried = [*before, token]
        expected = next((tried[i:] for i in range(len(tried)) if tuple(tried[i:]) in known), [])
        assert length == len(expected)
        assert automaton._length[state] >= length
        assert walk(automaton, expected) in (state, *_links(automaton, state))


def test_a_match_outlives_the_split_of_its_state() -> None:
    automaton, _ = built([[8, 1, 2]])
    state, length = automaton.match(ROOT, 0, 2)
    assert (automaton._length[state], length) == (3, 1)
    end = ROOT
    for token in (1, 2, 5):
        end = automaton.add(end, token)
    assert automaton.match(state, length, 5) == (end, 2)  # not 1 2 5, of which only 2 5 was read


def _links(automaton: SuffixAutomaton, state: int) -> list[int]:
    """Yield the states of a state's suffixes: a match may be from before its state was split."""
    states = []
    while state != ROOT:
        state = automaton._link[state]
        states.append(state)
    return states


def followers(text: list[int], string: list[int]) -> dict[int, tuple[int, int]]:
    """Return what follows a string in a text: token -> how often, and where last."""
    found: dict[int, tuple[int, int]] = {}
    for i in range(len(text) - len(string)):
        if text[i : i + len(string)] == string:
            token = text[i + len(string)]
            found[token] = (found.get(token, (0, 0))[0] + 1, i)
    return found


def naive_copy(text: list[int], count: int, min_match: int) -> tuple[list[int], list[int]]:
    string, tokens, lengths = text, [], []
    while len(tokens) < count:
        while string and not followers(text, string):
            string = string[1:]
        if len(string) < min_match:
            break
        found = followers(text, string)
        tokens.append(max(found, key=lambda token: found[token]))
        lengths.append(len(string))
        string = [*string, tokens[-1]]
    return tokens, lengths


@pytest.mark.parametrize("min_match", [1, 3])
def test_a_copy_goes_on_with_the_most_frequent_then_most_recent_token(min_match: int) -> None:
    rng = random.Random(min_match)
    for _ in range(80):
        text = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        automaton, (end,) = built([text])
        assert automaton.copy(end, len(text), 12, min_match) == naive_copy(text, 12, min_match)


def test_a_copy_of_what_repeats_goes_on_beyond_the_end() -> None:
    automaton, (end,) = built([[7, 1, 2, 3, 1, 2, 3]])
    assert automaton.copy(end, 7, 8) == ([1, 2, 3, 1, 2, 3, 1, 2], [3, 4, 5, 3, 4, 5, 3, 4])


def test_nothing_follows_in_an_empty_text() -> None:
    automaton = SuffixAutomaton()
    assert automaton.copy(ROOT, 0, 5) == ([], [])
    assert automaton.match(ROOT, 0, 3) == (ROOT, 0)
    end = automaton.add(ROOT, 3)
    assert automaton.copy(end, 1, 5) == ([], [])
    assert automaton.match(ROOT, 0, 3) == (end, 1)


def test_a_common_beginning_is_held_once() -> None:
    automaton, _ = built([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]])
    assert automaton.num_tokens == 5
    assert automaton._count[walk(automaton, [2, 3])] == 3


class Counted(SuffixAutomaton):
    """Counts its elementary operations."""

    operations = 0

    def follow(self, state: int, token: int) -> int:
        self.operations += 1
        return super().follow(state, token)

    def _set(self, state: int, token: int, target: int) -> None:
        self.operations += 1
        super()._set(state, token, target)


@pytest.mark.parametrize("period", [1, 2, 7, 1000, 4000])
def test_work_and_memory_are_a_constant_per_token(period: int) -> None:
    rng = random.Random(period)
    pattern = [rng.randrange(50) for _ in range(period)]
    automaton = Counted()
    end = ROOT
    for i in range(4000):
        end = automaton.add(end, pattern[i % period])
    assert automaton.operations < 8 * 4000
    assert len(automaton) <= 2 * 4000
    assert automaton.nbytes < 300 * 4000
    assert automaton.nbytes > 20 * len(automaton)


def test_no_token_of_a_long_period_counts_all_its_suffixes() -> None:
    few, every = SuffixAutomaton(4), SuffixAutomaton(ALL)
    for automaton in (few, every):
        end = ROOT
        for _ in range(30):
            end = automaton.add(end, 1)
        assert automaton.copy(end, 30, 3)[0] == [1, 1, 1]
    assert every._count[walk(every, [1])] == 30
    assert few._count[walk(few, [1])] == 4
