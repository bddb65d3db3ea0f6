"""Log-probabilities in OpenAI's two formats: that of chats, a list of objects, and that of completions, four lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import Any

from forerun.engine.text import Detokenizer, TokenTexts
from forerun.openai_format.token_names import TokenNames
from forerun.sampling import TokenLogprob

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(entries: Iterable[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token_id), "logprob": _number(logprob), "bytes": list(names.data(token_id))}

    content = [
        {**named(entry.token_id, entry.logprob), "top_logprobs": [named(*other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Seq[int], entries: Seq[TokenLogprob | None], offsets: Seq[int], names: TokenNames
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice.

    Args:
        token_ids: [n] of the text: the answer's, after the prompt's where it is echoed.
        entries: [n] their reports; None of the prompt's first token.
        offsets: [n] where in the text each begins.
    """
    return {
        "tokens": [names.text(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _number(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _top(entry, names) for entry in entries],
        "text_offset": list(offsets),
    }


def text_offsets(token_ids: Seq[int], before: Seq[int], texts: TokenTexts | None, length: int) -> list[int]:
    """Where in their text each of the tokens begins, in characters; of a token inside a character, where that begins.

    Args:
        before: tokens before the text, which decoding may depend on.
        texts: None if the model has no tokenizer, and so no text.
        length: of the text, which may end before the last tokens do.
    """
    return [min(at, length) for at in Offsets(before, texts).push(token_ids)]


class Offsets:
    """The same for a text that grows. Arguments as `text_offsets`."""

    def __init__(self, before: Seq[int], texts: TokenTexts | None) -> None:
        self._detokenizer = None if texts is None else Detokenizer(texts, before)
        self._at = 0

    def push(self, token_ids: Seq[int]) -> list[int]:
        """Where each of the next tokens begins."""
        if self._detokenizer is None:
            return [0] * len(token_ids)
        offsets = []
        for token_id in token_ids:
            offsets.append(self._at)
            self._at += len(self._detokenizer.push((token_id,)))
        return offsets


def _top(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The most probable tokens and the chosen one. Of several with one name, the most probable counts."""
    found: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(names.text(token_id), _number(logprob))
    return found


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)
