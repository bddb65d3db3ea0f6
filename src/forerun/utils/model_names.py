"""What requests may call a model: nothing shows the path of a folder or file."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def short_name(model: str) -> str:
    """Return the name of a model's file or folder, without the ending of a GGUF file."""
    return re.split(r"[/:\\]", model.rstrip("/\\"))[-1].removesuffix(".gguf") or model


def served_name(model: str) -> str:
    """Return what a model is called where the user does not say: the short name of a folder or file, or the id on the
    Hub."""
    with suppress(OSError, ValueError):  # it is no path: too long, or with a null character
        if Path(model).exists():
            return short_name(str(Path(model).resolve()))
    return model


def names_of(name: str, model: str) -> frozenset[str]:
    """Return what requests may call a model.

    Args:
        name: that it has in answers.
        model: as the user gave it.
    """
    return frozenset({name, model, served_name(model), short_name(model), Path(model).name} - {""})
