"""Tokenizers from the metadata of GGUF files: both kinds, special tokens, end tokens, templates, and bad input."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, set_split_regex

from forerun.engine.chat_template import encode
from forerun.errors import ModelLoadError, PromptError, UnsupportedModelError
from forerun.models.loading.gguf.tokenizer import SPLIT_RULES, eos_token_ids, read_tokenizer
from forerun.models.loading.source import find_source
from gguf_files import TINY, write_gguf
from gguf_metadata import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, byte_level, sentencepiece
from gguf_models import tiny
from small_tokenizers import decoded

T = "tokenizer.ggml."
LENGTH = len(byte_level()[T + "tokens"])
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{{ eos_token }}{% endfor %}"


def tokens_of(tokenizer: Any, text: str, *, special: bool = False) -> list[str]:
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    tokens: list[str] = tokenizer.convert_ids_to_tokens(ids)
    return tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["hell", "o", "Ġwo", "Ġ", "123", "!", "Ċ", "ĠĠ", "Ġ", "1"]),
        ("smollm", ["hell", "o", "Ġwo", "Ġ", "1", "2", "3", "!", "Ċ", "ĠĠ", "Ġ", "1"]),
        ("llama-bpe", ["hello", "Ġwo", "Ġ", "123", "!Ċ", "ĠĠ", "Ġ", "1"]),
        ("qwen2", ["hell", "o", "Ġwo", "Ġ", "1", "2", "3", "!Ċ", "ĠĠ", "Ġ", "1"]),
        ("tekken", ["hello", "Ġwo", "Ġ", "1", "2", "3", "!Ċ", "ĠĠ", "Ġ", "1"]),
        ("gpt-4o", ["hell", "o", "Ġwo", "Ġ", "123", "!Ċ", "ĠĠ", "Ġ", "1"]),
        ("exaone4", ["hell", "o", "Ġwo", "Ġ", "123", "!", "Ċ", "ĠĠ", "Ġ", "1"]),
        ("glm4", ["hell", "o", "Ġwo", "Ġ", "123", "!Ċ", "ĠĠ", "Ġ", "1"]),
        ("seed-coder", ["hell", "o", "Ġwo", "Ġ", "1", "2", "3", "!", "Ċ", "ĠĠ", "Ġ", "1"]),
        ("hunyuan-dense", ["hell", "o", "Ġwo", "Ġ", "123", "!Ċ", "ĠĠ", "Ġ", "1"]),
        ("deepseek-v3", ["hell", "o", "Ġwo", "Ġ", "123", "!Ċ", "ĠĠ", "Ġ", "1"]),
        ("deepseek-llm", ["hell", "o", "Ġwo", "Ġ", "123", "!", "Ċ", "ĠĠ", "Ġ", "1"]),
        ("deepseek-coder", ["hell", "o", "Ġwo", "Ġ", "1", "2", "3", "!", "Ċ", "ĠĠ", "Ġ", "1"]),
    ],
)
def test_the_name_of_the_pre_tokenizer_decides_how_text_is_split(pre: str, expected: list[str]) -> None:
    # "hello" is a token that no merge makes, so only llama-bpe, which takes whole parts, gives it
    metadata = byte_level(pre)
    metadata[T + "merges"] = [merge for merge in metadata[T + "merges"] if merge != "hell o"]
    tokenizer = read_tokenizer(metadata, "m.gguf")
    assert tokens_of(tokenizer, "hello wo 123!\n   1") == expected


def test_letters_without_case_are_split_apart_for_deepseek() -> None:
    split = read_tokenizer(byte_level("deepseek-llm"), "m.gguf").backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for text in ("ЯÖ| ÉЯ", "Ö|\u0561", "Ö|\u10d0", "Ö|\U0001d400", "Ö|你", "Ö| -\uff0e", "Ö|  "):
        pieces = [text.replace("|", "")[start:end] for _, (start, end) in split(text.replace("|", ""))]
        assert pieces == text.split("|")


@pytest.mark.parametrize("pre", sorted(SPLIT_RULES.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_texts_are_split_as_transformers_splits_them(pre: str) -> None:
    theirs = set_split_regex(GPT2Tokenizer(vocab={"a": 0}, merges=[]), {"pre_tokenizer_type": pre})
    ours = read_tokenizer(byte_level(pre), "m.gguf").backend_tokenizer.pre_tokenizer
    for text in (
        "It'S he\u017fs 12345 ÉCOLE école/ Ünï",
        "  a\r\n\n\tif x==1:  # 你好世界 ３४५",
        "e\u0301e ka\u0301 'Ll DON'T",
    ):
        assert ours.pre_tokenize_str(text) == theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)


@pytest.mark.parametrize(("pre", "kind"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_ids_and_texts_are_those_of_transformers_own_tokenizers(pre: str, kind: Any) -> None:
    metadata = byte_level(pre)
    ours = read_tokenizer(metadata, "m.gguf")
    merges = [tuple(merge.split(" ")) for merge in metadata[T + "merges"]]
    theirs = kind(vocab={token: index for index, token in enumerate(metadata[T + "tokens"])}, merges=merges)
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(generator.choices([*"helow123! \n", "hello wo", "Z\u00fc", "\u4f60", "  ", "'s"], k=12))
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids and decoded(ours, ids) == decoded(theirs, ids) == text


def test_special_tokens() -> None:
    tokenizer = read_tokenizer(byte_level(), "m.gguf")
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("</s>", "<s>", None)
    assert tokens_of(tokenizer, "he</s> <tool>12</s", special=True) == ["he", "</s>", "Ġ", "<tool>", "12", *"</s"]
    # control tokens are no part of a text, user-defined ones are
    assert decoded(tokenizer, tokenizer("he</s><tool>")["input_ids"]) == "he<tool>"
    # unused tokens at the end are none
    assert len(tokenizer) == len(byte_level()[T + "tokens"]) - 2
    assert tokenizer.convert_ids_to_tokens(len(tokenizer)) is None
    tokens, types = byte_level()[T + "tokens"], byte_level()[T + "token_type"]
    late = byte_level(tokens=[*tokens, "<|im_end|>", "[PAD3]"], token_type=[*types, CONTROL, UNUSED])
    assert read_tokenizer(late, "m.gguf")("<|im_end|>")["input_ids"] == [len(tokens)]


def test_merges_of_gemma_4() -> None:
    words = ["\u2581", "h", "e", "he", "\u2581he", "\n", "\n\n", "e\n", "\u2581\u2581"]
    listed = sentencepiece()[T + "tokens"]
    tokens = [*listed, *(word for word in words if word not in listed)]
    merges = ["h e", "e \n", "\u2581 he", "\n \n", "\u2581 \u2581"]
    types = [*sentencepiece()[T + "token_type"], *[NORMAL] * (len(tokens) - len(listed))]
    metadata = sentencepiece(model="gemma4", tokens=tokens, token_type=types, merges=merges, bos_token_id=1)
    tokenizer, text = read_tokenizer(metadata, "m.gguf"), "he he\n\n\n  hee\u4f60"
    expected = ["<s>", "he", "\u2581he", "\n\n", "\n", "\u2581", "\u2581he", "e", "<0xE4>", "<0xBD>", "<0xA0>"]
    assert tokens_of(tokenizer, text, special=True) == expected
    assert decoded(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_start_and_end_of_text_are_added_as_the_file_says() -> None:
    def ends(metadata: dict[str, Any]) -> list[str]:
        return tokens_of(read_tokenizer(metadata, "m.gguf"), "he", special=True)

    assert ends(byte_level()) == ["he"]
    assert ends(byte_level("llama-bpe")) == ["<s>", "he"]
    assert ends(byte_level("llama-bpe", add_bos_token=False)) == ["he"]
    assert ends(byte_level(add_bos_token=True, add_eos_token=True)) == ["<s>", "he", "</s>"]
    assert ends(sentencepiece()) == ["<s>", "▁", "he"]
    assert ends(sentencepiece(add_bos_token=False, add_space_prefix=False)) == ["he"]


def test_an_ordinary_word_that_a_file_names_is_not_cut_out_of_texts() -> None:
    word = byte_level()[T + "tokens"].index("he")
    tokenizer = read_tokenizer(byte_level(padding_token_id=word, eos_token_id=word), "m.gguf")
    assert (tokenizer.pad_token, tokenizer.eos_token) == (None, None)
    assert decoded(tokenizer, tokenizer("hello")["input_ids"]) == "hello"
    assert word in eos_token_ids(byte_level(eos_token_id=word), "it.gguf")


def test_end_tokens() -> None:
    assert eos_token_ids(byte_level(eos_token_id=1), "it.gguf") == {0, 1}  # </s> is a control token
    assert eos_token_ids(byte_level(eos_token_id=1, eot_token_id=7, eom_token_id=8), "it.gguf") == {0, 1, 7, 8}
    tokens, types = byte_level()[T + "tokens"], byte_level()[T + "token_type"]
    marked = byte_level(tokens=[*tokens, "<|im_end|>", "<|fim_pad|>"], token_type=[*types, CONTROL, CONTROL])
    assert eos_token_ids(marked, "it.gguf") == {0, len(tokens), len(tokens) + 1}
    assert tokens_of(read_tokenizer(marked, "m.gguf"), "he<|im_end|>") == ["he", "<|im_end|>"]
    calls = byte_level(tokens=["</s>", "<s>", "<|end|>", "<|call|>", "<|return|>"], token_type=[CONTROL] * 5)
    assert eos_token_ids(calls, "it.gguf") == {0, 3, 4}  # where calls end an answer, <|end|> ends a part of it


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, UNUSED])
def test_no_text_alone_makes_an_end_or_control_token(kind: int) -> None:
    """To Gemma </s> is HTML, and Qwen's vocabulary has it as a word."""
    tokens, types = byte_level()[T + "tokens"], byte_level()[T + "token_type"]
    texts = ["</s>", "<|im_end|>", "<|fim_pad|>", "<|fim_prefix|>", "<EOT>"]
    tokens, types = [*texts, *tokens[1:], "[PAD3]"], [*[kind] * len(texts), *types[1:], UNUSED]
    eos = len(texts)  # of <s>
    metadata = byte_level(tokens=tokens, token_type=types, eos_token_id=eos, bos_token_id=None)
    assert eos_token_ids(metadata, "it.gguf") == {eos}
    tokenizer = read_tokenizer(metadata, "m.gguf")
    for text in texts:
        ids = tokenizer(f"he{text}12")["input_ids"]
        assert decoded(tokenizer, ids) == f"he{text}12"
        assert (ids == tokenizer.convert_tokens_to_ids(["he", text, "12"])) == (kind == USER_DEFINED)
    named = read_tokenizer(metadata | {T + "eot_token_id": 1}, "m.gguf")  # by the file, whatever its type
    assert tokens_of(named, "he<|im_end|>12") == ["he", "<|im_end|>", "12"]
    assert eos_token_ids(metadata | {T + "eot_token_id": 1}, "it.gguf") == {1, eos}
    untyped = {key: value for key, value in metadata.items() if key != T + "token_type"}
    assert eos_token_ids(untyped, "it.gguf") == {0, 1, 2, 4, eos}
    assert tokens_of(read_tokenizer(untyped, "m.gguf"), "he</s>12") == ["he", "</s>", "12"]


