"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from config_keys import keys_in_file
from forerun.cli.main import app

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Invoke:
    """Run the command as a shell would, wide enough that help is not cut; what has no flag is put into a file."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, **settings: Any) -> Result:
        file = tmp_path_factory.mktemp("keys") / "keys.toml"
        return CliRunner().invoke(app, keys_in_file(arguments, file), **settings)

    return run
