"""Safe writing of files: whole files or none, checksums, locks, no silent overwriting."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import platform
import secrets
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, Self, TypeVar

from forerun.config import COST_CACHE_VARIABLE, environment_choice
from forerun.errors import ConfigError
from forerun.utils.deferred import DeferredModule
from forerun.utils.home import home
from forerun.utils.json_file import ErrorType, Fields
from forerun.utils.signals import cleaned_up

if TYPE_CHECKING:
    import fcntl

    import filelock
else:  # which Windows does not have, and what is for it alone
    fcntl = DeferredModule("fcntl")
    filelock = DeferredModule("filelock")

REMEDY = "Give another place, or make room and permission there."
_DIGEST_BYTES = 16
_LOCK_INTERVAL = 0.005
"""Seconds between two tries to get a lock."""
_SEAL = b"\nforerun-blake2b "
_SEAL_BYTES = len(_SEAL) + 2 * _DIGEST_BYTES


class Closing(ABC):
    """What is closed at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Hashing:
    """A file to write that hashes its content."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.state = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def write(self, part: Any) -> int:
        self.state.update(part)
        return self._file.write(part)

    def flush(self) -> None:
        self._file.flush()


@contextmanager
def atomic_file(
    path: Path, error: ErrorType, *, remedy: str = REMEDY, mode: int | None = None, synced: bool = True
) -> Iterator[BinaryIO]:
    """Open a file to write that replaces `path` when the block ends, and vanishes if it raises.

    Whoever has the former file open or mapped keeps it. The folder is made if it is missing.

    mode: of the file, before anything is in it; None: as the process makes files.
    synced: wait for the disk, so that a power cut tears no file.

    Raises:
        error: the file cannot be written, a full disk included.
    """
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with cleaned_up():
            try:
                with temporary.open("xb") as file:
                    if mode is not None:
                        temporary.chmod(mode)
                    yield file
                    if synced:
                        file.flush()
                        os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        if synced:
            _sync_folder(path.parent)
    except OSError as failure:
        raise error(f"{path} cannot be written: {failure.strerror or failure}. {remedy}") from failure


def write_bytes(path: Path, *parts: Any, error: ErrorType, mode: int | None = None) -> None:
    """Write bytes or buffers, one after another, as `atomic_file` does."""
    with atomic_file(path, error, mode=mode) as file:
        file.writelines(parts)


def write_json(path: Path, value: object, *, error: ErrorType, indent: int | None = 2, mode: int | None = None) -> None:
    """Write a value as JSON, as `atomic_file` does."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode(), error=error, mode=mode)