SIZES = {**TINY, "vocab_size": LENGTH, "hidden_size": 32, "intermediate_size": 32}
CONFIGS = {"qwen2": "qwen2", "gemma3": "gemma3_text"}
TEXTS = (
    "he</s>12",
    "<s>he</s><s>",
    "<h1>hello</h1> <tool>12</tool>",
    "he<|endoftext|>12<eos>",
    "</s></s>w</S>",
    "<|im_end|>",
)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_ids_are_those_that_transformers_reads_of_the_same_file(kind: str, tmp_path: Path) -> None:
    if kind == "qwen2":
        tokens, types = byte_level()[T + "tokens"], byte_level()[T + "token_type"]
        more = ["<|endoftext|>", "<|im_end|>"]
        types = [NORMAL, NORMAL, *types[2:-2], CONTROL, CONTROL]
        end = len(tokens) - 2
        keys = byte_level(
            "qwen2", tokens=[*tokens[:-2], *more], token_type=types, eos_token_id=end + 1, bos_token_id=end
        )
        ends = {end, end + 1}
    else:
        tokens, types = sentencepiece()[T + "tokens"], sentencepiece()[T + "token_type"]
        tokens = [
            "<pad>",
            "<eos>",
            "<bos>",
            "<unk>",
            *tokens[3:],
            "<s>",
            "</s>",
            "<end_of_turn>",
            *"<>/|_12345678iufnm",
        ]
        types = [*[CONTROL] * 4, *types[3:], USER_DEFINED, USER_DEFINED, CONTROL, *[NORMAL] * 18]
        scores = [-float(rank) for rank in range(len(tokens))]
        named = {"eos_token_id": 1, "bos_token_id": 2, "unknown_token_id": 3, "padding_token_id": 0}
        keys = sentencepiece(tokens=tokens, token_type=types, scores=scores, add_space_prefix=False, **named)
        ends = {1, tokens.index("<end_of_turn>")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(CONFIGS[kind], **SIZES))
    write_gguf(tmp_path / "it.gguf", model, keys=keys)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="it.gguf")
    ours = read_tokenizer(keys, "it.gguf")
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours(text, add_special_tokens=False)["input_ids"] == ids
        assert decoded(ours, ids) == decoded(theirs, ids)
    assert eos_token_ids(keys, "it.gguf") == ends


