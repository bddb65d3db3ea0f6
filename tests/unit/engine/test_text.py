"""Detokenisation as tokens arrive, and stop strings wherever they lie."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from doubles import PieceTokenizer
from forerun.engine.text import Detokenizer, StopStrings, TextStream, TokenTexts
from small_tokenizers import END, TURN, byte_level, bytes_of, ids_of, sentence_piece

BYTES = TokenTexts(PieceTokenizer.of_bytes())
SENTENCE = "naïve façade — 東京 👩‍👩‍👧 done"
PIECES = PieceTokenizer([b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b" ", b"bab", b"x"])
TEXTS = TokenTexts(PIECES)


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
        detokenizer = Detokenizer(TEXTS, [])
        text = "".join(detokenizer.push(block) for block in blocks(ids, rng.randrange(99))) + detokenizer.flush()
        assert text == PIECES.decode(ids)


def test_bytes_that_are_no_character_are_not_held_for_ever() -> None:
    detokenizer = Detokenizer(BYTES, [])
    parts = [detokenizer.push([0xE2]) for _ in range(200)]
    assert len("".join(parts)) > 150


def test_decoding_costs_the_same_however_long_the_text() -> None:
    tokenizer = PieceTokenizer.of_bytes()
    stream = TextStream(TokenTexts(tokenizer), list(b"prompt"), StopStrings(["never so"]))
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
        stream, done, shown, stopped = TextStream(TEXTS, [], StopStrings(stops)), 0, "", None
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
    stream = TextStream(BYTES, [], StopStrings(["</end>"]))
    stream.push(list(b"one </e"))
    assert stream.take() == "one "
    stream.push(list(b"x two"))
    assert stream.take() == "</ex two"
    assert stream.push(list(b"</end> three")) == 6
    assert stream.take() == ""
    assert stream.text == "one </ex two"


@pytest.fixture(params=["byte-level", "llama", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """A tokenizer of either kind."""
    return byte_level() if request.param == "byte-level" else sentence_piece(request.param)


def streamed(tokenizer: Any, prompt: Seq[int], ids: Seq[int], size: int) -> str:
    """The text of tokens that come in blocks of this size."""
    detokenizer = Detokenizer(TokenTexts(tokenizer), prompt)
    return "".join(detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)) + detokenizer.flush()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 200])
def test_characters_come_whole_at_every_size_of_block(tokenizer: Any, size: int) -> None:
    text = "今天天气很好。" * 3 + "👩‍👩‍👧 é🙂"
    ids = bytes_of(tokenizer, text)
    assert streamed(tokenizer, ids_of(tokenizer, "hello"), ids, size) == text


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("special", [END, TURN])
def test_a_space_after_a_special_token_is_not_lost(special: str, size: int) -> None:
    for decoder in ("llama", "metaspace"):
        tokenizer = sentence_piece(decoder)
        ids = ids_of(tokenizer, "\u2581hello", special, special, "\u2581world", special, "ld")
        assert streamed(tokenizer, ids_of(tokenizer, "\u2581a"), ids, size) == " hello worldld"
        assert streamed(tokenizer, ids_of(tokenizer, special), ids, size) == "hello worldld"  # nothing before it
        stream = TextStream(TokenTexts(tokenizer), ids_of(tokenizer, "a"), StopStrings(["o world"]))
        assert stream.push(ids) == 4
        assert stream.text == " hell"


def test_a_character_that_the_prompt_begins_is_the_answers_if_it_completes_it(tokenizer: Any) -> None:
    euro, a = bytes_of(tokenizer, "€"), ids_of(tokenizer, "a")
    for before in ([], a, a * 20, bytes_of(tokenizer, b"\x82\x82\xe2"), bytes_of(tokenizer, "€")):
        for begun in (1, 2):
            prompt = [*before, *euro[:begun]]
            assert streamed(tokenizer, prompt, [*euro[begun:], *a], 1) == "€a"
            assert streamed(tokenizer, prompt, [*euro[begun:], *a], 9) == "€a"
            assert streamed(tokenizer, prompt, [*a, *a], 1) == "aa"  # the replacement character is the prompt's
            assert streamed(tokenizer, prompt, [*euro, *euro[:2]], 1) == "€\ufffd"
            assert streamed(tokenizer, prompt, [], 1) == ""
    assert streamed(tokenizer, [*a, *euro[:1]], euro[1:2], 1) == ""


def test_special_tokens_are_found_named_or_not(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    assert texts.special == dict(zip([END, TURN], ids_of(tokenizer, END, TURN), strict=True))
    assert [texts.skips(index) for index in (*texts.special.values(), len(tokenizer), ids_of(tokenizer, "a")[0])] == [
        True,
        True,
        True,
        False,
    ]