def digest(*parts: Any) -> str:
    """Return the BLAKE2b hash of the bytes, 16 bytes in hexadecimal."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def file_digest(file: FileIO | BufferedReader) -> str:
    """Return the `digest` of what an open file holds from its current position. Raises OSError."""
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()


@contextmanager
def sealed_file(path: Path, error: ErrorType, *, synced: bool = True) -> Iterator[_Hashing]:
    """Open a file to write like `atomic_file`, and append the checksum of its content, for `check_seal`."""
    with atomic_file(path, error, synced=synced) as file:
        content = _Hashing(file)
        yield content
        file.write(_SEAL + content.state.hexdigest().encode())


def check_seal(path: Path, error: ErrorType, remedy: str) -> None:
    """Compare a file that `sealed_file` wrote with its checksum.

    Raises:
        error: it cannot be read, or is not as it was written.
    """
    try:
        with path.open("rb") as file:
            state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            left = os.fstat(file.fileno()).st_size - _SEAL_BYTES
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                state.update(part)
                left -= len(part)
            seal = file.read()
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror or failure}. {remedy}") from None
    if seal != _SEAL + state.hexdigest().encode():
        raise error(f"{path} is damaged: it is not as it was written, or was cut short. {remedy}")


def is_sealed(content: bytes | bytearray) -> bool:
    """Return whether all that was read of a file is as `sealed_file` wrote it."""
    end = max(0, len(content) - _SEAL_BYTES)
    return content[end:] == _SEAL + digest(memoryview(content)[:end]).encode()


@contextmanager
def new_files(folder: Path, error: ErrorType) -> Iterator[Path]:
    """Make a temporary folder whose files move into `folder`, one by one, when the block ends, and vanish if it raises.

    Raises:
        error: they cannot be written, a full disk included.
    """
    # inside a folder that is there: it may be a mount point, or the one place that may be written
    temporary = _temporary(folder / "new" if folder.is_dir() else folder)
    try:
        with cleaned_up():
            try:
                temporary.mkdir(parents=True)
                yield temporary
                folder.mkdir(parents=True, exist_ok=True)
                for path in sorted(temporary.iterdir()):
                    path.replace(folder / path.name)
                _sync_folder(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as failure:
        raise error(f"{folder} cannot be written: {failure.strerror or failure}. {REMEDY}") from failure


@contextmanager
def whole_folder(folder: Path, error: ErrorType) -> Iterator[Path]:
    """Make a temporary folder that replaces `folder` when the block ends, and vanishes if it raises.

    What a killed process leaves of it is in `leftovers`.

    Raises:
        error: it cannot be written, a full disk included.
    """
    temporary = _temporary(folder)
    former = _temporary(folder)
    try:
        with cleaned_up():
            try:
                temporary.mkdir(parents=True)
                yield temporary
                try:
                    if os.path.lexists(folder):
                        folder.replace(former)
                    temporary.replace(folder)
                except BaseException:
                    if os.path.lexists(former) and not os.path.lexists(folder):
                        former.replace(folder)
                    raise
                _sync_folder(folder.parent)
            finally:
                remove(temporary)
                remove(former)
    except OSError as failure:
        raise error(f"{folder} cannot be written: {failure.strerror or failure}. {REMEDY}") from failure


def leftovers(path: Path) -> list[Path]:
    """Return the temporary files of writing this file or folder, left by killed processes or in use by running ones."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.*.tmp"))


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all in it, as far as possible; nothing there is nothing to do."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def locked(
    path: Path, error: ErrorType, *, wait: bool | float, remedy: str = "Wait until it is done."
) -> Iterator[None]:
    """Hold the lock of a file or folder, which no other process or thread gets meanwhile.

    The lock is the system's, on a file .NAME.lock beside `path`: it ends with the process that holds it.

    Args:
        wait: wait for whoever holds it, at most so many seconds (True: for ever; False: not at all), then raise.

    Raises:
        error: somebody else still holds it, or the lock's file cannot be made.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        release = _lock(lock, wait)
    except BlockingIOError:
        raise error(f"{path} is in use by another process. {remedy}") from None
    except OSError as failure:
        raise error(f"{path} cannot be locked: {failure.strerror} ({lock}). {REMEDY}") from None
    try:
        yield
    finally:
        release()


def refuse_to_overwrite(
    path: Path, error: ErrorType, remedy: str = "Give another name, or --force to replace it."
) -> None:
    """Raise `error` where `path` is a file, or a folder that is not empty."""
    if any(path.iterdir()) if path.is_dir() else os.path.lexists(path):
        raise error(f"{path} exists. {remedy}")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _lock_on_windows(lock: Path, wait: bool | float) -> Callable[[], None]:
    """As `_lock`. There, filelock removes its files."""
    held = filelock.FileLock(lock, thread_local=False)
    try:
        held.acquire(timeout=-1 if wait is True else float(wait), poll_interval=_LOCK_INTERVAL)
    except filelock.Timeout:
        raise BlockingIOError from None
    return held.release


def _lock(lock: Path, wait: bool | float) -> Callable[[], None]:
    """Open and lock the lock file, and return what releases it. Raises OSError, BlockingIOError if another process
    holds it for `wait`.

    Not by filelock, which leaves its files in the user's folders: the one who removes such a file here is noticed.
    """
    if sys.platform == "win32":
        return _lock_on_windows(lock, wait)
    end = time.monotonic() + (0 if isinstance(wait, bool) else wait)  # the system's locks have no time limit
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait is True else fcntl.LOCK_NB))
            if _same(file, lock):
                return partial(_unlock, file, lock)
        except BaseException as error:
            os.close(file)
            if not isinstance(error, BlockingIOError) or time.monotonic() >= end:
                raise
            time.sleep(_LOCK_INTERVAL)
            continue
        os.close(file)  # whoever had it has removed it: it locks nothing any more


def _unlock(file: int, lock: Path) -> None:
    lock.unlink(missing_ok=True)
    os.close(file)


def _same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Make the new name last beyond a power cut, where folders can be synced."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


T = TypeVar("T")
NUM_ENTRIES = 64
"""Entries kept in a file; the one written longest ago is dropped first."""
_LOCK_WAIT = 5.0
"""Seconds to wait for other processes that write the file, after which an entry is not saved this time."""
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a damaged entry may raise."""

