"""Texts from files, folders and JSON lines; the tokens of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.drafters.lookup.rest.build import tokenise
from forerun.errors import ConfigError
from forerun.utils.text_files import TextDocument, find_files, read_documents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {
        "b.py": b"b = 1\r\n",
        "a.txt": "ä".encode(),
        "sub/c.md": b"c",
        "sub/latin.py": b"# \xe4",
        "sub/empty.py": b"",
        "sub/data.bin": b"\x00",
        ".git/hidden.py": b"hidden",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def read(path: Path, named: bool = True, field: str = "text") -> list[TextDocument]:
    return list(read_documents(path, named, field, []))


def test_a_folder(folder: Path) -> None:
    found = find_files([folder])
    names = ["a.txt", "b.py", "sub/c.md", "sub/empty.py", "sub/latin.py"]
    assert found == [(folder / name, False) for name in names]
    skipped: list[Path] = []
    documents = [document for path, named in found for document in read_documents(path, named, "text", skipped)]
    assert [document.text for document in documents] == ["ä", "b = 1\n", "c"]
    assert documents[2].name == str(folder / "sub/c.md")
    assert skipped == [folder / "sub/latin.py"]


def test_patterns_and_named_files(folder: Path) -> None:
    assert find_files([folder / "sub"], ["*.bin", "c.*"]) == [
        (folder / "sub/c.md", False),
        (folder / "sub/data.bin", False),
    ]
    named = folder / "sub/data.bin"
    assert find_files([named, folder], ["*.bin"]) == [(named, True)]  # taken once


def test_sources_that_hold_nothing(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no-such does not exist"):
        find_files([folder / "no-such"])
    with pytest.raises(ConfigError, match=r"no file in .* is called \*\.zig"):
        find_files([folder], ["*.zig"])
    with pytest.raises(ConfigError, match="no sources"):
        find_files([])


def test_a_named_file_must_be_text(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"latin.py is not UTF-8 text \(byte 2 is 0xe4\)"):
        read(folder / "sub/latin.py")


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"text": "one\nmore", "prompt": "p"}, {"text": "", "prompt": "q"}, {"text": "u\u2028v", "prompt": "r"}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    assert read(path) == [TextDocument(f"{path}:1", "one\nmore"), TextDocument(f"{path}:5", "u\u2028v")]
    assert [document.text for document in read(path, field="prompt")] == ["p", "q", "r"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"prompt": "a", "n": 1}',
            "has no text in the field 'text'. Texts there: prompt. Choose one by the key field",
        ),
        ('{"text": 3}', "There is no text in it"),
        ("[1]", "There is no text in it"),
        ("{", "line 1: it is not JSON"),
        ("[" * 10_000, "line 1: it is nested too deeply"),
    ],
)
def test_json_lines_without_text(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "t.jsonl")


class Letters:
    """One token per character."""

    def __call__(self, texts: list[str], add_special_tokens: bool, verbose: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_tokens_up_to_a_limit() -> None:
    documents = [TextDocument(str(i), "ab") for i in range(150)]
    assert len(list(tokenise(documents, Letters()))) == 150
    assert list(tokenise([], Letters())) == []