def test_a_generation_configuration_beside_the_file_names_end_tokens(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    write_gguf(tmp_path / "it.gguf", model, keys=byte_level())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 100000, -1]}')
    source = find_source(tmp_path / "it.gguf")
    assert source.eos_token_ids(source.plain_config()) == {0, 7}


@pytest.mark.parametrize("index", [LENGTH, 2**32 - 1, -1])
def test_special_ids_that_are_no_tokens_are_left_out(index: int, caplog: pytest.LogCaptureFixture) -> None:
    named = {"eos_token_id": index, "bos_token_id": index, "fim_pre_token_id": index}
    metadata = byte_level(**named, add_bos_token=True)
    tokenizer = read_tokenizer(metadata, "folder/m.gguf")
    assert (tokenizer.eos_token, tokenizer.bos_token) == (None, None)
    assert tokens_of(tokenizer, "he", special=True) == ["he"]
    assert eos_token_ids(metadata, "m.gguf") == {0}
    left = f"folder/m.gguf: tokenizer.ggml.bos_token_id is {index}, which is left out: there are {LENGTH} tokens."
    assert left in caplog.messages


def test_chat_template() -> None:
    tokenizer = read_tokenizer(byte_level() | {"tokenizer.chat_template": TEMPLATE}, "m.gguf")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<s>hello</s>"
    assert read_tokenizer(byte_level(), "m.gguf").chat_template is None


def test_named_templates_and_one_that_is_no_jinja() -> None:
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    template = {"tokenizer.chat_template": TEMPLATE}
    tokenizer = read_tokenizer(byte_level() | template | named, "m.gguf")
    assert tokenizer.chat_template == {"default": TEMPLATE, "tool_use": "{{ tools }}"}
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hello</s>"
    assert tokenizer.apply_chat_template(chat, tools=[{"a": 1}], tokenize=False) == "[{'a': 1}]"
    for broken in ("a\n{% if %}", "{{" + "(" * 9999):
        tokenizer = read_tokenizer(byte_level() | {"tokenizer.chat_template": broken}, "m.gguf")
        assert decoded(tokenizer, encode("hello", tokenizer, "it")) == "hello"
        with pytest.raises(PromptError, match=r"^The chat template of it "):
            encode(chat, tokenizer, "it")


def test_a_template_beside_the_file_replaces_its_own(tmp_path: Path) -> None:
    tokens = [*map(chr, range(97, 120)), "ab"]
    write_gguf(tmp_path / "m.gguf", tiny("llama"), keys={"tokenizer.chat_template": "own"}, tokens=tokens)
    assert find_source(tmp_path / "m.gguf").tokenizer().chat_template == "own"
    (tmp_path / "chat_template.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    assert find_source(tmp_path / "m.gguf").tokenizer().chat_template == "{{ 'é' }}"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja: it is not UTF-8"):
        find_source(tmp_path / "m.gguf").tokenizer()


def merged_by_score(metadata: dict[str, Any], text: str) -> list[str]:
    """Join the neighbours whose joined text is the token of the highest score, the leftmost first, until none can be
    joined."""
    scores = dict(zip(metadata[T + "tokens"], metadata[T + "scores"], strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[joined], i) for i in range(len(parts) - 1) if (joined := parts[i] + parts[i + 1]) in scores]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [token for part in parts for token in ([part] if part in scores else _bytes(part))]


def _bytes(part: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in part.encode()]


def test_sentencepiece_merges_by_score() -> None:
    metadata = sentencepiece()
    tokenizer = read_tokenizer(metadata, "m.gguf")
    generator = random.Random(0)
    for _ in range(300):
        text = "".join(generator.choices([*"abcdehlorw", " ", "hello", " world", "abab", "é", "日"], k=12))
        assert tokens_of(tokenizer, text) == merged_by_score(metadata, text)
        assert decoded(tokenizer, tokenizer(text)["input_ids"]) == text
    assert tokens_of(tokenizer, "he</s>he") == ["▁", "he", "</s>", "▁", "he"]


