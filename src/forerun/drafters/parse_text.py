"""Drafters as text: `NAME`, or `NAME:key=value,key=value`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from forerun.config import AUTO, NumDraftTokens
from forerun.errors import DrafterError

K_OPTION = "num_draft_tokens"
"""The option that every drafter has; it is for the engine, not for the drafter."""
Made = TypeVar("Made")


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split a drafter's text into its name and its options as written.

    Raises:
        DrafterError: an option is not key=value, or occurs twice.
    """
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key or key in options:
            raise DrafterError(
                f"drafter is {spec!r}, but after the name come different options, key=value, with commas between them."
            )
        options[key] = value.strip()
    return name, options


def option_types(make: Callable[..., Any]) -> Mapping[str, type]:
    """Return the options that can be written as text: parameters annotated as int, float, bool or str, perhaps with
    None."""
    target = make.__init__ if inspect.isclass(make) else make
    hints = get_type_hints(target)
    types: dict[str, type] = {}
    for name in inspect.signature(make).parameters:
        hint = hints.get(name)
        union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if scalars := [each for each in union if each in (bool, int, float, str)]:
            types[name] = scalars[0]
    return types


def parse_drafter(spec: str, make: Callable[..., Made]) -> tuple[Made, NumDraftTokens | None]:
    """Call `make` with the options that follow a drafter's name, and return the result with K, an option of every
    drafter.

    Raises:
        DrafterError: an option is unknown, or its value is not of its type.
    """
    name, written = split_spec(spec)
    k: NumDraftTokens | None = None
    if (text := written.pop(K_OPTION, None)) is not None:
        if text != AUTO and not text.isdecimal():
            raise DrafterError(
                f"The option {K_OPTION!r} of the drafter {name!r} is {text!r}, but must be a whole number or {AUTO}."
            )
        k = AUTO if text == AUTO else int(text)
    return make(**parse_options(name, make, written)), k


def parse_options(name: str, make: Callable[..., Any], written: Mapping[str, str]) -> dict[str, Any]:
    """Convert the options to the types that `make` takes.

    Raises:
        DrafterError: an option is unknown, or its value is not of its type.
    """
    types = option_types(make)
    options: dict[str, Any] = {}
    for key, text in written.items():
        if key not in types:
            names = ", ".join([*types, K_OPTION])
            raise DrafterError(f"The drafter {name!r} has no option {key!r}. It has: {names}.")
        try:
            options[key] = _parse(text, types[key])
        except ValueError:
            raise DrafterError(
                f"The option {key!r} of the drafter {name!r} is {text!r}, but must be {_WORDS[types[key]]}."
            ) from None
    return options


_WORDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _parse(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return kind(text)
