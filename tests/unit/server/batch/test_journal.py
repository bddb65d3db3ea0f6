"""The journal: wherever a kill cuts it, what is whole stays, and nothing else is taken for an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ConfigError
from forerun.server.batch.files import BatchJournal

RUN = {"requests": "1234", "model": "it", "seed": None}


def answer(index: int, status: int = 200) -> dict[str, Any]:
    return {"custom_id": f"é{index}\n", "response": {"status_code": status, "body": {"text": "a" * index}}}


def written(path: Path, *indices: int, num_lines: int = 3) -> bytes:
    with BatchJournal(path, RUN, num_lines) as journal:
        for index in indices:
            journal.add(index, answer(index))
    return path.read_bytes()


def test_answers_come_in_the_order_of_their_requests(tmp_path: Path) -> None:
    with BatchJournal(tmp_path / "journal", RUN, 3) as journal:
        for index in (2, 0, 1):
            assert not journal.has(index)
            journal.add(index, answer(index, 200 if index else 400))
        assert journal.num_done == 3 and journal.num_errors == 1
        journal.write_out(tmp_path / "out")
        journal.remove()
    lines = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [answer(0, 400), answer(1), answer(2)]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_cut_anywhere_loses_what_was_cut_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = written(path, 1, 0)
    head, first, _ = whole.splitlines(keepends=True)
    borders = [len(head), len(head) + len(first), len(whole)]
    for length in {*range(0, len(whole), 17), *(border - less for border in borders for less in (0, 1))}:
        path.write_bytes(whole[:length])
        with BatchJournal(path, RUN, 3) as journal:
            kept = (length >= len(head) + len(first)) + (length >= len(whole))
            assert journal.num_done == kept and journal.has(1) == bool(kept)
            for index in range(3):
                if not journal.has(index):
                    journal.add(index, answer(index))
            journal.write_out(tmp_path / "out")
        assert [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()] == [*map(answer, range(3))]


def test_a_damaged_line_ends_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = written(path, 0, 1, 2)
    head, first, second, third = whole.splitlines(keepends=True)
    path.write_bytes(head + first + second.replace(b'"a"', b'"b"') + third)
    with BatchJournal(path, RUN, 3) as journal:
        assert [journal.has(index) for index in range(3)] == [True, False, False]
    assert path.read_bytes() == head + first


def test_another_run_s_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = written(path, 0)
    for other in ({**RUN, "model": "that"}, {**RUN, "seed": 3}, {**RUN, "new": 1}, {"requests": "1234"}):
        with pytest.raises(ConfigError, match=r"of a run that differs: .* was .* and is"):
            BatchJournal(path, other, 3)
    path.write_text("a novel\n")
    with pytest.raises(ConfigError, match="is no journal"):
        BatchJournal(path, RUN, 3)
    assert path.read_text() == "a novel\n"
    path.write_bytes(whole)
    BatchJournal(path, RUN, 3).close()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with BatchJournal(tmp_path / "journal", RUN, 3) as journal:

        class Full:
            def seek(self, *_: int) -> int:
                raise OSError(28, "No space left on device")

            def close(self) -> None:
                pass

        file = journal._file
        monkeypatch.setattr(journal, "_file", Full())
        with pytest.raises(ConfigError, match=r"No space left on device\. .* goes on"):
            journal.add(0, answer(0))
        assert not journal.has(0)
        file.close()
