"""The `speculative` field of a body: no speculation, or which of the drafters that were loaded, and K at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.config import NO_DRAFTER
from forerun.drafters.parse_text import K_OPTION, split_spec
from forerun.errors import DrafterError
from forerun.openai_format.fields import field

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
