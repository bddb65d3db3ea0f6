"""The automaton of stop strings against the search that it replaced, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given, strategies as st

from doubles import FakeModel, PieceTokenizer
from forerun import LLM, SamplingParams
from forerun.config import MAX_STOP_CHARACTERS
from forerun.engine.text import Detokenizer, StopStrings, TextStream, TokenTexts
from forerun.errors import SamplingError
from fuzzing import examples

PIECES = PieceTokenizer([b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", b"abba", b"aaaa", b"c"])
TEXTS = TokenTexts(PIECES)
BYTES = TokenTexts(PieceTokenizer.of_bytes())


class Searched:
    """The definition: every stop string is searched for, and every prefix of each compared, after every token."""

    def __init__(self, stops: Seq[str]) -> None:
        self.detokenizer, self.stops, self.held, self.shown = Detokenizer(TEXTS, []), stops, "", ""

    def push(self, ids: Seq[int], num_exempt: int) -> int | None:
        for i, token_id in enumerate(ids):
            new = self.detokenizer.push((token_id,))
            at = self.find(new) if i >= num_exempt else None
            if at is not None:
                self.shown += (self.held + new)[:at]
                return i + 1
            text = self.held + new
            border = len(text) - max((overlap(text, stop) for stop in self.stops), default=0)
            self.shown, self.held = self.shown + text[:border], text[border:]
        return None

    def finish(self) -> None:
        new = self.detokenizer.flush()
        self.shown += (self.held + new)[: self.find(new)]

    def find(self, new: str) -> int | None:
        text, old = self.held + new, len(self.held)
        found = [text.find(stop, max(0, old - len(stop) + 1)) for stop in self.stops if new]
        return min((at for at in found if at >= 0), default=None)


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of text that is a proper prefix of stop."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


STOPS = st.lists(st.text("abé\ufffd", min_size=1, max_size=9), max_size=9)


@examples(400)
@given(
    stops=STOPS,
    ids=st.lists(st.integers(0, 9), max_size=40),
    size=st.integers(1, 7),
    exempt=st.sampled_from([0, 3, 20]),
)
def test_it_ends_and_holds_back_as_the_search_did(stops: list[str], ids: list[int], size: int, exempt: int) -> None:
    stream, searched = TextStream(TEXTS, [], StopStrings(stops)), Searched(stops)
    for done in range(0, len(ids), size):
        block = ids[done : done + size]
        num_exempt = min(max(exempt - done, 0), len(block))
        stopped = stream.push(block, num_exempt)
        assert stopped == searched.push(block, num_exempt)
        assert stream.text == searched.shown
        if stopped is not None:
            return
    stream.finish()
    searched.finish()
    assert stream.text == searched.shown


class Counted(str):
    """Counts how often it is indexed or cut."""

    __slots__ = ()
    count = 0

    def __getitem__(self, index: Any) -> str:
        Counted.count += 1
        return super().__getitem__(index)


def alike(count: int, length: int) -> list[str]:
    """Strings that begin alike, and differ at their ends."""
    return [Counted("a" * (length - 4) + f"{number:04}") for number in range(count)]


@pytest.mark.parametrize("text", ["a" * 5000, ("a" * 399 + "b") * 12], ids=["held", "let go"])
def test_the_strings_are_read_once_however_long_the_text(text: str) -> None:
    stops, Counted.count = StopStrings(alike(256, 400)), 0
    for _ in range(3):  # choices of one request
        stream = TextStream(BYTES, [], stops)
        assert stream.push(list(text.encode())) is None
        stream.finish()
        assert stream.text == text
    assert Counted.count <= 256 * 400


def test_the_choices_of_a_request_share_the_strings() -> None:
    target = FakeModel(300, seed=1)
    tokenizer = PieceTokenizer([b"a"] * 300)
    Counted.count = 0
    params = SamplingParams(n=16, seed=1, max_tokens=50, stop=alike(64, 400))
    result = LLM(target, None, tokenizer=tokenizer).generate([1, 2], params)
    assert [choice.text for choice in result.choices] == ["a" * 50] * 16
    assert Counted.count <= 64 * 400


def test_many_strings_that_end_alike_are_no_deep_recursion() -> None:
    stops = StopStrings([("a" * length) + "b" for length in range(400)])
    stream = TextStream(BYTES, [], stops)
    assert stream.push(list(("a" * 401 + "c").encode())) is None
    assert stream.push(list(("a" * 401 + "b").encode())) == 402
    assert stream.text == "a" * 401 + "c" + "a" * 2  # the longest begins first


def test_the_length_of_all_strings_is_bounded() -> None:
    SamplingParams(stop=["a" * (MAX_STOP_CHARACTERS // 2)] * 2)
    with pytest.raises(SamplingError, match="stop has 131073 characters in all, but may have 131072"):
        SamplingParams(stop=["a" * (MAX_STOP_CHARACTERS // 2)] * 2 + ["a"])
