"""What a tokenizer tells of its tokens, and texts in them."""

from __future__ import annotations

import pytest

from forerun.utils.vocabulary import encode_text, special_tokens
from small_tokenizers import END, TURN, byte_level, ids_of, sentence_piece


def test_special_tokens_are_those_that_are_named_and_those_that_were_added() -> None:
    for tokenizer in (byte_level(), sentence_piece()):
        assert special_tokens(tokenizer) == dict(zip([END, TURN], ids_of(tokenizer, END, TURN), strict=True))
    assert special_tokens(object()) == {}


def test_what_is_named_and_no_token_is_none() -> None:
    tokenizer = byte_level()
    tokenizer.eos_token = ""
    assert special_tokens(tokenizer) == dict(zip([END, TURN], ids_of(tokenizer, END, TURN), strict=True))


@pytest.mark.parametrize("special", [False, True])
def test_a_text_longer_than_the_tokenizers_length_is_encoded_without_a_warning(
    special: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level()
    tokenizer.model_max_length = 3
    assert len(encode_text(tokenizer, "abcdefgh", special=special)) == 8
    assert "indexing errors" not in caplog.text + "".join(capfd.readouterr())
