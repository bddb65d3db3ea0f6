"""A text that grows, in another tokenizer's tokens; only its end is tokenised again when it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from forerun.vocabulary import encode_text

_LOOK_BEHIND = 32
"""Tokens at the end of a text that are encoded anew when it grows in another vocabulary."""


class Retokeniser:
    """Encodes text with one tokenizer, knowing how many bytes each of its tokens stands for.

    Args:
        tokenizer: a Transformers tokenizer.
        table: id -> bytes (`vocabulary.token_bytes`); ids without an entry stand for none.
    """

    def __init__(self, tokenizer: Any, table: Mapping[int, bytes]) -> None:
        self._tokenizer = tokenizer
        self._table = table

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids. special: with whatever the tokenizer puts before a text."""
        return encode_text(self._tokenizer, text, special=special)

    def bytes_of(self, token_ids: Seq[int]) -> bytes:
        """The text that the tokens stand for."""
        return b"".join(self._table.get(token_id, b"") for token_id in token_ids)

    def extend(self, token_ids: Seq[int], added: str) -> list[int]:
        """The tokens of a text and of what is added to it.

        The last tokens (_LOOK_BEHIND) are encoded anew, together with the addition. Encoded from the middle
        of a text, the first tokens may be others than before; so the two are spliced at the first border, from the
        middle of the part that both hold, at which both have one.
        """
        behind = list(token_ids[-_LOOK_BEHIND:])
        while behind and not _is_text(self.bytes_of(behind)):
            behind = behind[1:]  # begins inside a character
        old = self.bytes_of(behind)
        if not behind or not old:
            return [*token_ids, *self.encode(added)]
        new_ids = self.encode(old.decode("utf-8") + added)
        shift = len(self.bytes_of(new_ids)) - len(old) - len(added.encode("utf-8"))
        old_borders = self._borders(behind, 0)
        new_borders = self._borders(new_ids, -shift)  # some tokenizers put a space before a text
        for border in sorted(old_borders.keys() & new_borders.keys()):
            if border >= len(old) // 2:
                kept = len(token_ids) - len(behind) + old_borders[border]
                return [*token_ids[:kept], *new_ids[new_borders[border] :]]
        return [*token_ids, *self.encode(added)]

    def continuation(self, token_ids: Seq[int], added: str) -> list[int]:
        """Tokens of `added` alone, as they would follow tokens that must stay as they are."""
        behind = list(token_ids[-_LOOK_BEHIND:])
        while behind and not _is_text(self.bytes_of(behind)):
            behind = behind[1:]
        old = self.bytes_of(behind)
        if old:
            new_ids = self.encode(old.decode("utf-8") + added)
            shift = len(self.bytes_of(new_ids)) - len(old) - len(added.encode("utf-8"))
            border = self._borders(new_ids, -shift).get(len(old))
            if border is not None:
                return new_ids[border:]
        return self.encode(added)

    def _borders(self, token_ids: Seq[int], start: int) -> dict[int, int]:
        """Bytes before a border -> tokens before it."""
        borders = {start: 0}
        for place, token_id in enumerate(token_ids, 1):
            start += len(self._table.get(token_id, b""))
            borders[start] = place
        return borders


def complete(data: bytes) -> bytes:
    """Without the incomplete character at the end, if there is one."""
    for cut in range(min(3, len(data)) + 1):
        part = data[: len(data) - cut]
        if _is_text(part):
            return part
    return data


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
