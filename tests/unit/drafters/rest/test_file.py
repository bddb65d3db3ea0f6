"""Files that are damaged, cut short, foreign or of another version are refused, with the reason."""

import json
import random
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from forerun.drafters.lookup.rest import index_file as file
from forerun.drafters.lookup.rest.build import append_index, build_index
from forerun.drafters.lookup.rest.index import Index
from forerun.drafters.lookup.rest.index_file import IndexHeader, read_index_header
from forerun.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    build_index(tmp_path / "i", [[1, 2, 3], [4, 5]], 9, tokenizer="some", fingerprint="abc", depth=8)
    return tmp_path / "i"


def rewrite(path: Path, **changes: Any) -> None:
    """Write another header before the same data."""
    line, _, data = path.read_bytes().partition(b"\n")
    text = json.dumps({**json.loads(line), **changes}).encode()
    path.write_bytes(text.ljust(len(line)) + b"\n" + data)


def test_the_header(path: Path) -> None:
    header, start = read_index_header(path)
    assert start == 4096
    assert header == IndexHeader(7, 2, 2, 8, 9, "some", "abc", header.checksum)
    assert path.stat().st_size == 4096 + 7 * (2 + 4)
    assert Index(path).nbytes == 7 * 6
    rewrite(path)
    assert Index(path).header == header  # what the tests below change is not refused unchanged


@pytest.mark.parametrize("vocab_size", [9, 1 << 17])
def test_a_compact_index_holds_the_tokens_alone(tmp_path: Path, vocab_size: int) -> None:
    """Check that it is sorted when it is opened, and stays compact when it is appended to."""
    documents = [[1, 2, 3, 1, 2], [4, 5, 1, 2]]
    stored, compact, grown = (tmp_path / name for name in ("stored", "compact", "grown"))
    build_index(stored, documents, vocab_size)
    build_index(compact, documents, vocab_size, compact=True)
    build_index(grown, documents[:1], vocab_size, compact=True)
    append_index(grown, documents[1:])
    assert grown.read_bytes() == compact.read_bytes()
    one, other = Index(stored), Index(compact)
    assert (one.tokens == other.tokens).all() and (one.suffixes == other.suffixes).all()
    assert one.nbytes == other.nbytes
    assert stored.stat().st_size - compact.stat().st_size == 4 * one.header.num_tokens
    assert (one.header.version, other.header.version) == (1, 2)
    assert one.find([1, 2], 1, 2) == other.find([1, 2], 1, 2)
    compact.write_bytes(compact.read_bytes()[:-1] + b"\0")
    with pytest.raises(ConfigError, match="do not agree with their checksum"):
        Index(compact)


def test_a_compact_index_that_could_not_be_sorted_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sorts by at least 1"):
        build_index(tmp_path / "i", [[1]], 9, depth=0, compact=True)
    assert not (tmp_path / "i").exists()


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


@pytest.mark.parametrize("field", [field.name for field in fields(IndexHeader) if field.name != "compact"])
@pytest.mark.parametrize("value", ["other", None, [], -1])
def test_every_field_of_the_header_is_guarded(path: Path, field: str, value: Any) -> None:
    rewrite(path, **{field: OTHER[field] if value == "other" else value})
    with pytest.raises(ConfigError, match=r"is damaged: its header.*forerun index build"):
        Index(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 3}, "is of version 3, but this forerun reads versions 1 and 2"),
        ({"version": 2}, "its header is not as it was written"),
        ({"header_checksum": "0"}, "its header is not as it was written"),
        ({"more": 1}, "its header is not as it was written"),
        ({"format": "another"}, "is not an index of forerun"),
    ],
)
def test_other_headers(path: Path, changes: dict[str, Any], words: str) -> None:
    rewrite(path, **changes)
    with pytest.raises(ConfigError, match=words):
        Index(path)


def test_a_header_that_is_nested_deeply(path: Path) -> None:
    for depth in (500, 900, 2000):
        line, _, data = path.read_bytes().partition(b"\n")
        nested = line.replace(b'"tokenizer": "some"', b'"tokenizer": ' + b"[" * depth + b"]" * depth)
        path.with_name("n").write_bytes(nested + b"\n" + data)
        with pytest.raises(ConfigError, match=r"is damaged: its header.*forerun index build"):
            Index(path.with_name("n"))


def test_any_damage_is_refused(path: Path) -> None:
    draw, whole = random.Random(3), path.read_bytes()
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 3)):
            content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
        if draw.random() < 0.3:
            del content[draw.randrange(len(content)) :]
        if content == whole:
            continue
        path.write_bytes(content)
        with pytest.raises(ConfigError):
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
    with pytest.raises(ConfigError, match="its header: it is not JSON"):
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

    def refuse(header: IndexHeader) -> None:
        raise ConfigError(f"not {header.tokenizer}")

    with pytest.raises(ConfigError, match="not some"):
        Index(path, refuse)


def test_a_long_name_takes_another_page(tmp_path: Path) -> None:
    build_index(tmp_path / "i", [[1, 2]], 9, tokenizer="é" * 3000)
    header, start = read_index_header(tmp_path / "i")
    assert (start % 4096, header.tokenizer) == (0, "é" * 3000) and start > 4096
    assert Index(tmp_path / "i").tokens.tolist() == [1, 2, 65_535]


IN_USE = """if True:
    import sys
    from pathlib import Path
    from forerun.drafters.lookup.rest import index_file
    from forerun.drafters.lookup.rest.index import Index
    path = Path(sys.argv[1])
    content = path.read_bytes()
    for in_memory, size in ((1 << 26, 0), (0, 0), (0, 4100)):
        path.write_bytes(content)
        index_file.MAX_IN_MEMORY = in_memory
        index = Index(path)
        first = index.find([1, 2], 1, 4)
        assert first is not None
        with path.open("r+b") as other:  # what `cp SHORTER PATH` does
            other.truncate(size)
        print([index.find([1, 2], 1, 4) == first for _ in range(2)])
"""


def test_a_file_that_is_overwritten_while_it_is_in_use_ends_nothing(path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", IN_USE, str(path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["[True, True]", "[False, False]", "[False, False]"]
    assert ended.stderr.count("was changed while it is in use") == 2


def test_a_mapped_index_finds_what_one_in_memory_finds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Index(path)
    monkeypatch.setattr(file, "MAX_IN_MEMORY", 0)
    large = Index(path)
    assert large.find([1, 2], 1, 4) == small.find([1, 2], 1, 4) is not None
    assert large.tokens.tolist() == small.tokens.tolist() and large.suffixes.tolist() == small.suffixes.tolist()
    other = path.with_name("other")
    build_index(other, [[8]], 9)
    other.replace(path)  # the old one is still mapped
    assert large.find([1, 2], 1, 4) == small.find([1, 2], 1, 4)


@pytest.mark.parametrize("in_memory", [0, 1 << 26])
def test_damage_is_found_mapped_or_not(path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    monkeypatch.setattr(file, "MAX_IN_MEMORY", in_memory)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="do not agree with their checksum"):
        Index(path)
