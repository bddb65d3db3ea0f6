"""Tokens as text and bytes, one by one, as reports of log-probabilities name them."""

from __future__ import annotations

from typing import Any

from forerun.vocabulary import special_tokens, token_bytes, tokens_by_id


class TokenNames:
    """What each token is called.

    A token that is no whole characters is called by its bytes, `bytes:\\xe2\\x80`, as OpenAI does; a special token,
    which adds nothing to a text, by its name.

    tokenizer: of the target; None if it has none: then a token is called by its id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}
        if tokenizer is not None:
            self._bytes = token_bytes(tokenizer)
            special = {token_id: text for text, token_id in special_tokens(tokenizer).items()}
            self._names = tokens_by_id(tokenizer) | special

    def data(self, token_id: int) -> bytes:
        """The bytes that the token stands for."""
        found = self._bytes.get(token_id)
        return self._names.get(token_id, f"token_id:{token_id}").encode() if found is None else found

    def text(self, token_id: int) -> str:
        """What the token is called."""
        data = self.data(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
