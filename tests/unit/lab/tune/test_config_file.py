"""forerun.toml as it is written, and as the commands read it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from forerun.config import NO_DRAFTER
from forerun.errors import ConfigError
from forerun.lab.tune.arms import PLAIN, TuningArm
from forerun.lab.tune.config_file import check_config_path, write_config


def write(path: Path, arm: TuningArm, chat: bool = True, **settings: object) -> None:
    write_config(path, "owner/model", arm, settings, chat=chat, notes=["it is\nfaster", "forerun tune"])


def test_every_command_that_answers_has_a_table(tmp_path: Path) -> None:
    path = tmp_path / "forerun.toml"
    write(path, TuningArm('hybrid:sources=suffix+"x"', 6), dtype="float32", adapter=None)
    tables = tomllib.loads(path.read_text())
    keys = {"model": "owner/model", "drafter": 'hybrid:sources=suffix+"x"', "num_draft_tokens": 6, "dtype": "float32"}
    assert tables == dict.fromkeys(("generate", "chat", "serve"), keys)
    assert path.read_text().splitlines()[1] == "# it is faster"


def test_an_automatic_k_is_not_written_and_plain_decoding_is(tmp_path: Path) -> None:
    path = tmp_path / "forerun.toml"
    write(path, TuningArm("suffix"), chat=False)
    tables = tomllib.loads(path.read_text())
    assert list(tables) == ["generate", "serve"] and "num_draft_tokens" not in tables["generate"]
    write(path, PLAIN)
    assert tomllib.loads(path.read_text())["serve"] == {"model": "owner/model", "drafter": NO_DRAFTER}


def test_a_file_never_names_code_to_run(tmp_path: Path) -> None:
    path = tmp_path / "forerun.toml"
    write(path, TuningArm("their.module:Drafter"))
    assert "drafter" not in tomllib.loads(path.read_text())["generate"]
    assert "# The drafter is given on the command line" in path.read_text()


def test_only_its_own_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "forerun.toml"
    check_config_path(path)
    write(path, TuningArm("suffix"))
    check_config_path(path)
    path.write_text("[generate]\nmodel = 'mine'\n")
    with pytest.raises(ConfigError, match="was not written by forerun tune"):
        check_config_path(path)
    with pytest.raises(ConfigError, match="does not exist"):
        check_config_path(tmp_path / "no" / "forerun.toml")
