"""Which fields a body may have: those that are honoured, labels without effect, and some whose value asks for nothing.

A field that is null counts as left out, as clients send it. Everything else is refused by name.
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
"""Labels of the client's. They are accepted, and change nothing."""

NOTHING_ASKED: Mapping[str, tuple[Any, ...]] = {
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
"""Fields for which there is nothing here, and their values that ask for nothing."""

_REMEDY = "Correct it, or leave it out."


def checked_body(
    value: object, honoured: Collection[str], nothing_asked: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
) -> Mapping[str, Any]:
    """The body's fields without those that are null, and without those that ask for nothing.

    Args:
        nothing_asked: fields beside NOTHING_ASKED that may have values which ask for nothing.

    Raises:
        RequestBodyError: it is no object, or has a field that cannot be honoured.
    """
    if not isinstance(value, dict):
        raise RequestBodyError("The request's body is not a JSON object. Give one, with the fields of the request.")
    nothing = {**NOTHING_ASKED, **nothing_asked}
    body = {name: entry for name, entry in value.items() if entry is not None}
    for name in [*body]:
        if name in honoured:
            continue
        if name in nothing:
            _check_nothing_asked(name, body[name], nothing[name])
        elif name not in LABELS:
            known = sorted((*honoured, *nothing, *LABELS))
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "Leave it out."
            raise RequestBodyError(f"{_shown(name)} is not supported: it would be ignored. {hint}", param=_shown(name))
        del body[name]
    return body


def field(body: Mapping[str, Any], name: str, place: str = "The request", remedy: str = _REMEDY) -> Fields:
    """The reader of one field, whose errors carry its name."""
    return Fields(place, body, partial(RequestBodyError, param=name), remedy, private=True)


def _check_nothing_asked(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if not any(value == each and type(value) is type(each) for each in allowed):
        values = " or ".join(repr(each) for each in allowed)
        raise RequestBodyError(f"{name} is not supported, other than {values}. Leave it out.", param=name)


def _shown(name: object) -> str:
    """A field's name as a client wrote it, in a length and an alphabet that are fit to be sent back."""
    return ascii(str(name)[:60])[1:-1]


# The `speculative` field of a body: no speculation, or which of the drafters that were loaded, and K at most.

NAME = "speculative"
_FORMS = (
    'true, false, the name of a drafter that the server has loaded, "NAME:num_draft_tokens=4", or an object of '
    '"drafter" and "num_draft_tokens"'
)


def speculative_options(body: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Fields of SamplingParams -> (field of the body, value).

    A name is looked up when the request is checked. What would name files, models or classes is no such name.

    Raises:
        RequestBodyError: the field has another form, or options other than num_draft_tokens.
    """
    given = body.get(NAME, True)
    if given is True:
        return {}
    if given is False:
        return {"drafter": (NAME, NO_DRAFTER)}
    if isinstance(given, str):
        try:
            name, options = split_spec(given)
        except DrafterError:
            raise field(body, NAME).wrong(NAME, _FORMS) from None
        written: dict[str, Any] = {"drafter": name, **options}
        if options.get(K_OPTION, "").isdecimal():
            written[K_OPTION] = int(options[K_OPTION][:9])
    elif isinstance(given, dict):
        written = given
    else:
        raise field(body, NAME).wrong(NAME, _FORMS)
    odd = set(written) - {"drafter", K_OPTION}
    if odd or not isinstance(written.get("drafter", ""), str):
        raise field(body, NAME).wrong(NAME, _FORMS)
    return {key: (NAME, value) for key, value in written.items() if value is not None}
