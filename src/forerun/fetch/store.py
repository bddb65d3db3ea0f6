"""Where fetched models lie, and which of them are there.

    models/NAME/FILE.gguf       the model
    models/NAME/LICENSE, ...    what came with it
    models/NAME/fetched.json    the record: size and SHA-256 of each file, written before the folder gets its name

A folder gets its name when all of it is written and verified, so what has a record was whole when it came.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from forerun.config import BUNDLED_TARGET
from forerun.errors import ModelLoadError
from forerun.fetch.catalogue import CATALOGUE, Fetchable
from forerun.files.json_file import Fields
from forerun.home import home

RECORD = "fetched.json"


def names() -> Sequence[str]:
    """The models that can be fetched, the default first."""
    return tuple(CATALOGUE)


def models_folder() -> Path | None:
    """The folder of all fetched models; it need not exist. None for a user without a home."""
    base = home()
    return None if base is None else base / "models"


def folder_of(name: str) -> Path | None:
    """The folder of a model of the catalogue; it need not exist. None for a user without a home."""
    base = models_folder()
    return None if base is None else base / name


def path_of(name: str) -> Path | None:
    """The fetched GGUF file of a model. None: not of the catalogue, not fetched, another version, or cut short.

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
    """What is wrong with a fetched model, all its files read in full; None if nothing is."""
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
    """What commands take without --model: the first model of the catalogue that is fetched, else the bundled one."""
    return next((name for name in CATALOGUE if path_of(name) is not None), BUNDLED_TARGET)
