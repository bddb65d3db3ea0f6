"""Options that hold several values, as users give them: lists of token ids, biases of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from forerun.errors import SamplingError

_MOST_DIGITS = 20


def entries(name: str, values: object, expected: str) -> tuple[Any, ...]:
    """A list, or what else can be run through and is no text or mapping. Raises SamplingError."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise SamplingError(f"{name} is of type {type(values).__name__}, but must be {expected}.")
    return tuple(values)


def token_ids(name: str, values: object) -> tuple[int, ...]:
    """A list of token ids. Raises SamplingError."""
    return tuple(_token_id(name, value) for value in entries(name, values, "a list of token ids"))


def _token_id(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise SamplingError(f"{name} holds {value!r}, but a token id is a whole number of 0 or more.")
    return int(value)


def biases(values: object) -> dict[int, float]:
    """Token id -> bias. Ids may be text, since the keys of a JSON object are. Raises SamplingError."""
    if not isinstance(values, Mapping):
        raise SamplingError(f"logit_bias is of type {type(values).__name__}, but must map token ids to numbers.")
    found = {}
    for key, bias in values.items():
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < _MOST_DIGITS
        token_id = _token_id("logit_bias", int(key) if digits else key)
        try:
            number = math.nan if isinstance(bias, bool) or not isinstance(bias, Real) else float(bias)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise SamplingError(f"logit_bias of token {token_id} is {bias!r}, but must be a finite number.")
        found[token_id] = number
    return found
