"""Detokenisation as tokens arrive, and stop strings wherever they lie."""

import random

import pytest

from doubles import PieceTokenizer
from forerun.engine.text import Detokenizer, TextStream

BYTES = PieceTokenizer.of_bytes()
SENTENCE = "naïve façade — 東京 👩‍👩‍👧 done"
PIECES = PieceTokenizer([b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b" ", b"bab", b"x"])


def blocks(ids: list[int], seed: int) -> list[list[int]]:
    """The list cut into random blocks, as steps of a speculative run would."""
    rng, out = random.Random(seed), []
    while ids:
        size = rng.randint(1, 5)
        out.append(ids[:size])
        ids = ids[size:]
    return out


@pytest.mark.parametrize("seed", range(20))
def test_characters_come_whole(seed: int) -> None:
    detokenizer = Detokenizer(BYTES, [])
    parts = [detokenizer.push(block) for block in blocks(list(SENTENCE.encode()), seed)]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == SENTENCE
    assert detokenizer.flush() == ""


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    prompt, rest = list("a€".encode())[:-1], list("€b".encode())[-2:]
    assert Detokenizer(BYTES, prompt).push(rest) == "€b"


def test_the_end_is_the_whole_decoding() -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(len(PIECES.pieces)) for _ in range(12)]
        detokenizer = Detokenizer(PIECES, [])
        text = "".join(detokenizer.push(block) for block in blocks(ids, rng.randrange(99))) + detokenizer.flush()
        assert text == PIECES.decode(ids)


def test_bytes_that_are_no_character_are_not_held_for_ever() -> None:
    detokenizer = Detokenizer(BYTES, [])
    parts = [detokenizer.push([0xE2]) for _ in range(200)]
    assert len("".join(parts)) > 150


def test_decoding_costs_the_same_however_long_the_text() -> None:
    tokenizer = PieceTokenizer.of_bytes()
    stream = TextStream(tokenizer, list(b"prompt"), ["never so"])
    for token_id in list("lorem ipsum né ".encode()) * 200:
        stream.push([token_id])
    assert tokenizer.num_decoded < 8 * 16 * 200


def naive(ids: list[int], stops: list[str], num_exempt: int) -> tuple[int | None, str]:
    """The definition: decode every prefix from the start."""
    before = 0
    for count in range(1, len(ids) + 1):
        text = PIECES.decode(ids[:count]).rstrip("\ufffd")
        if count > num_exempt:
            found = [
                at for stop in stops for at in range(len(text)) if text.startswith(stop, at) and at + len(stop) > before
            ]
            if found:
                return count, text[: min(found)]
        before = max(before, len(text))
    return None, PIECES.decode(ids)


@pytest.mark.parametrize(
    "stops", [["ab"], ["abab"], ["é"], ["€a", "b a"], ["aba", "xab", "b"], [" x "], ["bb", "abba"]]
)
@pytest.mark.parametrize("num_exempt", [0, 3])
def test_stop_strings_against_the_definition(stops: list[str], num_exempt: int) -> None:
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(len(PIECES.pieces)) for _ in range(10)]
        count, text = naive(ids, stops, num_exempt)
        stream, done, shown, stopped = TextStream(PIECES, [], stops), 0, "", None
        for block in blocks(ids, rng.randrange(99)):
            found = stream.push(block, min(len(block), max(0, num_exempt - done)))
            shown += stream.take()
            if found is not None:
                stopped = done + found
                break
            done += len(block)
        else:
            stream.finish()
        shown += stream.take()
        assert (stopped, shown) == (count, text)
        assert stream.text == text


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(BYTES, [], ["</end>"])
    stream.push(list(b"one </e"))
    assert stream.take() == "one "
    stream.push(list(b"x two"))
    assert stream.take() == "</ex two"
    assert stream.push(list(b"</end> three")) == 6
    assert stream.take() == ""
    assert stream.text == "one </ex two"
