"""Drafters as text: `NAME`, or `NAME:key=value,key=value`.

A value, or a source of a hybrid, that holds commas or plus signs stands in double quotes, as a field of a CSV file
(RFC 4180): a double quote in it is doubled. Nothing else is escaped, so that paths of Windows are what they are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from forerun.config import AUTO, NumDraftTokens
from forerun.errors import ConfigError, DrafterError
from forerun.utils.json_file import Fields

K_OPTION = "num_draft_tokens"
"""The option that every drafter has; it is for the engine, not for the drafter."""
Made = TypeVar("Made")
_NGRAM = "prompt-lookup"
_METHODS = {
    "ngram": _NGRAM,
    "suffix": "suffix",
    "draft_model": "draft-model",
    "eagle": "eagle",
    "eagle3": "eagle",
    "medusa": "medusa",
    "mtp": "mtp",
}
"""vLLM's names of methods -> drafters."""
_CHANGE_NOTHING = {
    "draft_tensor_parallel_size": 1,
    "enforce_eager": False,
    "disable_padded_drafter_batch": False,
    "rejection_sample_method": "standard",
}
"""Keys of vLLM's that are taken with these values, since forerun does so anyway."""
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')
_PARTING = frozenset(',+;"')
"""Characters of a text that is quoted within another: they part drafters, their options and their sources."""


def split_text(text: str, separator: str) -> list[str]:
    """Split a text at a character, but not inside double quotes, which stay.

    Raises:
        DrafterError: a quote is not closed.
    """
    parts = [""]
    pieces = text.split('"')
    for index, piece in enumerate(pieces):
        outside = [piece] if index % 2 else piece.split(separator)
        parts[-1] += ('"' if index else "") + outside[0]
        parts += outside[1:]
    if len(pieces) % 2 == 0:
        raise DrafterError(f"{text!r} has a double quote that is not closed. Close it; one inside quotes is doubled.")
    return parts


def quoted(text: str) -> str:
    """Return a text as it is written within another drafter's text: in double quotes if it needs them."""
    if not _PARTING & {*text} and text == text.strip():
        return text
    return '"' + text.replace('"', '""') + '"'


def unquoted(text: str) -> str:
    """Return what a part of a text stands for: without spaces around it, or the double quotes that `quoted` puts."""
    found = _QUOTED.fullmatch(text.strip())
    return text.strip() if found is None else found[1].replace('""', '"')


def source_texts(sources: str) -> list[str]:
    """Return the texts of a hybrid's sources, with plus signs between them. Raises DrafterError as `split_text`."""
    return [unquoted(text) for text in split_text(sources, "+")]


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split a drafter's text into its name and its options as written.

    Raises:
        DrafterError: an option is not key=value, or occurs twice; a quote is not closed.
    """
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in split_text(rest, ",") if rest else ():
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key or key in options:
            raise DrafterError(
                f"drafter is {spec!r}, but after the name come different options, key=value, with commas between them. "
                'A value that holds commas or plus signs stands in double quotes: model="/a,b/model".'
            )
        options[key] = unquoted(value)
    return name, options


def text_of(name: str, options: Mapping[str, object]) -> str:
    """Return the text that `split_spec` splits into this name and these options."""
    written = ",".join(f"{key}={quoted(str(value))}" for key, value in options.items())
    return f"{name}:{written}" if written else name


def hybrid_of(*sources: str, **options: str) -> str:
    """Return the text of a hybrid of drafters' texts, with further options."""
    written = [f"{key}={quoted(value)}" for key, value in options.items()]
    return ",".join(["hybrid:sources=" + "+".join(map(quoted, sources)), *written])


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


def drafter_of_vllm(config: Fields) -> str:
    """Translate vLLM's speculative configuration into the text of a drafter.

    Raises:
        ConfigError: a method or a key that forerun's drafters do not have, or a value that they do not take.
    """
    method = config.string("method", "draft_model" if "model" in config else None, choices=tuple(_METHODS))
    if method is None:
        raise config.wrong("method", f"one of {', '.join(_METHODS)}")
    name = _METHODS[method]
    keys = ["method", "num_speculative_tokens"]
    options: dict[str, Any] = {}
    if name == _NGRAM:
        keys += ["prompt_lookup_min", "prompt_lookup_max"]
        low, high = (config.integer(key, None, low=1) for key in keys[2:])
        # vLLM takes one for both
        options["min_ngram"] = low or high
        options["max_ngram"] = high or low
    elif name != "suffix":
        keys.append("model")
        options["model"] = config.string("model", None) if name == "mtp" else config.string("model")
    options[K_OPTION] = config.integer("num_speculative_tokens", None, low=0)
    others = ((key, value) for key, value in config.values.items() if key not in keys and value is not None)
    if odd := sorted(key for key, value in others if _CHANGE_NOTHING.get(key, ...) != value):
        raise ConfigError(
            f"{config.place}: {', '.join(odd)} is not supported with the method {method!r}. Leave it out, or choose "
            "the drafter by forerun's name, with options of its own (`forerun drafters`)."
        )
    return text_of(name, {key: value for key, value in options.items() if value is not None})
