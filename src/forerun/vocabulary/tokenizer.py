"""What a Transformers tokenizer tells of its tokens. Fast and slow ones have no type in common that tells all of it."""

from __future__ import annotations

import json
from typing import Any


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Id -> token, special and added tokens included."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def added_tokens(tokenizer: Any) -> dict[int, str]:
    """Id -> text of the tokens that were added to the vocabulary as they are."""
    return {token_id: str(token) for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}


def backend(tokenizer: Any) -> dict[str, Any]:
    """The contents of its tokenizer.json; empty for slow tokenizers, which have none."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    contents: dict[str, Any] = {} if fast is None else json.loads(fast.to_str())
    return contents