def test_tokens_that_are_cut_out_of_texts_may_have_the_same_score() -> None:
    """Gemma's vocabulary has many of them that two other tokens would make."""
    metadata = sentencepiece()
    for text in ("held", "hellor"):
        metadata[T + "tokens"].append(text)
        metadata[T + "scores"].append(-1000.0)
        metadata[T + "token_type"].append(USER_DEFINED)
    tokenizer = read_tokenizer(metadata | {T + "add_space_prefix": False}, "m.gguf")
    assert tokens_of(tokenizer, "abheldhellorhello") == ["ab", "held", "hellor", "hello"]


@pytest.mark.parametrize(("name", "behind"), [("Phi-3 Mini", ["▁", "he"]), ("Phi 2", ["▁▁", "he"])])
def test_spaces_behind_special_tokens_of_phi_3(name: str, behind: list[str]) -> None:
    tokenizer = read_tokenizer(sentencepiece() | {"general.name": name}, "m.gguf")
    assert tokens_of(tokenizer, "he</s> he") == ["▁", "he", "</s>", *behind]
    assert tokens_of(tokenizer, "<s> he") == ["<s>", "▁▁", "he"]


def changed(key: str, value: Any) -> dict[str, Any]:
    return byte_level(**{key: value})


WRONG = {
    "no tokens": (changed("tokens", None), "tokenizer.ggml.tokens is missing|tokens is None"),
    "an empty list": (changed("tokens", []), "at least one token"),
    "tokens that are no strings": (changed("tokens", [1, 2]), "must be a list of strings"),
    "no UTF-8": (changed("tokens", ["\udcff"] * 3), "must be a list of strings"),
    "a token twice": (changed("tokens", ["a", "b", "a"]), "tokens 0 and 2 are the same"),
    "types of another length": (changed("token_type", [1]), f"1 entries, but there are {LENGTH}"),
    "an unknown type": (changed("token_type", [9] * LENGTH), "token 0 has type 9"),
    "types that are no numbers": (changed("token_type", "x"), "list of whole numbers"),
    "byte tokens": (changed("token_type", [BYTE] * LENGTH), "token 0 is a byte token"),
    "no merges": (changed("merges", None), "tokenizer.ggml.merges is None"),
    "a merge of one": (changed("merges", ["he"]), "merge 0 does not join"),
    "a merge of strangers": (changed("merges", ["h e", "xyz q"]), "merge 1 does not join"),
    "a merge to a stranger": (changed("merges", ["h q"]), "merge 0 does not join"),
    "an id that is none": (changed("eos_token_id", "x"), "eos_token_id is 'x'"),
    "bos wanted and not named": (byte_level(add_bos_token=True, bos_token_id=None), "bos_token_id is missing"),
    "a flag that is none": (changed("add_bos_token", 7), "add_bos_token is 7"),
    "a template that is no text": (byte_level() | {"tokenizer.chat_template": 5}, "chat_template is 5"),
    "a named template that is no text": (
        byte_level() | {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": 5},
        "chat_template.tool_use is 5",
    ),
    "too few scores": (sentencepiece(scores=[0.0]), "1 entries"),
    "scores that are none": (sentencepiece(scores=[float("nan")] * 284), "must be a list of numbers"),
    "a long piece": (
        sentencepiece(tokens=[*sentencepiece()[T + "tokens"][:-1], "a" * 10_000]),
        "is longer than 512 characters",
    ),
    "equal scores": (sentencepiece(scores=[0.0] * 284), "have the same score"),
    "no byte tokens": (
        sentencepiece(tokens=["<unk>", "<s>"], token_type=[2, 3], scores=[0.0, 0.0]),
        "<0x00> is missing",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_metadata_is_refused(case: str) -> None:
    metadata, reason = WRONG[case]
    with pytest.raises(ModelLoadError, match=reason) as caught:
        read_tokenizer(metadata, "folder/m.gguf")
    text = str(caught.value)
    assert text.startswith("folder/m.gguf: tokenizer.") and text.endswith("Download or convert it anew.")


@pytest.mark.parametrize(("key", "value"), [("model", "bert"), ("pre", "bloom"), ("pre", "default")])
def test_other_kinds_are_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tokenizer.ggml.{key} is '{value}'.*Transformers folder"):
        read_tokenizer(changed(key, value), "m.gguf")
