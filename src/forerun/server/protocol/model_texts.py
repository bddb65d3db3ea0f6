"""What is known of a model's texts: names and texts of its tokens, and the format of its answers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import cached_property
from typing import Any

from forerun.chat.response_format import CALL, ResponseFormat, find_format
from forerun.engine.chat_template import check_template
from forerun.engine.text import NO_MARKS, Detokenizer, TokenTexts
from forerun.errors import PromptError
from forerun.utils.vocabulary import encode_text, special_tokens, token_bytes, tokens_by_id

_PROMPT_END = 512
"""Tokens of a prompt in which an answer may have begun."""


class TokenNames:
    """Names of tokens in reports of log-probabilities.

    A token that is not a whole number of characters is named by its bytes, `bytes:\\xe2\\x80`, as OpenAI does; a
    special token by its text.

    Args:
        tokenizer: of the target; None if it has none: then a token is named by its id.
    """

    def __init__(self, tokenizer: Any) -> None:
        special = {} if tokenizer is None else {token_id: text for text, token_id in special_tokens(tokenizer).items()}
        self._names = {} if tokenizer is None else tokens_by_id(tokenizer) | special
        self._bytes = {} if tokenizer is None else token_bytes(tokenizer)

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


class TokenIdNames(TokenNames):
    """Names of tokens by their ids, `token_id:5`, for `return_tokens_as_token_ids`."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names._names
        self._bytes = names._bytes

    def text(self, token_id: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token_id}"


class ModelTexts:
    """The names and texts of one target's tokens, which are made when they are needed.

    Args:
        tokenizer: the target's; None if it has none.
        form: how the model writes its answers; None: as its chat template does, or the tokenizer says.
    """

    def __init__(self, tokenizer: Any, form: ResponseFormat | None = None) -> None:
        self.tokenizer = tokenizer
        self._formats: dict[bool, ResponseFormat | None] = {} if form is None else {True: form, False: form}

    def response_format(self, *, has_tools: bool) -> ResponseFormat | None:
        """Return how the model writes its answers, which may depend on whether it has tools; None if that is unknown.

        Raises:
            ConfigError: the tokenizer's own response template is none.
        """
        if has_tools not in self._formats:
            found = None
            with suppress(PromptError):  # there is no template
                template = check_template(self.tokenizer, "", () if has_tools else None)
                found = find_format(template, getattr(self.tokenizer, "response_template", None))
            self._formats[has_tools] = found
        return self._formats[has_tools]

    @property
    def carry_calls(self) -> bool:
        """Return whether the chat template carries tools, and calls in a known format."""
        form = self.response_format(has_tools=True)
        template = getattr(self.tokenizer, "chat_template", None)
        return form is not None and "tools" in str(template) and any(region.kind == CALL for region in form.regions)

    @cached_property
    def special(self) -> dict[int, str]:
        """Return id -> text of the special tokens."""
        return {} if self.texts is None else {token_id: text for text, token_id in self.texts.special.items()}

    def marks(self, form: ResponseFormat | None) -> dict[int, str]:
        """Return id -> text of the special tokens that an answer's text must show to be parsed."""
        return {} if form is None or self.texts is None else form.markup(self.texts.special)

    def prompt_end(self, token_ids: Seq[int], num_begun: int = 0) -> str:
        """Return the text of a prompt's last tokens, with special ones. num_begun: of those, at most, an answer's."""
        last = token_ids[-_PROMPT_END - num_begun :]
        return str(self.tokenizer.decode([*last], clean_up_tokenization_spaces=False))

    @cached_property
    def names(self) -> TokenNames:
        """Return the names of tokens."""
        return TokenNames(self.tokenizer)

    @cached_property
    def texts(self) -> TokenTexts | None:
        """Return the texts of tokens; None if the model has no tokenizer."""
        return None if self.tokenizer is None else TokenTexts(self.tokenizer)

    def text(self, token_ids: Seq[int], *, special: bool = True) -> str:
        """Return the text of tokens; empty if the model has no tokenizer. special: with that of special ones."""
        if self.texts is None:
            return ""
        detokenizer = Detokenizer(self.texts, [], self.special if special else NO_MARKS)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(encode_text(self.tokenizer, text, special=False)) if text else 0
