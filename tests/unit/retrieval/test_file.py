"""Files that are damaged, cut short, foreign or of another version are refused, with the reason."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ConfigError
from forerun.retrieval import Header, Index, build_index, read_header


@pytest.fixture
def path(tmp_path: Path) -> Path:
    build_index(tmp_path / "i", [[1, 2, 3], [4, 5]], 9, tokenizer="some", fingerprint="abc", depth=8)
    return tmp_path / "i"


def rewrite(path: Path, **changes: Any) -> None:
    """Another header before the same data."""
    line, _, data = path.read_bytes().partition(b"\n")
    text = json.dumps({**json.loads(line), **changes}).encode()
    path.write_bytes(text.ljust(len(line)) + b"\n" + data)


def test_the_header(path: Path) -> None:
    header, start = read_header(path)
    assert start == 4096
    assert header == Header(7, 2, 2, 8, 9, "some", "abc", header.checksum)
    assert path.stat().st_size == 4096 + 7 * (2 + 4)
    assert Index(path).nbytes == 7 * 6
    rewrite(path)
    assert Index(path).header == header  # what the tests below change is not refused unchanged


OTHER: dict[str, Any] = {
    "num_tokens": 6,
    "num_documents": 3,
    "token_bytes": 4,
    "depth": 16,
    "vocab_size": 10,
    "tokenizer": "other",
    "fingerprint": "abd",
    "checksum": "0" * 32,
}


@pytest.mark.parametrize("field", [field.name for field in fields(Header)])
@pytest.mark.parametrize("value", ["other", None, [], -1])
def test_every_field_of_the_header_is_guarded(path: Path, field: str, value: Any) -> None:
    rewrite(path, **{field: OTHER[field] if value == "other" else value})
    with pytest.raises(ConfigError, match=r"is damaged: its header.*forerun index build"):
        Index(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "is of version 2, but this forerun reads version 1"),
        ({"header_checksum": "0"}, "its header is not as it was written"),
        ({"more": 1}, "its header is not as it was written"),
        ({"format": "another"}, "is not an index of forerun"),
    ],
)
def test_other_headers(path: Path, changes: dict[str, Any], words: str) -> None:
    rewrite(path, **changes)
    with pytest.raises(ConfigError, match=words):
        Index(path)


@pytest.mark.parametrize("size", [4096, 4096 + 41, 4095, 100])
def test_a_file_that_was_cut_short(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match="is damaged"):
        Index(path)


@pytest.mark.parametrize("at", [4096, 4096 + 13, 4096 + 14, 4096 + 41])
def test_every_byte_of_the_data_is_guarded(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"do not agree with their checksum.*forerun index build"):
        Index(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"\x80\x04pickle", b"PK\x03\x04" * 900])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ConfigError, match="is not an index of forerun"):
        Index(tmp_path / "f")


def test_a_header_that_is_no_json(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"version"', b'"version', 1))
    with pytest.raises(ConfigError, match="its header is not JSON"):
        Index(path)


def test_a_longer_file(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ConfigError, match="added to"):
        Index(path)


def test_no_file(tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            Index(place)


def test_a_refusal_by_the_header_comes_before_the_data_are_read(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def refuse(header: Header) -> None:
        raise ConfigError(f"not {header.tokenizer}")

    with pytest.raises(ConfigError, match="not some"):
        Index(path, refuse)


def test_a_long_name_takes_another_page(tmp_path: Path) -> None:
    build_index(tmp_path / "i", [[1, 2]], 9, tokenizer="é" * 3000)
    header, start = read_header(tmp_path / "i")
    assert (start % 4096, header.tokenizer) == (0, "é" * 3000) and start > 4096
    assert Index(tmp_path / "i").tokens.tolist() == [1, 2, 65_535]
