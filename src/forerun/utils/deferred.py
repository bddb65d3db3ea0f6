"""Imports that wait until a name is used: what a model or a command does not need is not loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


class DeferredModule:
    """A module that is imported when one of its names is used.

    It stands for an import at the top of a file, beside the same import under TYPE_CHECKING, which type checkers and
    the test of layers read.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies or inspects objects asks for; nobody needs the module for that
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


HANDED_IN: dict[str, Any] = {}
"""What a package uses of one that lies above it, by that one's name: the facade, which lies above all, puts it here."""


def exporting(package: str, home_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names are imported when they are used (PEP 562).

    home_of: name -> the module that defines it.
    """

    def attribute(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    return attribute
