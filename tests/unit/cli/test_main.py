"""The command as a whole."""

from __future__ import annotations

import pytest

from forerun import __version__

from .conftest import Invoke


def test_version(invoke: Invoke) -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"forerun {__version__}\n")


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["demo"], ["bench"], ["bench", "forward"], ["bench", "generate"]]
)
def test_help_works_everywhere(invoke: Invoke, command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_help_names_the_environment_variables(invoke: Invoke) -> None:
    assert "FORERUN_BENCH_GENERATE_NUM_DRAFT_TOKENS" in invoke("bench", "generate", "--help").stdout


def test_an_unknown_command_exits_with_2(invoke: Invoke) -> None:
    assert invoke("no-such-command").exit_code == 2
