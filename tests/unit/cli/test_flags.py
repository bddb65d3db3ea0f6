"""Flags made from the fields they set, and those that are keys of a file alone."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from forerun.cli import main
from forerun.cli.flags import Flags, given, with_flags
from forerun.config import SamplingParams
from forerun.utils.fields import described, option

from .conftest import Invoke


@dataclass(frozen=True)
class Words:
    """What the command below is told."""

    count: int = option(3, "How many.", low=1)
    share: float | None = option(None, "How much.", low=0, high=1, default_text="all")
    loud: bool = option(False, "Whether to shout.")
    words: Sequence[str] = option((), "Which.", flags=("--word", "-w"), metavar="WORD")
    numbers: Sequence[int] = option((), "Their numbers.")
    path: Path | None = option(None, "Where.")
    hidden: int = option(1, "Nothing for a command line.")


@dataclass(frozen=True)
class Others:
    """Shares a flag with Words."""

    count: int = option(3, "How many.", low=1)
    seed: int = option(0, "Seed.")


@pytest.fixture
def run() -> Any:
    """A command of these options; what it was told, and what was set by hand, as JSON."""
    app = typer.Typer()

    @app.command()
    @with_flags
    def speak(
        *,
        ctx: typer.Context,
        name: str,
        words: Annotated[Words, Flags(leave_out=("hidden",), panel="Words")],
        others: Annotated[Others, Flags("count", base=Others(seed=5), other_seed="seed")],
    ) -> None:
        """Say them."""
        told = {**vars(words), "path": str(words.path), "name": name, "others": vars(others)}
        print(json.dumps({**told, "given": given(ctx, "count", "share", "word")}))

    def invoke(*arguments: str, **settings: Any) -> Result:
        return CliRunner().invoke(app, arguments, **settings)

    return invoke


def told(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_without_flags_the_defaults_hold(run: Any) -> None:
    assert told(run("x")) == {
        "count": 3, "share": None, "loud": False, "words": [], "numbers": [], "path": "None", "hidden": 1,
        "name": "x", "others": {"count": 3, "seed": 5}, "given": [],
    }  # fmt: skip


def test_every_flag_sets_its_field_and_a_shared_one_sets_both(run: Any) -> None:
    flags = "x --count 4 --share 0.5 --loud --word a -w b --numbers 7 --numbers 8 --path p --other-seed 9"
    assert told(run(*flags.split())) == {
        "count": 4, "share": 0.5, "loud": True, "words": ["a", "b"], "numbers": [7, 8], "path": "p", "hidden": 1,
        "name": "x", "others": {"count": 4, "seed": 9}, "given": ["--count", "--share", "--word"],
    }  # fmt: skip


def test_help_shows_help_range_and_default(run: Any) -> None:
    text = run("--help", env={"COLUMNS": "200"}).stdout
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("│ *    --") or "--" in line[:6]}
    assert "How many. (1 or more)" in lines["--count"] and "[default: 3]" in lines["--count"]
    assert "(0..1)" in lines["--share"] and "(all)" in lines["--share"]
    assert "WORD" in lines["--word"] and "Repeatable" in lines["--word"]
    assert "--hidden" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--count", "0"], "'0' is not a whole number of 1 or more."),
        (["--count", "many"], "'many' is not a whole number of 1 or more."),
        (["--share", "1.5"], "'1.5' is not a number in 0..1."),
        (["--share", "nan"], "'nan' is not a number in 0..1."),
        (["--numbers", "x"], "'x' is not a whole number."),
    ],
)
def test_a_wrong_value_is_blamed_on_its_flag(run: Any, flags: list[str], message: str) -> None:
    result = run("x", *flags, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr and flags[0] in result.stderr


def test_one_flag_cannot_have_two_defaults() -> None:
    def command(
        *, words: Annotated[Words, Flags("count")], others: Annotated[Others, Flags("count", base=Others(count=4))]
    ) -> None: ...

    with pytest.raises(AssertionError, match="others has another default for count"):
        with_flags(command)


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    below = getattr(group, "commands", None)
    if below is None:
        return [(path, group)]
    return [found for name, command in below.items() for found in commands(command, (*path, name))]


def test_every_parameter_is_named_as_its_flag() -> None:
    """So keys of configuration files follow one rule."""
    seen = 0
    for path, command in commands(typer.main.get_command(main.app)):
        for parameter in command.params:
            flags = [flag for flag in parameter.opts if flag.startswith("--")]
            name = flags[0].removeprefix("--").replace("-", "_") if flags else parameter.name
            if keyword.iskeyword(str(name)):
                name = {"for": "for_model", "continue": "continue_"}[str(name)]
            assert parameter.name == name, (path, flags)
            seen += len(flags)
    assert seen > 100


def test_what_stands_for_values_is_written_in_one_style() -> None:
    """A word in capitals, perhaps with what it may be repeated, joined or replaced by."""
    for path, command in commands(typer.main.get_command(main.app)):
        for parameter in command.params:
            if parameter.opts[0].startswith("-") and not getattr(parameter, "is_flag", False):
                metavar = parameter.metavar or ""
                style = r"[A-Z]+(,\.\.\.|=[A-Z]+|\|(@?[A-Z]+|auto))?"
                assert re.fullmatch(style, metavar), (path, parameter.opts, metavar)


def test_every_sampling_option_has_a_flag_or_a_key_but_four(invoke: Invoke) -> None:
    text = invoke("options", "generate").stdout
    for name, field in described(SamplingParams).items():
        flag = field.option.flags[0] if field.option.flags else f"--{name.replace('_', '-')}"
        key = flag.removeprefix("--").replace("-", "_")
        assert (f"# {key} = " in text) == (name not in ("prompt_logprobs", "tenant", "priority", "grammar")), name
