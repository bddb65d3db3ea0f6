"""Tokenizers that would end the process, or raise what is no Exception. The attacks run in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.config import BUNDLED_MODELS
from forerun.errors import ModelLoadError, RequestError
from forerun.models import load_tokenizer
from forerun.models.loading import tokenizer_trial
from forerun.models.loading.gguf.tokenizer import read_tokenizer
from forerun.models.loading.tokenizer_trial_process import oversized_part
from forerun.utils.home import TOKENIZERS_FOLDER
from forerun.utils.library_tokenizer import LibraryTokenizer
from gguf_metadata import byte_level

REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
GARBAGE = {"type": "Precompiled", "precompiled_charsmap": b64encode(b"\xf3\xff\xff\x7f" + b"\x9c" * 900).decode()}
STRIP = {"type": "Strip", "content": " ", "start": 0, "stop": 2**62}
LEFT_OVER = {"type": "Split", "pattern": {"Regex": "(b+)+$"}, "behavior": "Isolated", "invert": False}


def _in_turn(decoder: Any) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": [decoder, STRIP]}


ATTACKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "charsmap": lambda _: {"normalizer": GARBAGE},
    "replaced": lambda _: {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 4}},
    "stripped": lambda whole: {"decoder": _in_turn(whole["decoder"])},
    "split": lambda _: {"pre_tokenizer": {**LEFT_OVER, "pattern": {"Regex": "(a+)+!"}}},
    "parts": lambda _: {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 2000}},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def changed(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    shutil.copytree(BUNDLED_MODELS["bundled"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(whole | change(whole)), encoding="utf-8")
    return folder


def test_memory_is_watched_where_the_kernel_does_not_bound_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and Windows."""
    greedy = tmp_path / "greedy.py"
    greedy.write_text("import time; held = bytearray(b'x') * (200 << 20); time.sleep(600)")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(tokenizer_trial, "_PROCESS", greedy)
    monkeypatch.setattr(tokenizer_trial, "_MEMORY", 100 << 20)
    found = tokenizer_trial._trial(b"{}")
    assert found == "it made the process that tried it take more than the 100 MiB that were allowed"


def test_attacks_end_in_an_error_that_names_the_file(home: Path, tmp_path: Path) -> None:
    folders = {name: changed(tmp_path / name, change) for name, change in ATTACKS.items()}
    code = """
import sys
from forerun.errors import ModelLoadError
from forerun.models import load_tokenizer
for folder in sys.argv[1:]:
    try:
        load_tokenizer(folder)
    except ModelLoadError as error:
        print(error)
"""
    command = [sys.executable, "-c", code, *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(folders), done.stderr
    for folder, line in zip(folders.values(), lines, strict=True):
        assert line.startswith(f"{folder / 'tokenizer.json'}: no tokenizer can be made of it: "), line
    assert not (home / TOKENIZERS_FOLDER).exists()


def test_one_that_passed_is_not_tried_again(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = changed(tmp_path / "model", lambda _: {})
    assert load_tokenizer(folder)("def f(x):")["input_ids"] == load_tokenizer("bundled")("def f(x):")["input_ids"]
    assert len(list((home / TOKENIZERS_FOLDER).iterdir())) == 1
    monkeypatch.setattr(tokenizer_trial, "_trial", lambda _: "it was tried")
    load_tokenizer(folder)
    load_tokenizer("bundled")
    with pytest.raises(ModelLoadError, match="it was tried"):
        load_tokenizer(changed(tmp_path / "other", lambda _: {"normalizer": {"type": "NFC"}}))


def test_a_trial_that_takes_too_long(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_trial, "_SECONDS", 0.001)
    with pytest.raises(ModelLoadError, match=r"it was not ready after 0\.001 seconds"):
        load_tokenizer(changed(tmp_path / "model", lambda _: {}))


def test_a_panic_that_no_trial_meets_is_an_error_without_the_text(home: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(changed(tmp_path / "model", lambda _: {"pre_tokenizer": LEFT_OVER}))
    for call in (tokenizer, tokenizer.encode, tokenizer.tokenize):
        with pytest.raises(RequestError, match=r"The tokenizer of .*model failed") as caught:
            call("b" * 60 + "!")
        assert "bbb" not in str(caught.value)
    assert tokenizer("a banana")["input_ids"]
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert saved["tokenizer_class"] == "TokenizersBackend"


def test_tokenizers_of_gguf_files_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any, **__: Any) -> None:
        raise type("PanicException", (BaseException,), {})("the text")

    monkeypatch.setattr(LibraryTokenizer, "decode", panic)
    with pytest.raises(RequestError, match=r"The tokenizer of m\.gguf failed"):
        read_tokenizer(byte_level(), "m.gguf").decode([0])


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"type": "Replace", "pattern": {"Regex": "x{7}"}, "content": "y" * 1000}, None),
        ([{"type": "Replace", "pattern": {"Regex": "x{7}"}, "content": "y" * 40}] * 2, "characters for one"),
        ({"type": "Prepend", "prepend": "y" * 1001}, "more than 1,000"),
        ({"precompiled_charsmap": b64encode(bytes(4) + b"y" * 1001).decode()}, "1,000 bytes"),
        ({"precompiled_charsmap": b64encode(bytes(4) + b"y\0" * 9000).decode()}, None),
    ],
)
def test_parts_whose_growth_cannot_be_tried_are_bounded(stage: Any, said: str | None) -> None:
    found = oversized_part({"normalizer": stage})
    assert found is None if said is None else said in str(found)
