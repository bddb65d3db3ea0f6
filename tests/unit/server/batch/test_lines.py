"""The lines of a batch: what can be served, what is refused, and by what."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ConfigError
from forerun.server.batch.lines import BatchFile, BatchLine, refusal_line


def line(custom_id: object = "a", body: Any = None, **fields: Any) -> str:
    asked = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body or {"prompt": [1]}}
    return json.dumps(asked | fields)


def read(path: Path, *lines: str, model: str = "it") -> list[BatchLine]:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with BatchFile(path) as file:
        asked = list(file.requests(lambda _: True, model, 4096))
        assert len(asked) == file.num_lines
        return asked


def test_lines_are_numbered_without_the_blank_ones(tmp_path: Path) -> None:
    asked = read(tmp_path / "in", "", line("a"), "  ", line("b"), "")
    assert [(each.index, each.custom_id) for each in asked] == [(0, "a"), (1, "b")]
    assert all(each.request is not None and each.error is None for each in asked)
    (tmp_path / "crlf").write_bytes((line("a") + "\r\n\r\n" + line("b")).encode())
    with BatchFile(tmp_path / "crlf") as file:
        assert [each.custom_id for each in file.requests(lambda index: index == 1, "it", 99)] == ["b"]


@pytest.mark.parametrize(
    ("text", "words", "param"),
    [
        ("{", "not JSON", None),
        ("[]", "must hold an object", None),
        ("\udcff", "not UTF-8", None),
        (line(5), "must be a string", "custom_id"),
        (line(None), "must be a string", "custom_id"),
        (line("\ud800"), "must be a string", "custom_id"),
        (line(method="GET"), "must be one of 'POST'", "method"),
        (line(url="/v1/embeddings"), "must be one of '/v1/chat/completions'", "url"),
        (line(url=None), "must be one of", "url"),
        (line(body=[5]), "not a JSON object", None),
        (line(body={"prompt": [1], "top_p": 7}), "top_p is 7", "top_p"),
        (line(body={"prompt": [1], "stream": True}), "a batch has no streams", "stream"),
        (line(more=1), "fields beside", None),
    ],
)
def test_a_line_that_cannot_be_served(tmp_path: Path, text: str, words: str, param: str | None) -> None:
    (tmp_path / "in").write_bytes(text.encode("utf-8", "surrogateescape") + b"\n" + line("good").encode())
    with BatchFile(tmp_path / "in") as file:
        bad, good = file.requests(lambda _: True, "it", 4096)
    assert good.request is not None
    assert bad.request is None and bad.error is not None and words in str(bad.error) and bad.error.param == param
    made = json.loads(json.dumps(refusal_line(bad, bad.error), ensure_ascii=False).encode())
    assert made["custom_id"] == bad.custom_id and made["error"] is None
    assert made["response"]["status_code"] == 400
    assert made["response"]["body"]["error"]["param"] == param


def test_a_request_for_another_model(tmp_path: Path) -> None:
    named = line("a", {"prompt": [1], "model": "it"})
    assert read(tmp_path / "in", named)[0].error is None
    error = read(tmp_path / "in", named, model="that")[0].error
    assert error is not None and error.status == 404 and error.param == "model"


def test_names_of_models_are_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names in lines, of which one may be any path, or none."""
    exists = Path.exists
    seen = []
    monkeypatch.setattr(Path, "exists", lambda path: seen.append(str(path)) or exists(path))
    names = ["models/it.gguf", "/srv/models/it", "x" * 300, "\0", "/etc/passwd", "../" * 2000, "owner/that"]
    asked = read(tmp_path / "in", *(line(f"{i}", {"prompt": [1], "model": name}) for i, name in enumerate(names)))
    assert [each.error is None for each in asked] == [True, True, *(False for _ in names[2:])]
    assert set(seen).isdisjoint(map(str, map(Path, names)))


def test_a_custom_id_that_stands_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lines 2 and 4 have the same custom_id"):
        read(tmp_path / "in", line("a"), line("b"), "", line("b"))


def test_two_ids_of_one_hash_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.server.batch.lines.digest", lambda *_: "0" * 32)
    assert len(read(tmp_path / "in", line("a"), line("b"), line("c"))) == 3
    with pytest.raises(ConfigError, match="lines 1 and 3"):
        read(tmp_path / "in", line("a"), line("b"), line("a"))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        BatchFile(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no regular file"):
        BatchFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        BatchFile(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="holds no line"):
        read(tmp_path / "in", "", "  ")


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    for name, text in (("one", line("a")), ("same", line("a")), ("other", line("b"))):
        (tmp_path / name).write_text(text)
    one, same, other = (BatchFile(tmp_path / name).digest for name in ("one", "same", "other"))
    assert one == same != other