_log = logging.getLogger(__name__)
_warned: set[Path] = set()


class EntryFile(Generic[T]):
    """The file is a convenience: where it cannot be read or written, there are no entries. When it is next written, a
    damaged file gets `.damaged` appended to its name, and a damaged entry is left out, with one warning.

    Args:
        stem, version: of its name: other versions of forerun have files of their own.
        contents: what it holds, as the warning names it.
        restored: makes an entry of its JSON value, or raises one of the errors that damage causes.
        state: makes the JSON value of an entry.
    """

    def __init__(
        self, stem: str, version: int, contents: str, restored: Callable[[Any], T], state: Callable[[T], object]
    ) -> None:
        self._name = f"{stem}-{version}.json"
        self._version = version
        self._contents = contents
        self._restored = restored
        self._state = state

    def path(self) -> Path | None:
        """Return the file in forerun's folder. None without one, or where FORERUN_COST_CACHE is 0.

        Raises:
            ConfigError: it is neither 0 nor 1.
        """
        if environment_choice(COST_CACHE_VARIABLE, ("0", "1")) == "0":
            return None
        base = home()
        return None if base is None else base / self._name

    def read(self, *, sets_aside: bool = False) -> dict[str, T]:
        """Read key -> every sound entry, the oldest first; empty if there is no sound file.

        Args:
            sets_aside: rename a damaged file, which wants the lock.

        Raises:
            ConfigError: as `path`.
        """
        file = self.path()
        if file is None or not os.path.lexists(file):
            return {}
        try:
            content = Fields.read(file, ConfigError)
            content.integer("version", low=self._version, high=self._version)
            states = content.fields("entries").values
        except ConfigError:
            damaged = file.with_name(f"{file.name}.damaged")
            self._warn(file, f"It is kept as {damaged}.")
            if sets_aside:
                with suppress(OSError):
                    file.replace(damaged)
            return {}
        entries = {}
        for key, state in states.items():
            try:
                entries[key] = self._restored(state)
            except _DAMAGE:
                self._warn(file, "Its damaged entries are left out.")
        return entries

    def put(self, key: str, entry: T) -> None:
        """Write an entry beside what others have written.

        Raises:
            ConfigError: as `path`.
        """
        file = self.path()
        if file is None:
            return
        # ValueError: a number that is not finite
        with suppress(ConfigError, ValueError), locked(file, ConfigError, wait=_LOCK_WAIT):
            entries = self.read(sets_aside=True)
            entries.pop(key, None)
            entries[key] = entry
            kept = {each: self._state(found) for each, found in list(entries.items())[-NUM_ENTRIES:]}
            write_json(file, {"version": self._version, "entries": kept}, error=ConfigError, indent=None)

    def _warn(self, file: Path, consequence: str) -> None:
        """Log a warning, once for a file and process."""
        if file not in _warned:
            _warned.add(file)
            _log.warning("The file of %s %s is damaged. %s They are made again.", self._contents, file, consequence)


def key_here(setting: tuple[str, ...]) -> str:
    """Return the key of a setting on this machine."""
    machine = (platform.node(), platform.machine(), str(os.cpu_count()))
    return hashlib.sha256("\n".join((*setting, *machine)).encode()).hexdigest()[:32]
