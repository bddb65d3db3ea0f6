"""What is made without Transformers, of the bundled models and of GGUF files, is what Transformers makes."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.config import BUNDLED_MODELS
from forerun.engine.chat_template import encode, with_template
from forerun.errors import PromptError
from forerun.models.families.table import description_of, frequencies
from forerun.models.loading.gguf.tokenizer import read_tokenizer
from forerun.models.loading.source import find_source
from forerun.utils import vocabulary
from gguf_metadata import byte_level, sentencepiece, smollm2

TOKENIZERS = {
    **{name: lambda name=name: find_source(name).tokenizer() for name in BUNDLED_MODELS},
    "byte-level": lambda: read_tokenizer(byte_level("qwen2", padding_token_id=0), "m.gguf"),
    "ends": lambda: read_tokenizer(byte_level(add_bos_token=True, add_eos_token=True), "m.gguf"),
    "sentencepiece": lambda: read_tokenizer(sentencepiece(), "m.gguf"),
    "no space before": lambda: read_tokenizer(sentencepiece(add_space_prefix=False), "m.gguf"),
    "smollm2": lambda: read_tokenizer(smollm2(), "m.gguf"),
}
TEXTS = (
    *("", " ", "a  b ", "hello world!", "he</s> <s>he<tool>", "x . y , z ! n't", "\n\n\t 12", "<|endoftext|>a"),
    *("e\u0301 \ufb01 日本 \U0001f469\u200d\U0001f467", "\u2581he<0x0A>", "<|im_end|>\n<|im_start|>user", "\ufeff\x00"),
)
WRITTEN = "{{ messages[0].content }}"
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_are_those_of_transformers(name: str) -> None:
    ours: Any = TOKENIZERS[name]()
    theirs = TOKENIZERS[name]().full
    for text in TEXTS:
        for special in (False, True):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == ids
            assert vocabulary.encode_text(ours, text, special=special) == ids
        for options in ({}, {"skip_special_tokens": True}, {"clean_up_tokenization_spaces": True}):
            assert ours.decode(ids, **options) == theirs.decode(ids, **options)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        assert ours.convert_ids_to_tokens(ids, skip_special_tokens=True) == theirs.convert_ids_to_tokens(
            ids, skip_special_tokens=True
        )
    asked = ["he", "a", "</s>", "no such token"]
    assert ours.convert_tokens_to_ids(asked) == theirs.convert_tokens_to_ids(asked)
    assert ours.convert_ids_to_tokens(len(ours)) is theirs.convert_ids_to_tokens(len(ours)) is None
    for key in (*ROLES, *(f"{role}_id" for role in ROLES), "special_tokens_map", "all_special_tokens"):
        assert getattr(ours, key) == getattr(theirs, key)
    assert ours.all_special_ids == theirs.all_special_ids and len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert {key: repr(each) for key, each in ours.added_tokens_decoder.items()} == {
        key: repr(each) for key, each in theirs.added_tokens_decoder.items()
    }
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    for of in (vocabulary.fingerprint, vocabulary.special_tokens, vocabulary.token_bytes):
        assert of(ours) == of(theirs)


def test_all_else_is_asked_of_transformers() -> None:
    tokenizer = read_tokenizer(byte_level(), "m.gguf")
    tokenizer.chat_template = WRITTEN + "{{ eos_token }}"
    assert tokenizer(["he", "12"], return_tensors="np")["input_ids"].shape == (2, 1)
    assert tokenizer("he").input_ids == tokenizer.encode("he", return_tensors="np").tolist()[0]
    assert tokenizer.decode([[0], [1]]) == ["</s>", "<s>"] and tokenizer.name_or_path == ""
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "he</s>"


@pytest.mark.parametrize("is_made", [False, True])
def test_what_is_changed_of_one_is_changed_of_both(is_made: bool) -> None:
    tokenizer = read_tokenizer(byte_level(), "m.gguf")
    chat = [{"role": "user", "content": "he"}]
    if is_made:
        assert tokenizer.full.chat_template is None
    given = with_template(tokenizer, WRITTEN + "ab")
    tokenizer.chat_template = WRITTEN + "12"
    assert encode(chat, tokenizer, "m") == tokenizer.encode("he12")
    full = tokenizer.full
    assert full.chat_template == WRITTEN + "12"
    full.chat_template = WRITTEN + "{{ eos_token }}"
    tokenizer.eos_token = "<s>"
    assert tokenizer.eos_token_id == full.eos_token_id == tokenizer.get_vocab()["<s>"]
    assert "<s>" in tokenizer.all_special_tokens
    length = len(tokenizer)
    full.add_special_tokens({"pad_token": "<X>"})
    assert (tokenizer.pad_token_id, len(tokenizer)) == (length, length + 1) == (tokenizer.encode("<X>")[0], len(full))
    tokenizer.clean_up_tokenization_spaces = True
    assert tokenizer.decode(full.encode("a .")) == full.decode(full.encode("a ."))
    full(["he", "hello"], padding=True, truncation=True, max_length=2)
    assert vocabulary.encode_text(tokenizer, "hello" * 9, special=False) == full.encode("hello" * 9)
    assert encode(chat, tokenizer, "m") == tokenizer.encode("he<s>")
    assert encode(chat, given, "m") == given.encode("heab") and given.full.chat_template == WRITTEN + "ab"


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_configurations_are_those_of_transformers(name: str) -> None:
    source = find_source(name)
    plain, config = source.plain_config(), source.config()
    ours, theirs = description_of(plain), description_of(config)
    assert ours == theirs and ours.served is not None
    pairs = zip(frequencies(plain, ours.served), frequencies(config, ours.served), strict=True)
    assert all(a.equal(b) and x == y for (a, x), (b, y) in pairs)
    assert plain.dtype == str(config.dtype).removeprefix("torch.")
    assert all(getattr(config, key) == value for key, value in vars(plain).items() if key != "dtype")
    assert source.eos_token_ids(plain) == source.eos_token_ids(config)


@pytest.mark.parametrize("template", ["a\n{% if %}", "{{" + "(" * 9999])
def test_a_template_that_is_no_jinja_refuses_chats_alone(template: str) -> None:
    tokenizer = read_tokenizer(byte_level() | {"tokenizer.chat_template": template}, "m.gguf")
    assert tokenizer.encode("hello") == encode("hello", tokenizer, "m.gguf")
    with pytest.raises(PromptError, match=r"The chat template of m\.gguf"):
        encode([{"role": "user", "content": "he"}], tokenizer, "m.gguf")
