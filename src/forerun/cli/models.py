"""`forerun models`: the models that lie on this machine, by the names that commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.output import print_json, size_text
from forerun.config import BUNDLED_MODELS
from forerun.errors import ForerunError, ModelLoadError
from forerun.utils import fetch as store
from forerun.utils.stores import StoredModel, stored_models

_KEYS = ("general.architecture", "general.file_type")
"""Of a GGUF file."""
_COLUMNS = ("name", "size", "format", "family", "drafter", "place")


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of GGUF files to look into, too.", metavar="FOLDER")
    ] = None,
    json: options.Json = False,
) -> None:
    """List the models on this machine: fetched ones, those of the folders in FORERUN_MODELS, of Ollama, LM Studio,
    llama.cpp and the Hub's cache. Every command takes these names.

    The first time, looking for what drafts for a model takes seconds.
    """
    found = [*_own(), *stored_models(folders or [])]
    names = {str(each.path): each.name for each in found}
    rows = [_facts(each, names) for each in found] if json else []
    if json:
        print_json(rows)
        return
    longest = max(len(each.name) for each in found)  # drafters are mostly such names, too
    widths = (longest, 8, 8, 10, longest)
    typer.echo(_line(_COLUMNS, widths))
    for each in found:  # a line as soon as it is known
        facts = _facts(each, names)
        size = "–" if facts["bytes"] is None else size_text(facts["bytes"])
        columns = (facts["name"], size, *(facts[key] or "–" for key in ("format", "family", "drafter")), facts["place"])
        typer.echo(_line(columns, widths))
        if facts["fault"]:
            typer.echo(f"    {facts['fault']}", err=True)


def _line(columns: tuple[str, ...], widths: tuple[int, ...]) -> str:
    return "  ".join([*(f"{text:<{width}}" for text, width in zip(columns, widths, strict=False)), columns[-1]])


def _own() -> list[StoredModel]:
    """Return the bundled and the fetched models."""
    fetched = [(name, path) for name in store.fetchable_names() if (path := store.path_of(name)) is not None]
    bundled = [(name, path) for name, path in BUNDLED_MODELS.items() if path.exists()]
    return [StoredModel(name, path, "forerun") for name, path in (*bundled, *fetched)]


def _facts(model: StoredModel, names: dict[str, str]) -> dict[str, Any]:
    """Return what is listed of a model. names: of models by their paths, for drafters that are such."""
    from forerun.drafters.belonging import belonging

    facts: dict[str, Any] = {"name": model.name, "path": str(model.path), "place": model.place}
    facts |= dict.fromkeys(("bytes", "format", "family", "drafter", "fault"))
    try:
        facts |= model_summary(model.path)
        here = belonging(model.path if model.name not in BUNDLED_MODELS else model.name)
        facts["drafter"] = names.get(here[0].text, here[0].text) if here else None
    except ForerunError as error:
        facts["fault"] = str(error)
    return facts


def model_summary(path: Path) -> dict[str, Any]:
    """Return bytes, format (such as "Q4_K_M" or "bfloat16") and family of a GGUF file or folder; None what it does not
    say.

    Raises:
        ModelLoadError: it is not there, or is no model.
    """
    from forerun.models.loading.folder import is_gguf, part_paths
    from forerun.models.loading.gguf.file import first_keys

    if path.is_dir():
        return _of_folder(path)
    if not path.exists():
        raise ModelLoadError(f"{path} is not there. Fetch the model anew.")
    if not is_gguf(path):
        raise ModelLoadError(f"{path} is no GGUF file. Download it anew.")
    from gguf.constants import LlamaFileType

    architecture, file_type = map(first_keys(path, _KEYS).get, _KEYS)
    known = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    size = sum(part.stat().st_size for part in part_paths(path) if part.exists())
    form = known.get(file_type) if isinstance(file_type, int) else None
    return {"bytes": size, "format": form, "family": architecture}


def _of_folder(path: Path) -> dict[str, Any]:
    from forerun.models.loading.folder import ModelFolder

    fields = ModelFolder(str(path), path).config()
    method = (fields.fields("quantization_config", None) or fields).string("quant_method", None)
    return {
        "bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "format": method or fields.string("dtype", None) or fields.string("torch_dtype", None),
        "family": fields.string("model_type", None),
    }
