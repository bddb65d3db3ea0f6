"""What an answer must be: JSON, JSON of a schema, a match of a regular expression, or a sentence of a Lark grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.errors import GrammarError
from forerun.files.json_file import parse_json

JSON_OBJECT, JSON_SCHEMA, REGEX, LARK = KINDS = ("json_object", "json_schema", "regex", "lark")

MAX_GRAMMAR_BYTES = 2**16
"""Size of a schema or grammar: the time to prepare one grows with the square of its size, and is a second here."""

_REMEDY = "Correct it, or leave it out."


@dataclass(frozen=True, slots=True, repr=False)
class Grammar:
    """What an answer must be, as text. Make one with `json_object`, `json_schema`, `regex`, `lark` or `choice`.

    Attributes:
        kind: one of KINDS.
        text: the schema as JSON, the regular expression or the grammar; empty for `json_object`.

    Raises:
        GrammarError: it is too large, not Unicode text, or no JSON where it must be. Whether it can be followed is
            found when a request with it is made.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrammarError(f"The grammar is of the kind {self.kind!r}, but must be one of {', '.join(KINDS)}.")
        if not isinstance(self.text, str):
            raise GrammarError(f"The {self.kind} is of type {type(self.text).__name__}, but must be text. {_REMEDY}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise GrammarError(f"The {self.kind} is not Unicode text: it holds lone surrogates. {_REMEDY}") from None
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"The {self.kind} has {size:,} bytes, but may have {MAX_GRAMMAR_BYTES:,} at most. Make it smaller."
            )
        if self.kind == JSON_SCHEMA and not isinstance(parse_json(self.text, "json_schema", GrammarError), dict):
            raise GrammarError(f"The JSON schema is no JSON object. {_REMEDY}")
        if self.kind in (REGEX, LARK) and not self.text:
            raise GrammarError(f"The {self.kind} is empty: no answer would be possible. {_REMEDY}")

    def __repr__(self) -> str:
        """Without the text, which is the user's."""
        return f"Grammar({self.kind})"

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls(JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema validates. schema: as an object, or as JSON text."""
        if isinstance(schema, str):
            return cls(JSON_SCHEMA, schema)
        try:
            return cls(JSON_SCHEMA, json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"The JSON schema cannot be written as JSON: {str(error)[:200]}. {_REMEDY}") from None

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression from its beginning to its end."""
        return cls(REGEX, pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A sentence of a grammar in Lark's notation, whose start is `start`."""
        return cls(LARK, grammar)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError(f"A choice must be a list of texts, none of them empty. {_REMEDY}")
        return cls(REGEX, "|".join(map(re.escape, texts)))
