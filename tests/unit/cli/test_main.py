"""The command as a whole."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from forerun import __version__
from forerun.cli.config_file import config_first
from forerun.cli.main import app
from forerun.errors import ConfigError

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


def test_usage_brackets_an_argument_once(invoke: Invoke) -> None:
    """Typer puts the brackets and dots itself."""
    for command in (
        ["serve"],
        ["info"],
        ["index", "build"],
        ["cache", "clear"],
        ["audit"],
        ["plan"],
        ["tune"],
        ["chat"],
    ):
        usage = next(line for line in invoke(*command, "--help").stdout.splitlines() if "Usage" in line)
        assert "[[" not in usage and "...]" not in usage and "...}" not in usage, usage


def test_an_unknown_command_exits_with_2(invoke: Invoke) -> None:
    assert invoke("no-such-command").exit_code == 2


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("FORERUN_KERNEL", "FORERUN_KERNELS"),
        ("FORERUN_HMOE", "FORERUN_HOME"),
        ("FORERUN_COSTCACHE", "FORERUN_COST_CACHE"),
    ],
)
def test_a_misspelt_variable_is_told(invoke: Invoke, misspelt: str, meant: str) -> None:
    told = invoke("drafters", env={misspelt: "x", meant: "1", "FORERUN_OTHER": "1", "OTHER": "1"}).stderr
    assert told == (
        f"forerun: The environment variable {misspelt} is not read, and has no effect. Did you mean {meant}?\n"
    )


def test_the_keys_of_a_command_are_listed_as_toml(invoke: Invoke) -> None:
    listed = invoke("options", "export", "llama.cpp").stdout
    assert listed.startswith('[export."llama.cpp"]\n# ') and '\n# tensor_type = "F16"\n' in listed
    keys = [line.removeprefix("# ") for line in invoke("options", "serve").stdout.splitlines() if " = " in line]
    assert tomllib.loads("\n".join(key for key in keys if key.startswith(("port", "max_queue")))) == {
        "port": 8000,
        "max_queue": 256,
    }
    assert "Name one of them" in invoke("options", "train").stderr and "no command" in invoke("options", "x").stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [("gen", "generate"), ("generate --drafte", "--drafter"), ("--config f serve --log", "--log-format")],
)
def test_the_shell_completes(words: str, completed: str, invoke: Invoke, tmp_path: Path) -> None:
    line = f"forerun {words}"
    asked = {"_FORERUN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    assert invoke(env=asked, prog_name="forerun").stdout.split() == [completed]
    installed = invoke("--install-completion", "bash", env={"HOME": str(tmp_path)}, prog_name="forerun")
    assert installed.exit_code == 0 and "_FORERUN_COMPLETE=complete_bash" in installed.stdout + "".join(
        file.read_text() for file in tmp_path.rglob("*.sh")
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["drafters", "--version", "--help"])
def test_a_full_disk_is_told(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "forerun", command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (2, "forerun: Nothing more can be written: No space left on device.\n")


@pytest.mark.parametrize(
    ("command", "closed", "code", "told"),
    [
        ("drafters", "1>&-", 2, "forerun: Nothing more can be written: standard output is closed.\n"),
        ("drafters", "0<&- 1>&-", 2, "forerun: Nothing more can be written: standard output is closed.\n"),
        ("drafters", "1>&- 2>&-", 2, ""),
        ("generate --model no-such-model x", "0<&- 2>&-", 2, ""),
        ("--version", "1>&-", 2, "forerun: Nothing more can be written: standard output is closed.\n"),
    ],
)
def test_a_closed_stream_is_no_traceback(command: str, closed: str, code: int, told: str) -> None:
    line = f"{shlex.quote(sys.executable)} -m forerun {command} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", told)


def test_ctrl_c_while_modules_are_imported_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    places = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "forerun"], env={**os.environ, "PYTHONPATH": places}, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


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


@pytest.mark.parametrize(
    "typed",
    [
        *("chat it.gguf", "chat -m it.gguf", "chat -mit.gguf", "chat --model=it.gguf"),
        *("run it.gguf --temp 0", "run --temp 0 -m it.gguf"),
    ],
)
def test_a_model_is_an_argument_or_an_option(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    seen: list[str] = []

    def open_llm(model: str, *_: object, **__: object) -> None:
        seen.append(model)
        raise ConfigError("enough")

    monkeypatch.setattr("forerun.cli.chat.command.open_llm", open_llm)
    assert invoke(*typed.split(), input="x").exit_code == 2 and seen == ["it.gguf"]


def test_each_command_with_a_model_takes_it_both_ways() -> None:
    """-m and --model, and the first argument unless another stands there."""
    named = {
        "batch",
        "complete",
        "generate",
        "info",
        "drafters",
        "answers",
        "eagle",
        "block",
        "medusa",
        "mtp",
        "draft",
        "eval",
    }
    root: Any = typer.main.get_command(app)
    commands = [*root.commands.items()]
    asking = {}
    while commands:
        name, command = commands.pop()
        commands += getattr(command, "commands", {}).items()
        models = [each for each in command.params if "model" in (each.name, each.opts[-1]) or "--model" in each.opts]
        if models:
            asking[name] = models[0]
    takers = {name for name, each in asking.items() if each.param_type_name == "argument"}
    assert takers >= {"chat", "run", "serve", "demo", "try", "tune", "audit", "plan", "forward", "peers", "quantize"}
    assert asking.keys() - takers == named
    assert all("-m" in asking[name].opts for name in named)


@pytest.mark.parametrize("arguments", [("--help",), ("generate", "--help"), ("chat", "--help"), ("models", "--help")])
def test_help_loads_no_editor_and_no_model(arguments: tuple[str, ...]) -> None:
    code = "import sys; from forerun.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
    code += "sys.exit(str({'torch', 'prompt_toolkit', 'platformdirs'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stderr == "set()\n", done.stderr
