"""Tokenizers and chat templates in the layouts of publishers: SentencePiece and tekken files alone, named templates."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.utils

from families import make_family
from forerun.engine.chat_template import encode
from forerun.errors import ModelLoadError, PromptError, UnsupportedModelError
from forerun.models import load_model, load_tokenizer
from forerun.models.loading.folder import ModelFolder
from forerun.models.loading.folder_source import FolderSource
from small_tokenizers import TURN, byte_level

WORDS = ("he", "hel", "hell", "hello", "\u2581hello", "wo", "wor", "worl", "world", "\u2581world", *"\u2581helowrd")
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
FOR_TOOLS = "tool_use {{ tools[0].function.name }} " + TEMPLATE


def _field(number: int, value: bytes | int) -> bytes:
    """One field of a protocol buffer: bytes with their length, or a number."""
    key = number << 3 | (2 if isinstance(value, bytes) else 0)
    return _varint(key) + (_varint(len(value)) + value if isinstance(value, bytes) else _varint(value))


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


def sentence_piece(path: Path) -> None:
    """Write a SentencePiece model of the kind BPE with byte fallback, as Llama 2 and Mistral 7B have one."""
    pieces = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3), *((f"<0x{byte:02X}>", 0, 6) for byte in range(256))]
    pieces += [(word, -rank, 1) for rank, word in enumerate(WORDS)]
    written = (
        _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, k) for text, score, k in pieces
    )
    trainer, normalizer = _field(3, 2) + _field(35, 1), _field(1, b"identity") + _field(3, 1)
    path.write_bytes(b"".join(_field(1, piece) for piece in written) + _field(2, trainer) + _field(3, normalizer))


def tekken(path: Path) -> None:
    """Write a vocabulary in Mistral's format: every byte and a few words, after the control tokens."""
    words = [*(bytes([byte]) for byte in range(256)), b"he", b"ll", b"hell", b"hello", b" w", b"or", b"ld", b" world"]
    vocab = [{"rank": rank, "token_bytes": b64encode(word).decode()} for rank, word in enumerate(words)]
    special = [{"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]"))]
    numbers = {"default_vocab_size": len(words) + 6, "default_num_special_tokens": 6}
    config = {"pattern": r" ?\p{L}+|\s+|.", "version": "v11", **numbers}
    path.write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": 300}))
    return tmp_path


def _settings(folder: Path, **settings: Any) -> None:
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | settings))


@pytest.mark.parametrize("package", ["sentencepiece", "protobuf"])
def test_the_package_that_a_sentence_piece_model_needs_is_named(
    package: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence_piece(folder / "tokenizer.model")
    for each in ("sentencepiece", "protobuf"):
        monkeypatch.setattr(transformers.utils, f"is_{each}_available", lambda each=each: each != package)
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.model: .* and {package} cannot.*'forerun\[sentencepiece\]'"):
        load_tokenizer(folder)


def test_a_sentence_piece_model_alone(folder: Path) -> None:
    pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    sentence_piece(folder / "tokenizer.model")
    _settings(folder, tokenizer_class="LlamaTokenizer", eos_token="</s>")
    tokenizer = load_tokenizer(folder)
    ids = tokenizer("hello world")["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(ids), tokenizer.decode(ids)] == [["▁hello", "▁world"], "hello world"]


def test_a_tekken_file_alone(folder: Path) -> None:
    tekken(folder / "tekken.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer("hello world")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "hello", "Ġworld"]
    assert (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("[INST]")) == (2, 3)
    assert tokenizer.decode(encode([{"role": "user", "content": "hello"}], tokenizer, "m")) == "[hello]"


def test_a_damaged_tekken_file(folder: Path) -> None:
    tekken(folder / "tekken.json")
    whole = json.loads((folder / "tekken.json").read_text())
    for damaged in ({**whole, "vocab": [{"rank": 0}]}, {"config": {}}, []):
        (folder / "tekken.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelLoadError, match="no tokenizer could be read"):
            load_tokenizer(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_mistrals_own_layout_is_explained(missing: str, tmp_path: Path) -> None:
    folder = make_family("llama", tmp_path)
    (folder / missing).unlink()
    (folder / ("params.json" if missing == "config.json" else "consolidated.safetensors")).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"Mistral's own layout .*download"):
        load_model(folder)


def _in_the_configuration(folder: Path) -> None:
    named = [{"name": "default", "template": f"default {TEMPLATE}"}, {"name": "tool_use", "template": FOR_TOOLS}]
    _settings(folder, chat_template=named)


def _in_a_folder(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text(f"default {TEMPLATE}")
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(FOR_TOOLS)


@pytest.mark.parametrize("write", [_in_the_configuration, _in_a_folder])
def test_of_named_templates_the_one_for_tools_is_found(write: Callable[[Path], None], folder: Path) -> None:
    byte_level().save_pretrained(folder)
    write(folder)
    tokenizer, chat = load_tokenizer(folder), [{"role": "user", "content": "hello"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    written = [tokenizer.decode(encode(chat, tokenizer, "m", {"tools": tools})) for tools in (None, [tool])]
    assert written == ["default [hello]", "tool_use f [hello]"]
    tokenizer.chat_template.pop("default")
    with pytest.raises(PromptError, match="m has chat templates named tool_use, and none named default"):
        encode(chat, tokenizer, "m")


@pytest.mark.parametrize("written_by", [4, 5], ids=["Transformers 4", "Transformers 5"])
def test_an_end_token_that_the_tokenizer_alone_names(written_by: int, folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    end = {"content": TURN, "special": True}
    _settings(folder, eos_token=TURN)
    if written_by == 4:
        (folder / "tokenizer.json").unlink()
        _settings(folder, eos_token=end, added_tokens_decoder={"7": {"content": "<s>"}, "273": end})
    source = FolderSource(ModelFolder("m", folder))
    assert source.eos_token_ids(source.config()) == {5, tokenizer.convert_tokens_to_ids(TURN)}


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": 3},
        {"eos_token": TURN, "added_tokens_decoder": {"x": TURN, "9" * 5000: {"content": TURN}}},
        {"eos_token": {"content": "<none>"}},
    ],
)
def test_an_end_token_that_is_none(settings: dict[str, Any], folder: Path) -> None:
    byte_level().save_pretrained(folder)
    _settings(folder, **settings)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    source = FolderSource(ModelFolder("m", folder))
    assert source.eos_token_ids(source.config()) == {5}
