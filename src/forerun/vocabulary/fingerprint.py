"""Hashes that tell tokenizers apart, for files that hold token ids.

They do not depend on the file the tokenizer came from, nor on settings such as truncation, nor on the version of the
library that read it. The two are parts of file formats: their values must not change.
"""

from __future__ import annotations

import json
from hashlib import blake2b, sha256
from typing import Any

from forerun.vocabulary.tokenizer import backend, tokens_by_id


def fingerprint(tokenizer: Any) -> str:
    """Of the vocabulary (added tokens included) and the merges: how text is cut as well. Empty for None."""
    if tokenizer is None:
        return ""
    vocabulary = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    content = json.dumps([vocabulary, _merges(tokenizer)], ensure_ascii=True)
    return blake2b(content.encode(), digest_size=16).hexdigest()


def ids_fingerprint(tokenizer: Any) -> str:
    """Of the vocabulary alone: what each id stands for. Empty for None."""
    if tokenizer is None:
        return ""
    return sha256(json.dumps(sorted(tokens_by_id(tokenizer).items())).encode()).hexdigest()


def _merges(tokenizer: Any) -> list[str]:
    """The merges in their order, as "left right"; none for tokenizers that are not byte-pair encodings."""
    merges = backend(tokenizer).get("model", {}).get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
