"""The file of a head's tensors, whatever its kind: opened, but not read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from forerun.drafters.models.heads.config import TensorSpec
from forerun.errors import ModelLoadError
from forerun.utils.foreign_errors import REMEDY

WEIGHTS = "model.safetensors"
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
"""Of the authors of Medusa."""
_OF_TRAINING = re.compile(r"^verifier_(norm|lm_head)\.weight$|\.rotary_emb\.inv_freq$")
"""Tensors that drafting has no use for: the target's, for the loss, and what a configuration gives."""


class Slice(TensorSpec, Protocol):
    """A tensor that is not read yet, in the form of safetensors."""

    def __getitem__(self, index: Any) -> Tensor: ...


def open_head_slices(folder: Path) -> dict[str, Slice]:
    """Open the tensors of a public head by name, without reading them. Raises ModelLoadError if there are none but
    pickles."""
    from safetensors import safe_open

    found = next((file for file in (folder / WEIGHTS, folder / MEDUSA_WEIGHTS) if file.is_file()), None)
    if found is None:
        raise _no_weights(folder)
    opened: Any = safe_open(found, framework="pt")
    names = opened.keys()
    return {name: opened.get_slice(name) for name in names if not _OF_TRAINING.search(name)}


def _no_weights(folder: Path) -> ModelLoadError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickles:
        return ModelLoadError(
            f"{folder}: the head's weights are pickled ({pickles[0]}), and a pickle can run code when it is loaded. "
            f"Write its tensors as {WEIGHTS}: forerun export head {folder / pickles[0]} OUT."
        )
    files = sorted(path.name for path in folder.glob("*.safetensors*"))
    has = f" (there is {files[0]})" if files else ""
    return ModelLoadError(f"{folder}: a head lies in one file {WEIGHTS}, which is not there{has}. {REMEDY}")
