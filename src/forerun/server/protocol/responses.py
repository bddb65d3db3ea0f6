"""Names and texts of tokens in responses, log-probabilities, and usage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from functools import cached_property
from itertools import chain
from typing import Any

from forerun.drafters.ngram.prediction import SOURCE
from forerun.engine.results import Generation
from forerun.engine.text import Detokenizer, TextStream, TokenTexts
from forerun.sampling import TokenLogprob
from forerun.server.protocol.requests import CompletionRequest
from forerun.utils.vocabulary import special_tokens, token_bytes, tokens_by_id


class TokenNames:
    """Names of tokens in reports of log-probabilities.

    A token that is not a whole number of characters is named by its bytes, `bytes:\\xe2\\x80`, as OpenAI does; a
    special token by its text.

    Args:
        tokenizer: of the target; None if it has none: then a token is named by its id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}
        if tokenizer is not None:
            self._bytes = token_bytes(tokenizer)
            special = {token_id: text for text, token_id in special_tokens(tokenizer).items()}
            self._names = tokens_by_id(tokenizer) | special

    def data(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        found = self._bytes.get(token_id)
        return self._names.get(token_id, f"token_id:{token_id}").encode() if found is None else found

    def text(self, token_id: int) -> str:
        """Return the name of a token."""
        data = self.data(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


_LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


def chat_logprobs(entries: Iterable[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice: a list of objects."""

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
    """Return the `logprobs` of a completion's choice: four lists.

    Args:
        token_ids: [n] of the answer, after those of an echoed prompt.
        entries: [n] their log-probabilities; None for the prompt's first token.
        offsets: [n] start of each in the text.
    """
    return {
        "tokens": [names.text(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _number(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _top(entry, names) for entry in entries],
        "text_offset": list(offsets),
    }


class Offsets:
    """Starts of tokens in a growing text, in characters; a token within a character starts with it.

    Args:
        before: tokens before the text, on which decoding may depend.
        texts: None if the model has no tokenizer, and so no text.
    """

    def __init__(self, before: Seq[int], texts: TokenTexts | None) -> None:
        self._detokenizer = None if texts is None else Detokenizer(texts, before)
        self._at = 0

    def push(self, token_ids: Seq[int]) -> list[int]:
        """Return the starts of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._at)
            self._at += 0 if self._detokenizer is None else len(self._detokenizer.push((token_id,)))
        return offsets


def _top(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """Return the most probable tokens and the chosen one; of several with the same name, the most probable."""
    found: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(names.text(token_id), _number(logprob))
    return found


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)


class ModelTexts:
    """The names and texts of one target's tokens, which are made when they are needed.

    Args:
        tokenizer: the target's; None if it has none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def names(self) -> TokenNames:
        """Return the names of tokens."""
        return TokenNames(self.tokenizer)

    @cached_property
    def texts(self) -> TokenTexts | None:
        """Return the texts of tokens; None if the model has no tokenizer."""
        return None if self.tokenizer is None else TokenTexts(self.tokenizer)

    def text(self, token_ids: Seq[int]) -> str:
        """Return the text of tokens, without special ones; empty if the model has no tokenizer."""
        if self.texts is None:
            return ""
        stream = TextStream(self.texts, [])
        stream.push([*token_ids])
        stream.finish()
        return stream.text


def usage(
    request: CompletionRequest, generations: Seq[Generation], *, details: bool, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """Count the tokens of prompts and answers. Choices of one prompt count it once.

    details: include what depends on other requests and on speculation: cached prompt tokens, and accepted tokens of a
        prediction.
    """
    every = list(chain.from_iterable(generation.choices for generation in generations))
    prompt_tokens = sum(len(generation.prompt_token_ids) for generation in generations)
    completion_tokens = sum(len(choice.token_ids) for choice in every)
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    more: dict[str, int] = {"reasoning_tokens": reasoning_tokens} if reasoning_tokens else {}
    if details:
        cached = sum(generation.choices[0].stats.num_cached_tokens for generation in generations)
        found["prompt_tokens_details"] = {"cached_tokens": cached}
        if request.params.prediction is not None:
            predicted = [choice.stats.sources[SOURCE] for choice in every if SOURCE in choice.stats.sources]
            accepted = more["accepted_prediction_tokens"] = sum(each.num_accepted_tokens for each in predicted)
            more["rejected_prediction_tokens"] = sum(each.num_draft_tokens for each in predicted) - accepted
    return found | ({"completion_tokens_details": more} if more else {})
