from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from forerun.train.corpus import SourceFile
from tools.lm import END_OF_TEXT, train_tokenizer

TEXTS = [
    "def f(a, b):\n    return a + b\n",
    "\n\n\n\t\tif x:\n\n        pass  \n",
    "x = 'naïve 你好 🙂'\r\nprint( x )\t# done",
    "a__b___c = 0x1F + 12_345.678e-9\x00\x7f",
    "",
    " ",
]


@pytest.fixture
def tokenizer(files: list[SourceFile]):
    return train_tokenizer((file.text for file in files), 275)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_survives_the_round_trip(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_it_is_saved_as_an_ordinary_tokenizer(tokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.eos_token == loaded.bos_token == loaded.pad_token == END_OF_TEXT


def test_sizes_and_pieces(tokenizer) -> None:
    assert len(tokenizer) == 275
    assert len(tokenizer("1234")["input_ids"]) == 4
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("if x:\n\n    return y[12]\n")
    assert [piece for piece, _ in pieces] == ["if", "Ġx", ":", "ĊĊĠĠĠĠ", "return", "Ġy", "[", "1", "2", "]", "Ċ"]
    assert tokenizer.eos_token_id not in tokenizer("plain text")["input_ids"]
