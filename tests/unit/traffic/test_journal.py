"""A journal on disk: bounded, gone on with, read whatever a crash has left; never in the server's way."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import traffic_world
from forerun.errors import ConfigError
from forerun.traffic import recorder
from forerun.traffic.reader import read_journal
from forerun.traffic.recorder import Recorder, check_place
from forerun.traffic.records import MOST_CATEGORIES, OTHER, Steps, class_of_prompt, class_of_rows

WORLD = traffic_world.made(12)


def step(**values: Any) -> Steps:
    return Steps(1, 2, 0, 1, 2, 0, 1, 2, 10, 0.001, 0.01, 0.001, 0.013, 0.013**2, **values)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = traffic_world.written(tmp_path / "j", WORLD)
    traffic = read_journal(path)
    assert [each.category for each in traffic.answers] == [each.category for each in WORLD.answers]
    first, kept = WORLD.answers[0], traffic.answers[0]
    assert kept == replace(
        first, at=kept.at, first=kept.first, seconds=kept.seconds, reached=kept.reached, accepted_at=kept.accepted_at
    )
    assert kept.seconds == pytest.approx(first.seconds, abs=1e-5) and list(kept.reached) == list(first.reached)
    assert traffic.runs[0].busy == pytest.approx(sum(each.total for each in WORLD.steps), abs=1e-3)
    assert traffic.begun.machine["cpu"] == "Some Processor" and not traffic.num_damaged


def test_a_restart_goes_on_and_other_settings_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for model in ("other", "bundled", "bundled"):
        traffic_world.written(path, WORLD, model=model)
    traffic = read_journal(path)
    assert len(traffic.runs) == 2 and len(traffic.answers) == 24 and traffic.num_other == 12


def test_a_line_cut_short_by_a_crash_costs_itself_alone(tmp_path: Path) -> None:
    path = traffic_world.written(tmp_path / "j", WORLD)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # the steps
    with pytest.raises(ConfigError, match="no complete answers"):
        read_journal(path)
    traffic_world.written(path, WORLD)
    traffic = read_journal(path)
    assert len(traffic.runs) == 1 and traffic.num_damaged == 1
    path.write_bytes(whole.replace(b'"tokens":', b'"tokens":-', 1).replace(b'"steps":', b'"\xff":', 1) + whole)
    assert read_journal(path).num_damaged == 2


def test_the_bound_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "INTERVAL", 0.001)
    path, bound = tmp_path / "j", 20_000
    made = Recorder(path, bound)
    made.begin(traffic_world.begun())
    most = 0
    for number in range(300):
        made.answer(replace(WORLD.answers[0], at=float(number)))
        made.steps(step())
        if number % 7 == 0:
            made._write(last=True)
            most = max(most, sum(each.stat().st_size for each in tmp_path.iterdir()))
    made.close()
    assert bound / 3 < most <= bound and (tmp_path / "j.1").exists()
    traffic = read_journal(path)
    assert len(traffic.runs) == 1, "both parts are of one run"
    assert traffic.answers[-1].at == 299 and traffic.answers[0].at > 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"# notes\n", "not JSON"),
        (b'{"format": "else"}\n', "no journal"),
        (b'{"format": "forerun.journal", "version": 2}\n', "version 2.*Update forerun"),
        (b'{"format": "forerun.journal", "version": 1, "run": 3}\n', "run is 3"),
    ],
)
def test_another_file_is_neither_read_nor_written_into(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    for use in (read_journal, check_place, lambda path: Recorder(path, 1 << 20)):
        with pytest.raises(ConfigError, match=reason):
            use(path)
    assert path.read_bytes() == content


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        check_place(tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        check_place(tmp_path / "no" / "j")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_journal(tmp_path / "j")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="empty"):
        read_journal(tmp_path / "empty")
    first = Recorder(tmp_path / "j", 1 << 20)
    with pytest.raises(ConfigError, match="its own --journal"):
        Recorder(tmp_path / "j", 1 << 20)
    first.close()
    Recorder(tmp_path / "j", 1 << 20).close()


def test_a_full_disk_ends_the_journal_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def tell(self) -> int:
            return 0

        def write(self, _: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:  # a buffered file tries again
            self.write(b"")

    made = Recorder(tmp_path / "j", 1 << 20)
    made.begin(traffic_world.begun())
    made._file.close()
    made._file = Full()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            made.answer(WORLD.answers[0])
            made._write()
    assert made.failed and sum("journal failed" in str(each.msg) for each in caplog.records) == 1
    made.close()
    Recorder(tmp_path / "j", 1 << 20).close()  # nobody holds it any more


def test_a_slow_disk_and_many_categories_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "MOST_PENDING", 100)
    made = Recorder(tmp_path / "j", 1 << 20)
    for number in range(120):
        made.answer(replace(WORLD.answers[0], category=f"c{number}"))
    assert made.lost == 20
    made.steps(step())
    made.begin(traffic_world.begun())
    with caplog.at_level(logging.WARNING):
        made.close()
    assert "'answers left out': 20" in caplog.text
    found = {each.category for each in read_journal(tmp_path / "j").answers}
    assert len(found) == MOST_CATEGORIES + 1 and OTHER in found


def test_classes_of_steps() -> None:
    assert [class_of_rows(count) for count in (0, 1, 16, 17, 31, 33, 40)] == [0, 1, 16, 16, 30, 32, 40]
    assert [class_of_prompt(count) for count in (0, 1, 3, 64, 100)] == [0, 1, 2, 64, 64]
    assert class_of_rows(1000) == 960
