"""`forerun complete`: the place in the file, and what the model is given, with one that needs no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.chat.infill import Infill
from forerun.cli import complete

from .conftest import Invoke
from .fakes import WORDS, FakeLLM


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    made = FakeLLM(drafts=True)
    monkeypatch.setattr(complete, "open_llm", lambda *_, **__: made)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "a.py"
    made.write_text("one\n  two\n\nthree\n")
    return made


def test_the_middle_goes_to_stdout_and_the_file_stays(invoke: Invoke, llm: FakeLLM, file: Path) -> None:
    other = file.with_name("b.py")
    other.write_text("x = 1\n")
    result = invoke("complete", str(file), "--at", "2:5", "--extra", str(other), "--max-tokens", "9")
    assert (result.exit_code, result.stdout) == (0, "".join(WORDS))
    ((prompt, params),) = llm.requests
    assert prompt == Infill("one\n  tw", "o\n\nthree\n", [(str(other), "x = 1\n")])
    assert (params.max_tokens, params.temperature) == (9, 0)
    assert file.read_text() == "one\n  two\n\nthree\n"


@pytest.mark.parametrize(
    ("at", "before"),
    [("1:1", ""), ("2:6", "one\n  two"), ("3:1", "one\n  two\n"), ("4:6", "one\n  two\n\nthree"), ("5:1", "*")],
)
def test_every_place_of_a_file_divides_it(file: Path, at: str, before: str) -> None:
    text = file.read_text()
    before = text if before == "*" else before
    assert complete.divided(text, at) == (before, text[len(before) :])


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("6:1", "a line of 1..5"),
        ("2:7", "line 2 has the columns 1..6"),
        ("2:0", "line 2 has the columns 1..6"),
        ("2", "must be LINE:COLUMN"),
        ("-1:2", "must be LINE:COLUMN"),
    ],
)
def test_a_place_that_is_not_there_is_refused(invoke: Invoke, llm: FakeLLM, file: Path, at: str, message: str) -> None:
    result = invoke("complete", str(file), f"--at={at}")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_refused(invoke: Invoke, llm: Any, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "c.py").write_bytes(content)
    result = invoke("complete", str(tmp_path / "c.py"), "--at", "1:1")
    assert result.exit_code == 2
    assert "FILE is" in result.stderr
