"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from forerun.cli.main import app

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command as a shell would, wide enough that help is not cut."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, **settings: Any) -> Result:
        return CliRunner().invoke(app, arguments, **settings)

    return run
