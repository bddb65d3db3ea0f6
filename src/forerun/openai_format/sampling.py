"""Sampling options of a body. Each is checked alone first, so that an error names the field at fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.config import SamplingParams
from forerun.errors import RequestBodyError, SamplingError
from forerun.fields import described

_OTHERWISE_NAMED = (
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "prediction",
    "tenant",
    "drafter",
    "num_draft_tokens",
    "grammar",
)
"""Fields of SamplingParams that a body gives by another name, in another form, or not at all."""

SAME_NAMES = tuple(name for name in described(SamplingParams) if name not in _OTHERWISE_NAMED)
"""Fields that a body gives as SamplingParams has them: OpenAI's, and what its client sends as `extra_body`."""

_ANY_LENGTH = 2**62
_MOST_STOPS = 256
"""Strings, and token ids, that end an answer. All of them are looked for after every token."""


def sampling_params(body: Mapping[str, Any], others: Mapping[str, tuple[str, Any]]) -> SamplingParams:
    """The options of a body.

    Args:
        others: field of SamplingParams -> (field of the body, value).

    Raises:
        RequestBodyError: an option is out of range or of a wrong type, or contradicts another.
    """
    given = {name: (name, body[name]) for name in SAME_NAMES if name in body} | dict(others)
    for name in ("stop", "stop_token_ids"):
        if isinstance(body.get(name), list) and len(body[name]) > _MOST_STOPS:
            raise RequestBodyError(f"{name} has {len(body[name])} entries, but may have {_MOST_STOPS}.", param=name)
    for name, (spelled, value) in given.items():
        try:
            SamplingParams(**{"max_tokens": _ANY_LENGTH, name: value})
        except SamplingError as error:
            renamed = str(error) if spelled == name else f"{spelled}: {error}"
            raise RequestBodyError(renamed, param=spelled) from None
    try:
        return SamplingParams(**{name: value for name, (_, value) in given.items()})
    except SamplingError as error:
        raise RequestBodyError(str(error)) from None
