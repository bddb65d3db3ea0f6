"""Drafters that are not in the table: of installed packages, by entry point, and classes named by their module."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from forerun.errors import DrafterError

GROUP = "forerun.drafters"
"""The group of entry points, NAME = "package.module:Class"."""
_CLASS = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)(?![\w=])")
"""module:Class; in NAME:key=value an equals sign follows."""


def installed_drafters() -> dict[str, str]:
    """Return the entry points of installed packages: name -> module:Class."""
    return {each.name: each.value for each in entry_points(group=GROUP)}


def find_class(spec: str) -> tuple[Any, str] | None:
    """Import the class that a text names, and return it with the text that names it as module.Class; None if it names
    none.

    spec: NAME of an entry point or module:Class, perhaps with :key=value,key=value after it. The module is imported.

    Raises:
        DrafterError: it cannot be imported, or holds no such drafter.
    """
    found = _CLASS.match(spec)
    if found is not None:
        class_path = found.group()
        rest = spec[found.end() :]
    else:
        name, colon, options = spec.partition(":")
        class_path = installed_drafters().get(name, "")
        rest = colon + options
    if not class_path:
        return None
    return _load(class_path), class_path.replace(":", ".") + rest


def named_module(text: str) -> str | None:
    """Return the first module:Class in a drafter's text, also in options of a hybrid or of `staged`, or None."""
    for part in re.finditer(r'(?:^|[+,="])\s*', text):
        found = _CLASS.match(text, part.end())
        if found is not None:
            return found.group()
    return None


def _load(class_path: str) -> Any:
    from forerun.drafters.base import Drafter  # loads torch

    module, _, name = class_path.partition(":")
    try:
        found = getattr(import_module(module), name, None)
    except Exception as error:
        raise DrafterError(
            f"drafter is {class_path!r}, but the module {module} cannot be imported: {type(error).__name__}: {error}. "
            "Install it, or put its folder on PYTHONPATH."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise DrafterError(
            f"drafter is {class_path!r}, but {module} holds no class {name} that derives from forerun.Drafter."
        )
    return found
