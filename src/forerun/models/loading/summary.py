"""What a list of models says of one: its size, format and family, by as little as need be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.errors import ModelLoadError
from forerun.models.loading.folder import ModelFolder, is_gguf, part_paths
from forerun.models.loading.gguf.file import first_keys

_KEYS = ("general.architecture", "general.file_type")


def summary(path: Path) -> dict[str, Any]:
    """Return bytes, format (such as "Q4_K_M" or "bfloat16") and family of a GGUF file or folder; None what it does not
    say.

    Raises:
        ModelLoadError: it is not there, or is no model.
    """
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
    return {"bytes": size, "format": known.get(file_type), "family": architecture}


def _of_folder(path: Path) -> dict[str, Any]:
    fields = ModelFolder(str(path), path).config()
    method = (fields.fields("quantization_config", None) or fields).string("quant_method", None)
    return {
        "bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "format": method or fields.string("dtype", None) or fields.string("torch_dtype", None),
        "family": fields.string("model_type", None),
    }
