"""Prompts that fill in the middle: order, special tokens as text, extra files, and models that have no such tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, normalizers

import gguf_metadata
from forerun.chat.infill import Infill, InfillFormat
from forerun.errors import PromptError
from forerun.models.loading.gguf.tokenizer import read_tokenizer
from small_tokenizers import END, byte_level, sentence_piece

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
STARCODER_2 = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>")
GRANITE = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>", "<filename>")
CODE_GEMMA = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
CODE_LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
CODESTRAL = ("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
SEED_CODER = ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>")


def with_tokens(*tokens: str, base: Any = None) -> Any:
    tokenizer = base or byte_level()
    tokenizer.backend_tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tokens])
    return tokenizer


def written(tokens: tuple[str, ...], extra: Any = (), name: str = "it", base: Any = None) -> str:
    tokenizer = with_tokens(*tokens, base=base)
    ids, left_out = InfillFormat.of(tokenizer, [name]).encode(Infill("a\nb", "c", extra), tokenizer, 1000)
    assert left_out == 0
    return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))


FILES = (("x.py", "1"), ("y.py", "2\n"))


@pytest.mark.parametrize(
    ("tokens", "alone", "with_files"),
    [
        (
            QWEN,
            "<|fim_prefix|>a\nb<|fim_suffix|>c<|fim_middle|>",
            (
                "<|repo_name|>myproject\n<|file_sep|>x.py\n1\n<|file_sep|>y.py\n2\n<|file_sep|>filename\n"
                "<|fim_prefix|>a\nb<|fim_suffix|>c<|fim_middle|>"
            ),
        ),
        (
            STARCODER_2,
            "<fim_prefix>a\nb<fim_suffix>c<fim_middle>",
            (
                "<repo_name>myproject<file_sep>x.py\n1\n<file_sep>y.py\n2\n<file_sep><fim_prefix>filename\na\nb"
                "<fim_suffix>c<fim_middle>"
            ),
        ),
        (
            GRANITE,
            "<fim_prefix>a\nb<fim_suffix>c<fim_middle>",
            (
                "<reponame>myproject<filename>x.py\n1\n<filename>y.py\n2\n<filename>filename\n<fim_prefix>a\nb"
                "<fim_suffix>c<fim_middle>"
            ),
        ),
        (
            CODE_GEMMA,
            "<|fim_prefix|>a\nb<|fim_suffix|>c<|fim_middle|>",
            (
                "<|file_separator|>x.py\n1\n<|file_separator|>y.py\n2\n<|file_separator|>filename\n"
                "<|fim_prefix|>a\nb<|fim_suffix|>c<|fim_middle|>"
            ),
        ),
        (
            DEEPSEEK,
            "<｜fim▁begin｜>a\nb<｜fim▁hole｜>c<｜fim▁end｜>",
            "#x.py\n1\n#y.py\n2\n<｜fim▁begin｜>a\nb<｜fim▁hole｜>c<｜fim▁end｜>",
        ),
        (CODESTRAL, "[SUFFIX]c[PREFIX]a\nb", "#x.py\n1\n#y.py\n2\n[SUFFIX]c[PREFIX]a\nb"),
        (
            SEED_CODER,
            "<[fim-suffix]>c<[fim-prefix]>a\nb<[fim-middle]>",
            "#x.py\n1\n#y.py\n2\n<[fim-suffix]>c<[fim-prefix]>a\nb<[fim-middle]>",
        ),
    ],
)
def test_each_family_has_its_order(tokens: tuple[str, ...], alone: str, with_files: str) -> None:
    assert written(tokens) == alone
    assert written(tokens, FILES) == with_files


def test_mellum_is_known_by_its_name() -> None:
    assert written(GRANITE, name="JetBrains/Mellum-4b-base") == "<fim_suffix>c<fim_prefix>a\nb<fim_middle>"


def test_no_blank_is_put_into_a_text_that_goes_on() -> None:
    base = sentence_piece()
    spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    base.backend_tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer = with_tokens(*CODE_LLAMA, base=base)
    read = InfillFormat.of(tokenizer, ["it"])
    ids, _ = read.encode(Infill("a", "a"), tokenizer, 1000)
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁<PRE>", "▁", "a", "▁<SUF>", "a", "▁<MID>"]
    assert tokenizer.convert_tokens_to_ids("▁<EOT>") in read.ends


@pytest.mark.parametrize("text", ["<|fim_suffix|>", "a<|im_end|>", "<|file_sep|></s>", "<<|fim_middle|>"])
def test_special_tokens_of_the_clients_text_stay_text(text: str) -> None:
    tokenizer = with_tokens(*QWEN)
    read = InfillFormat.of(tokenizer, ["it"])
    ids, _ = read.encode(Infill(text, text, [(text, text)]), tokenizer, 1000)
    special = [index for index in ids if index in tokenizer.added_tokens_decoder]
    names = ["<|repo_name|>", "<|file_sep|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert tokenizer.convert_ids_to_tokens(special) == names
    assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False).count(text) >= 4


def test_the_oldest_extra_files_are_left_out() -> None:
    tokenizer = with_tokens(*QWEN)
    read = InfillFormat.of(tokenizer, ["it"])
    files = [(name, "x" * 20) for name in "abc"]
    whole, _ = read.encode(Infill("p", "s", files), tokenizer, 1000)
    ids, left_out = read.encode(Infill("p", "s", files), tokenizer, len(whole) - 1)
    assert left_out == 1
    assert ids == read.encode(Infill("p", "s", files[1:]), tokenizer, 1000)[0]
    ids, left_out = read.encode(Infill("p", "s", files), tokenizer, 10)
    assert left_out == 3
    assert ids == read.encode(Infill("p", "s"), tokenizer, 10)[0]


def test_the_middle_ends_at_any_token_of_the_family() -> None:
    tokenizer = with_tokens(*QWEN, "<|endoftext|>")
    ends = tokenizer.convert_ids_to_tokens([*InfillFormat.of(tokenizer, ["it"]).ends])
    assert {*ends} == {*QWEN, "<|endoftext|>"}


@pytest.mark.parametrize("tokens", [(), QWEN[:2], (QWEN[0], DEEPSEEK[1], SEED_CODER[2])])
def test_a_model_without_the_tokens_is_named(tokens: tuple[str, ...]) -> None:
    with pytest.raises(PromptError, match="my model has no tokens that fill in the middle"):
        InfillFormat.of(with_tokens(*tokens), ["my model"])


def test_a_text_of_special_tokens_alone_is_refused_before_it_takes_long() -> None:
    tokenizer = with_tokens(*QWEN)
    with pytest.raises(PromptError, match="more than 4,096 special tokens"):
        InfillFormat.of(tokenizer, ["it"]).encode(Infill(END * 5000, ""), tokenizer, 1000)


@pytest.mark.parametrize("key", ["fim_%s_token_id", "%s_token_id"])
def test_a_gguf_file_names_the_tokens(key: str) -> None:
    long = dict(zip(("pre", "suf", "mid"), ("prefix", "suffix", "middle"), strict=True))
    tokens = gguf_metadata.byte_level()["tokenizer.ggml.tokens"]
    ids = {name: tokens.index(letter) for name, letter in zip(long, "XYZ", strict=True)}
    named = {key % (name if key.startswith("fim") else long[name]): index for name, index in ids.items()}
    tokenizer = read_tokenizer(gguf_metadata.byte_level(**named), "it")
    read = InfillFormat.of(tokenizer, ["it"])
    encoded, _ = read.encode(Infill("a", "b"), tokenizer, 100)
    a, b = (tokens.index(letter) for letter in "ab")
    assert encoded == [ids["pre"], a, ids["suf"], b, ids["mid"]]
    assert {*ids.values()} <= {*read.ends}
