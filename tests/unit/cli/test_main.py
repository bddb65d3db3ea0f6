"""The command as a whole."""

from __future__ import annotations

import pytest

from forerun import __version__
from forerun.cli.main import config_first

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


def test_a_misspelt_variable_is_told(invoke: Invoke) -> None:
    environment = {
        "FORERUN_DRAFTERS_JSN": "1",
        "FORERUN_DRAFTERS_WHATEVER_IT_IS": "1",
        "FORERUN_OTHER": "1",
        "OTHER": "1",
    }
    told = invoke("drafters", env=environment).stderr.splitlines()
    no_flag = "belongs to no flag, and has no effect."
    assert told == [
        f"forerun: The environment variable FORERUN_DRAFTERS_JSN {no_flag} Did you mean FORERUN_DRAFTERS_JSON?",
        f"forerun: The environment variable FORERUN_DRAFTERS_WHATEVER_IT_IS {no_flag} The command's --help lists them.",
    ]


@pytest.mark.parametrize(
    ("arguments", "ordered"),
    [
        (["generate", "x", "--config", "f", "--json"], ["--config", "f", "generate", "x", "--json"]),
        (["serve", "--config=f"], ["--config=f", "serve"]),
        (["--config", "f", "chat"], ["--config", "f", "chat"]),
        (["generate", "--", "--config", "f"], ["generate", "--", "--config", "f"]),
        (["generate", "--config"], ["generate", "--config"]),
    ],
)
def test_the_configuration_file_may_be_named_after_the_command(arguments: list[str], ordered: list[str]) -> None:
    assert config_first(arguments) == ordered
