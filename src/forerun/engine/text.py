"""From tokens to text as they arrive: incremental detokenisation, and stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

_REPLACEMENT = "\ufffd"
_PROMPT_CONTEXT = 5
"""Prompt tokens decoded along, so that a leading space or the rest of a character comes out right."""
_MAX_PENDING = 16
"""Tokens held while they end in an undecodable byte; no character is this long, so the bytes are what they are."""


class Detokenizer:
    """Text of a growing list of tokens, never half a UTF-8 character, at amortised constant cost per token.

    Only a window is decoded: the block of tokens before the last clean border, as context, and what came after it.
    """

    __slots__ = ("_context", "_ids", "_shown", "_tokenizer")

    def __init__(self, tokenizer: Any, prompt_ids: Seq[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_PROMPT_CONTEXT:])
        self._context = len(self._ids)
        self._shown = len(self._decode(self._ids).rstrip(_REPLACEMENT)) if self._ids else 0

    def push(self, ids: Seq[int]) -> str:
        """Text that these tokens complete."""
        self._ids.extend(ids)
        text = self._decode(self._ids)
        stable = text.rstrip(_REPLACEMENT)
        if len(self._ids) - self._context > _MAX_PENDING + len(ids):
            stable = text
        new = stable[self._shown :]
        if len(stable) == len(text):
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = len(self._decode(self._ids))
        else:
            self._shown = max(self._shown, len(stable))
        return new

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as replacement characters."""
        text = self._decode(self._ids)
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def copy(self) -> Detokenizer:
        """An independent copy at the same place."""
        twin = object.__new__(Detokenizer)
        twin._tokenizer, twin._ids = self._tokenizer, list(self._ids)
        twin._context, twin._shown = self._context, self._shown
        return twin

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class TextStream:
    """The text of one choice as it may be shown: cut before a stop string, holding back what may become one."""

    __slots__ = ("_detokenizer", "_held", "_pieces", "_ready", "_stops")

    def __init__(self, tokenizer: Any, prompt_ids: Seq[int], stops: Seq[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = tuple(stops)
        self._held = ""  # decoded, not shown: the longest suffix that begins a stop string
        self._pieces: list[str] = []
        self._ready = 0  # pieces already taken

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        return "".join(self._pieces)

    def push(self, ids: Seq[int], num_exempt: int = 0) -> int | None:
        """Append tokens; how many of them complete the first stop string, or None if none does.

        num_exempt: stop strings completed by the first that many tokens are passed over (min_tokens).
        After a stop string the stream is closed: nothing more may be pushed.
        """
        if num_exempt > 0 and self._stops:
            self._hold(self._detokenizer.push(ids[:num_exempt]))
            ids = ids[num_exempt:]
        else:
            num_exempt = 0
        if not ids:
            return None
        before = self._detokenizer.copy() if self._stops and len(ids) > 1 else None
        new = self._detokenizer.push(ids)
        if self._find(new) is None:
            self._hold(new)
            return None
        if before is None:
            return self._stop(new, num_exempt + 1)
        self._detokenizer = before
        for i, token_id in enumerate(ids):
            new = before.push((token_id,))
            if self._find(new) is not None:
                return self._stop(new, num_exempt + i + 1)
            self._hold(new)
        return None  # unreachable for a tokenizer that decodes a block as it decodes its tokens

    def finish(self) -> None:
        """The choice has ended without a stop string: nothing needs to be held any longer."""
        new = self._detokenizer.flush()
        at = self._find(new)
        text = self._held + new
        self._pieces.append(text if at is None else text[:at])
        self._held = ""

    def take(self) -> str:
        """Text that has become showable since the last call."""
        new = "".join(self._pieces[self._ready :])
        self._ready = len(self._pieces)
        return new

    def _find(self, new: str) -> int | None:
        """Where in held + new the first stop string begins that ends within new."""
        if not self._stops or not new:
            return None
        text, old = self._held + new, len(self._held)
        found = [at for stop in self._stops if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        return min(found, default=None)

    def _stop(self, new: str, num_tokens: int) -> int:
        at = self._find(new)
        self._pieces.append((self._held + new)[:at])
        self._held = ""
        return num_tokens

    def _hold(self, new: str) -> None:
        text = self._held + new
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        border = len(text) - keep
        if border:
            self._pieces.append(text[:border])
        self._held = text[border:]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of text that is a proper prefix of stop."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
