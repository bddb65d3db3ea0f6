"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from config_keys import keys_in_file
from forerun.cli.main import app

Invoke = Callable[..., Result]


@pytest.fixture(scope="package", autouse=True)
def commands_made_once() -> Iterator[None]:
    """Make the commands of an app once: two thirds of the time of these tests went to making them for each call."""
    made = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made)
        yield


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Invoke:
    """Run the command as a shell would, wide enough that help is not cut; what has no flag is put into a file."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, **settings: Any) -> Result:
        file = tmp_path_factory.mktemp("keys") / "keys.toml"
        return CliRunner().invoke(app, keys_in_file(arguments, file), **settings)

    return run
