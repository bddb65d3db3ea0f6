"""A journal on disk: bounded, gone on with, read whatever a crash has left; never in the server's way."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

import traffic_world
from forerun.errors import ConfigError
from forerun.lab.bench.journal import is_journal, read_journal
from forerun.server import traffic_records as recorder
from forerun.server.traffic_records import MOST_CATEGORIES, OTHER, Recorder, check_journal_path

ANSWERS = traffic_world.ANSWERS


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = traffic_world.written(tmp_path / "j")
    traffic = read_journal(path)
    assert traffic.answers == ANSWERS and traffic.begun == traffic_world.begun()
    assert is_journal(path) and not traffic.num_damaged


def test_a_restart_goes_on_and_other_settings_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for model in ("other", "bundled", "bundled"):
        traffic_world.written(path, ANSWERS[:12], model)
    traffic = read_journal(path)
    assert len(traffic.answers) == 24 and traffic.num_other == 12


def test_a_line_cut_short_by_a_crash_costs_itself_alone(tmp_path: Path) -> None:
    path = traffic_world.written(tmp_path / "j", ANSWERS[:1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match="no complete answers"):
        read_journal(path)
    traffic_world.written(path, ANSWERS[1:4])
    traffic = read_journal(path)
    assert traffic.answers == ANSWERS[1:4] and traffic.num_damaged == 1
    path.write_bytes(whole.replace(b'"tokens":', b'"tokens":-', 1) + b'{"\xff":1}\n' + whole)
    assert read_journal(path).num_damaged == 2


def test_the_bound_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "INTERVAL", 0.001)
    path, bound = tmp_path / "j", 20_000
    made = Recorder(path, bound, traffic_world.begun())
    most = 0
    for number in range(300):
        made.answer(replace(ANSWERS[0], prompt=number))
        if number % 7 == 0:
            made._write()
            most = max(most, sum(each.stat().st_size for each in tmp_path.iterdir()))
    made.close()
    assert bound / 3 < most <= bound and (tmp_path / "j.1").exists()
    answers = read_journal(path).answers
    assert answers[-1].prompt == 299 and answers[0].prompt > 0, "both parts are read"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"# notes\n", "not JSON"),
        (b'{"format": "else"}\n', "no journal"),
        (b'{"format": "forerun.journal", "version": 3}\n', "version 3.*Update forerun"),
        (b'{"format": "forerun.journal", "version": 1}\n', "version 1.*Begin a new one"),
        (b'{"format": "forerun.journal", "version": 2, "model": 3}\n', "model is 3"),
    ],
)
def test_another_file_is_neither_read_nor_written_into(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    for use in (read_journal, check_journal_path, lambda path: Recorder(path, 1 << 20, traffic_world.begun())):
        with pytest.raises(ConfigError, match=reason):
            use(path)
    assert path.read_bytes() == content


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        check_journal_path(tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        check_journal_path(tmp_path / "no" / "j")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_journal(tmp_path / "j")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="empty"):
        read_journal(tmp_path / "empty")
    first = Recorder(tmp_path / "j", 1 << 20, traffic_world.begun())
    with pytest.raises(ConfigError, match="its own --journal"):
        Recorder(tmp_path / "j", 1 << 20, traffic_world.begun())
    first.close()
    Recorder(tmp_path / "j", 1 << 20, traffic_world.begun()).close()


def test_a_full_disk_ends_the_journal_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def tell(self) -> int:
            return 0

        def write(self, _: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:  # a buffered file tries again
            self.write(b"")

    made = Recorder(tmp_path / "j", 1 << 20, traffic_world.begun())
    made._file.close()
    made._file = Full()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            made.answer(ANSWERS[0])
            made._write()
    assert made.failed and sum("journal failed" in str(each.msg) for each in caplog.records) == 1
    made.close()
    Recorder(tmp_path / "j", 1 << 20, traffic_world.begun()).close()  # nobody holds it any more


def test_a_slow_disk_and_many_categories_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "MOST_PENDING", 100)
    made = Recorder(tmp_path / "j", 1 << 20, traffic_world.begun())
    for number in range(120):
        made.answer(replace(ANSWERS[0], category=f"c{number}"))
    assert made.lost == 20
    with caplog.at_level(logging.WARNING):
        made.close()
    assert "'answers left out': 20" in caplog.text
    found = {each.category for each in read_journal(tmp_path / "j").answers}
    assert len(found) == MOST_CATEGORIES + 1 and OTHER in found
