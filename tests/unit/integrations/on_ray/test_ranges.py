"""Ranges of bytes of a file of requests, and its lines that are no requests."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.server.batch.files import ranges_of, requests_in
from forerun.server.batch.lines import BatchFile, broken_path, write_broken

MODEL, LENGTH = "it", 1000


def line(name: str) -> bytes:
    body = {"prompt": "a\u2028b\x85" + name, "max_tokens": 1}
    asked = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(asked, ensure_ascii=False).encode()


@pytest.mark.parametrize("num_workers", [1, 2, 7])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n \n"])
def test_all_lines_are_read_once(tmp_path: Path, num_workers: int, end: bytes) -> None:
    path = tmp_path / "in.jsonl"
    lines = [line(f"é{number}") if number % 5 else b" " * (number % 10) + b"\r" for number in range(1, 90)]
    lines[40] = b'{"custom_id": "broken'
    path.write_bytes(b"\n".join(lines) + end)
    with BatchFile(path) as requests:
        parts = [*ranges_of(requests, num_workers)]
        whole = [*requests.requests(lambda index: index != 3, MODEL, LENGTH)]
        assert requests.num_broken == 1
    assert len(parts) >= num_workers and sum(part.count for part in parts) == requests.num_lines
    assert parts[0].start == 0 and all(a.end == b.start for a, b in pairwise(parts))
    read = [asked for part in parts for asked in requests_in(path, part, lambda index: index != 3, MODEL, LENGTH)]
    assert [(asked.index, asked.custom_id) for asked in read] == [(asked.index, asked.custom_id) for asked in whole]
    assert [asked.request for asked in read] == [asked.request for asked in whole]
    assert [str(asked.error) for asked in read] == [str(asked.error) for asked in whole]


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(line(str(number)) for number in range(10)))
    with BatchFile(path) as requests:
        part = next(ranges_of(requests, 1))
    path.write_bytes(path.read_bytes().replace(b"a", b"b"))
    with pytest.raises(ConfigError, match="holds other requests"):
        next(requests_in(path, part, lambda _: True, MODEL, LENGTH))
    path.unlink()
    with pytest.raises(ConfigError, match="on every machine"):
        next(requests_in(path, part, lambda _: True, MODEL, LENGTH))


def test_broken_lines_are_written_aside_as_they_are(tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    broken = [b'{"custom_id": "cut', b"\xff\xfe", b'{"custom_id": 3}', b"[]"]
    path.write_bytes(b"\n".join([line("1"), *broken, line("2")]))
    with BatchFile(path) as requests:
        assert (requests.num_lines, requests.num_broken) == (6, 4)
        assert write_broken(requests, out) == broken_path(out)
    assert broken_path(out).read_bytes() == b"\n".join(broken) + b"\n"
    path.write_bytes(line("1"))
    with BatchFile(path) as requests:
        assert write_broken(requests, out) is None
    assert not broken_path(out).exists()
