"""What makes two tokenizers the same for an index: the tokens, their ids, and how pieces are merged."""

from __future__ import annotations

import json
from typing import Any

from forerun.retrieval.file import digest


def fingerprint(tokenizer: Any) -> str:
    """A hash of the vocabulary (added tokens included) and the merges; empty for None.

    It does not depend on the file the tokenizer came from, nor on settings such as truncation, nor on the version of
    the library that read it.
    """
    if tokenizer is None:
        return ""
    vocabulary = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    content = json.dumps([vocabulary, _merges(tokenizer)], ensure_ascii=True)
    return digest(content.encode())


def _merges(tokenizer: Any) -> list[str]:
    """The merges in their order, as "left right"; none for tokenizers that are not byte-pair encodings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
