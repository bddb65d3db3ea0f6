"""Fields of a body: the supported ones, labels without effect, and unsupported ones with a value that has no effect.

A null field counts as left out. Everything else is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from forerun.config import NO_DRAFTER
from forerun.drafters.parse_text import K_OPTION, split_spec
from forerun.errors import DrafterError, RequestBodyError
from forerun.utils.json_file import Fields

LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Labels of the client. They are accepted without effect."""

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
}
"""Unsupported fields, and their values that have no effect."""

_REMEDY = "Correct it, or leave it out."


def checked_body(
    value: object, supported: Collection[str], without_effect: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
) -> Mapping[str, Any]:
    """Return the body's fields without those that are null or have no effect.

    Args:
        supported: names of the fields that are returned.
        without_effect: further fields like WITHOUT_EFFECT.

    Raises:
        RequestBodyError: it is not an object, or has an unsupported field.
    """
    if not isinstance(value, dict):
        raise RequestBodyError("The request's body is not a JSON object. Give one, with the fields of the request.")
    no_effect = {**WITHOUT_EFFECT, **without_effect}
    body = {name: entry for name, entry in value.items() if entry is not None}
    for name in [*body]:
        if name in supported:
            continue
        if name in no_effect:
            _check_without_effect(name, body[name], no_effect[name])
        elif name not in LABELS:
            known = sorted((*supported, *no_effect, *LABELS))
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "Leave it out."
            raise RequestBodyError(f"{_shown(name)} is not supported: it would be ignored. {hint}", param=_shown(name))
        del body[name]
    return body


def field(body: Mapping[str, Any], name: str, place: str = "The request", remedy: str = _REMEDY) -> Fields:
    """Return a reader of one field, whose errors name the field."""
    return Fields(place, body, partial(RequestBodyError, param=name), remedy, private=True)


def _check_without_effect(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if not any(value == each and type(value) is type(each) for each in allowed):
        values = " or ".join(repr(each) for each in allowed)
        raise RequestBodyError(f"{name} is not supported, other than {values}. Leave it out.", param=name)


def _shown(name: object) -> str:
    """Return a field's name, shortened and escaped so that it can be sent back."""
    return ascii(str(name)[:60])[1:-1]


SPECULATIVE = "speculative"
"""The field that disables speculation, or chooses a loaded drafter and a maximum K."""
_FORMS = (
    'true, false, the name of a drafter that the server has loaded, "SPECULATIVE:num_draft_tokens=4", or an object of '
    '"drafter" and "num_draft_tokens"'
)


def speculative_options(body: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the fields of SamplingParams that the body's `speculative` sets -> (field of the body, value).

    The drafter's name is looked up when the request is checked; it cannot name files, models or classes.

    Raises:
        RequestBodyError: the field has another form, or options other than num_draft_tokens.
    """
    given = body.get(SPECULATIVE, True)
    if given is True:
        return {}
    if given is False:
        return {"drafter": (SPECULATIVE, NO_DRAFTER)}
    if isinstance(given, str):
        try:
            name, options = split_spec(given)
        except DrafterError:
            raise field(body, SPECULATIVE).wrong(SPECULATIVE, _FORMS) from None
        written: dict[str, Any] = {"drafter": name, **options}
        if options.get(K_OPTION, "").isdecimal():
            written[K_OPTION] = int(options[K_OPTION][:9])
    elif isinstance(given, dict):
        written = given
    else:
        raise field(body, SPECULATIVE).wrong(SPECULATIVE, _FORMS)
    odd = set(written) - {"drafter", K_OPTION}
    if odd or not isinstance(written.get("drafter", ""), str):
        raise field(body, SPECULATIVE).wrong(SPECULATIVE, _FORMS)
    return {key: (SPECULATIVE, value) for key, value in written.items() if value is not None}
