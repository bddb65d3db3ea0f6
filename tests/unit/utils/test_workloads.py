"""Workloads: bundled ones, and files of the user."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.utils import workloads


def test_the_bundled_workload_is_there_and_cut_to_size() -> None:
    assert "code" in workloads.bundled_workloads()
    cases = workloads.load_workload("code", 3)
    assert len(cases) == 3
    assert all(case.prompt and case.reference and case.name.endswith(".py") for case in cases)


def test_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "file": "b.py"}\n')
    assert [(case.name, case.prompt) for case in workloads.load_workload(str(path))] == [
        ("mine.jsonl:1", "a"),
        ("b.py", "b"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json\n",
        "[" * 10_000,
        '{"prompt": "a", "temperature": NaN}',
        r'{"prompt": "\ud800"}',
        '{"text": "a"}\n',
        '{"prompt": 3}\n',
        "[1]\n",
        '{"prompt": ""}\n',
        '{"prompt": "a", "turns": ["b"]}\n',
        '{"turns": []}\n',
        '{"turns": ["a", ""]}\n',
        '{"turns": ["a", 3]}\n',
        '{"turns": "a"}\n',
        '{"messages": "a"}\n',
        '{"messages": ["a"]}\n',
        '{"messages": [{"role": "user"}]}\n',
        '{"messages": [{"role": "user", "content": ["a"]}]}\n',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        '{"prompt": "a", "category": 3}\n',
    ],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        workloads.load_workload(str(path))


def test_an_unknown_workload_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="code"):
        workloads.load_workload("no-such-workload")


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (['{"prompt": "a"}', "", "not json"], ":3"),
        (['{"prompt": "a"}', '{"prompt": 3}'], ":2"),
        (['{"prompt": "a", "temperature": -1}'], ":1"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, lines: list[str], place: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=rf"bad\.jsonl{place}: "):
        workloads.load_workload(str(path))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.jsonl"):
        workloads.load_workload(str(path))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "é"})
    cases = [
        workloads.Case("a.py", "é\u2028b", "c"),
        workloads.Case("b.py", "d", "", 1.5),
        workloads.Case("c", messages=chat, category="chat"),
        workloads.Case("d", turns=("one", "two"), category="writing"),
    ]
    workloads.save_workload(cases, tmp_path / "new" / "w.jsonl")
    assert workloads.load_workload(str(tmp_path / "new" / "w.jsonl")) == cases
    assert workloads.temperatures(cases) == [1.5]


def test_chats_and_turns(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = ['{"id": "q1", "category": "chat", "messages": [{"role": "user", "content": "a", "more": 1}]}']
    lines += ['{"turns": ["a", "b"]}', '{"prompt": "c"}']
    path.write_text("\n".join(lines), encoding="utf-8-sig")  # some editors put a byte order mark in front
    chat, turns, text = workloads.load_workload(str(path))
    assert (chat.name, chat.category, chat.opening) == ("q1", "chat", [{"role": "user", "content": "a"}])
    assert (turns.name, turns.turns, turns.opening) == (
        "mine.jsonl:2",
        ("a", "b"),
        [{"role": "user", "content": "a"}],
    )
    assert (text.opening, text.is_chat, chat.is_chat, turns.is_chat) == ("c", False, True, True)


def test_reference_answers_of_turns_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    line = '{"question_id": 101, "category": "reasoning", "turns": ["a", "b"], "reference": ["A", "B"]}'
    path.write_text(line)
    (case,) = workloads.load_workload(str(path))
    assert (case.turns, case.reference) == (("a", "b"), "")
    path.write_text('{"prompt": "a", "reference": ["A"]}')
    with pytest.raises(ConfigError, match="reference is a list"):
        workloads.load_workload(str(path))


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [{"role": "user", "content": "a"}, "confidential"]}',
        '{"messages": [{"role": "user", "content": {"confidential": 1}}]}',
        '{"turns": ["confidential", {"confidential": 1}]}',
        '["confidential"]',
        '{"prompt": ["confidential"]}',
        '"confidential"',
        '{"confidential',
        '{"prompt": "a", "confidential": "\\q"}',
    ],
)
def test_an_error_shows_nothing_of_the_text(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(ConfigError) as raised:
        workloads.load_workload(str(tmp_path / "bad.jsonl"))
    assert "confidential" not in str(raised.value)


def test_files_of_public_benchmarks(tmp_path: Path) -> None:
    """One line of each in its own form; answers for judges are left out."""
    lines = [
        '{"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["x", "y"]}',
        '{"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "    pass", "test": ""}',
        '{"question": "How many?", "answer": "So #### 3"}',
    ]
    with gzip.open(tmp_path / "all.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    bench, code, school = workloads.load_workload(str(tmp_path / "all.jsonl.gz"))
    assert (bench.name, bench.turns, bench.category, bench.reference) == ("question 81", ("a", "b"), "writing", "")
    assert (code.name, code.prompt, code.reference) == ("HumanEval/0", "def f():", "    pass")
    assert (school.turns, school.reference, school.is_chat) == (("How many?",), "", True)
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"bad\.jsonl\.gz cannot be read"):
        workloads.load_workload(str(tmp_path / "bad.jsonl.gz"))
