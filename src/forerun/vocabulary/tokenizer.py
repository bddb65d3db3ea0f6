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


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text -> id of the special tokens, named (such as the end of text) or merely added as special."""
    texts, ids = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    special = dict(zip(texts, ids, strict=True))
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if getattr(token, "special", False):
            special[str(token)] = token_id
    return special


def backend(tokenizer: Any) -> dict[str, Any]:
    """The contents of its tokenizer.json; empty for slow tokenizers, which have none."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    contents: dict[str, Any] = {} if fast is None else json.loads(fast.to_str())
    return contents


def encode_text(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids of a text; special: with what the tokenizer puts before and after one, such as the start of text."""
    # not verbose: it would warn of texts longer than the length in its configuration, which says nothing of the model
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids
