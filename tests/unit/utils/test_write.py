"""Files are written whole or not at all, locks exclude, and nothing is overwritten without being asked."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import filelock  # noqa: F401  it asks for the system when it is imported
import pytest

from forerun.errors import ConfigError
from forerun.utils.files import atomic_file, digest, file_digest, locked, refuse_to_overwrite, write_bytes, write_json


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.bin"
    write_bytes(path, b"one", b"two", error=ConfigError)
    with path.open("rb") as former:
        write_bytes(path, b"three", error=ConfigError)
        assert former.read() == b"onetwo"
    assert path.read_bytes() == b"three" and list(path.parent.iterdir()) == [path]


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a", b"", error=ConfigError)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), KeyError("x")]
)
def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"former")
    expected = ConfigError if isinstance(failure, OSError) else type(failure)

    def write_half() -> None:
        with atomic_file(path, ConfigError) as file:
            file.write(b"half")
            raise failure

    with pytest.raises(expected) as raised:
        write_half()
    assert path.read_bytes() == b"former" and list(tmp_path.iterdir()) == [path]
    if isinstance(failure, OSError):
        assert str(raised.value).startswith(f"{path} cannot be written: No space left on device. ")


def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_bytes(tmp_path / "file" / "a", b"", error=ConfigError)


def test_json_is_written_so_that_it_can_be_read(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"ö": [1, None]}, error=ConfigError)
    assert json.loads((tmp_path / "a").read_text(encoding="utf-8")) == {"ö": [1, None]}
    with pytest.raises(ValueError):
        write_json(tmp_path / "a", float("nan"), error=ConfigError)
    assert json.loads((tmp_path / "a").read_text(encoding="utf-8")) == {"ö": [1, None]}


def test_digests_of_a_file_and_of_its_bytes_agree(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"x" * 100_000, error=ConfigError)
    with (tmp_path / "a").open("rb") as file:
        assert file_digest(file) == digest(b"x" * 50_000, b"x" * 50_000)
    assert len(digest()) == 32


SYSTEMS = pytest.mark.parametrize("system", [sys.platform, "win32"])
"""With filelock for Windows, which leaves its files on others."""


@SYSTEMS
def test_who_does_not_wait_for_a_lock_is_refused(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with locked(tmp_path / "a", ConfigError, wait=False):
        with pytest.raises(ConfigError, match=r"a is in use by another process\. Later\."):
            locked(tmp_path / "a", ConfigError, wait=False, remedy="Later.").__enter__()
        with locked(tmp_path / "b", ConfigError, wait=False):
            pass
    with locked(tmp_path / "a", ConfigError, wait=False):
        pass
    assert system == "win32" or not list(tmp_path.iterdir())


@SYSTEMS
def test_a_lock_is_waited_for_so_long(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    held = locked(tmp_path / "a", ConfigError, wait=False)
    held.__enter__()
    with pytest.raises(ConfigError, match="in use by another process"):
        locked(tmp_path / "a", ConfigError, wait=0.05).__enter__()
    timer = threading.Timer(0.1, held.__exit__, (None, None, None))
    timer.start()
    with locked(tmp_path / "a", ConfigError, wait=30.0):
        assert list(tmp_path.iterdir())
    timer.join(30)
    assert system == "win32" or not list(tmp_path.iterdir())


@SYSTEMS
def test_a_lock_parts_threads(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    count = 0

    def add() -> None:
        nonlocal count
        for _ in range(50):
            with locked(tmp_path / "a", ConfigError, wait=True):
                seen = count
                threading.Event().wait(0)
                count = seen + 1

    threads = [threading.Thread(target=add, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert count == 200 and (system == "win32" or not list(tmp_path.iterdir()))


@SYSTEMS
def test_a_lock_ends_with_its_process(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    code = """if True:
        import os, sys
        from pathlib import Path
        import filelock  # noqa: F401  it asks for the system when it is imported
        from forerun.utils.files import locked
        sys.platform = sys.argv[2]
        held = locked(Path(sys.argv[1]), ValueError, wait=False)
        held.__enter__()
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", code, tmp_path / "a", system], check=True, timeout=60)
    assert list(tmp_path.iterdir())
    with locked(tmp_path / "a", ConfigError, wait=False):
        pass


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("full", "full/a", "link"):
        with pytest.raises(ConfigError, match=r"exists\. Give another name, or --force to replace it\."):
            refuse_to_overwrite(tmp_path / name, ConfigError)
    for name in ("empty", "none"):
        refuse_to_overwrite(tmp_path / name, ConfigError)
