"""The token list of a GGUF file's metadata: texts, types and named ids, checked.

Keys and types are those of the GGUF specification. Where a file leaves something open, llama.cpp's reading is followed
(src/llama-vocab.cpp, `llama_vocab::impl::load`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from forerun.errors import ModelLoadError
from forerun.utils.json_file import Fields

_log = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
TOKENS = PREFIX + "tokens"
TYPES = PREFIX + "token_type"
NAMED = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "fim_pre": "fim_pre_token_id",
    "fim_suf": "fim_suf_token_id",
    "fim_mid": "fim_mid_token_id",
    "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}
"""Role of a token -> the key of its id, after PREFIX."""
_DEPRECATED = {"fim_pre": "prefix_token_id", "fim_suf": "suffix_token_id", "fim_mid": "middle_token_id"}
"""The same, in older files."""


class TokenType(IntEnum):
    """The type of a token, by the numbers of the GGUF specification."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


MARKED = (TokenType.CONTROL, TokenType.UNKNOWN)
"""Types of tokens that are no text."""


@dataclass(frozen=True, slots=True)
class TokenList:
    """The tokens of a file.

    Attributes:
        fields: the metadata, for further keys and for messages.
        texts: by id, each once, none empty.
        types: by id.
        ids: text -> id.
        named: role (a key of NAMED) -> id, of those that the file gives.
    """

    fields: Fields
    texts: list[str]
    types: list[TokenType]
    ids: Mapping[str, int]
    named: Mapping[str, int]

    def marked(self, texts: Iterable[str]) -> set[int]:
        """Return the ids of tokens of these texts that the file marks as no text, by their type or by a name; in a file
        without types, of all."""
        found = {self.ids[text] for text in texts if text in self.ids}
        named = set(self.named.values())
        return {index for index in found if TYPES not in self.fields or self.types[index] in MARKED or index in named}

    def wrong(self, key: str, reason: str) -> ModelLoadError:
        """Return the error about a key's value."""
        return ModelLoadError(f"{self.fields.place}: {key}: {reason}. {self.fields.remedy}")


def read_token_list(fields: Fields, default_ids: Mapping[str, int]) -> TokenList:
    """Read the tokens that the metadata lists.

    An empty token is called [EMPTY_id], as in llama.cpp. A file without types has normal tokens only.

    Args:
        default_ids: role -> id, where the file names none and there are as many tokens.

    Named ids that are none of theirs are left out with a warning, as in llama.cpp: converters write -1 for none.

    Raises:
        ModelLoadError: there are none, a text is not a string of UTF-8 or stands there twice, a type is unknown, there
            are not as many types as tokens, or a named id is no whole number.
    """
    texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(fields.list_of(TOKENS, str))]
    if not texts:
        raise fields.wrong(TOKENS, "a list of at least one token")
    ids: dict[str, int] = {}
    for index, text in enumerate(texts):
        first = ids.setdefault(text, index)
        if first != index:
            raise ModelLoadError(f"{fields.place}: {TOKENS}: tokens {first} and {index} are the same. {fields.remedy}")
    named = {role: index for role, index in default_ids.items() if index < len(texts)}
    for role, key in (*_DEPRECATED.items(), *NAMED.items()):
        given = fields.integer(PREFIX + key, None)
        if given is not None and 0 <= given < len(texts):
            named[role] = given
        elif given is not None:
            message = "%s: %s is %d, which is left out: there are %s tokens."
            _log.warning(message, fields.place, PREFIX + key, given, f"{len(texts):,}")
    return TokenList(fields, texts, _types(fields, len(texts)), ids, named)


def _types(fields: Fields, count: int) -> list[TokenType]:
    numbers = fields.list_of(TYPES, int, None)
    if numbers is None:
        return [TokenType.NORMAL] * count
    if len(numbers) != count:
        raise ModelLoadError(
            f"{fields.place}: {TYPES} has {len(numbers):,} entries, but there are {count:,} tokens. {fields.remedy}"
        )
    known = {*TokenType}
    if wrong := [index for index, number in enumerate(numbers) if number not in known]:
        raise ModelLoadError(
            f"{fields.place}: {TYPES}: token {wrong[0]} has type {numbers[wrong[0]]}, but must have one of "
            f"{min(known)}..{max(known)}. {fields.remedy}"
        )
    return [*map(TokenType, numbers)]
