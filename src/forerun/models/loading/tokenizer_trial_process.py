"""The process that tries a tokenizer, since what goes wrong in the library `tokenizers` may end its process.

It reads a tokenizer.json from standard input, and writes what is wrong with it: nothing if it can be used. The argument
is its bound of memory in bytes. It starts fast, since it imports nothing heavy.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from typing import Any

_STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LONGEST = 1_000
"""Characters of a text in one of the stages, entries of a list, and characters that one character may become."""
_SAMPLE = (
    "The 3 quick\u2014brown foxes (it's 'so' 12,345.67)\t\r\n\n  \u00e9e\u0301 \u00df \ufb01 \ufdfa \u5b57\u6f22 \u304b"
    " \ud55c\uae00 \u043f\u0440\u0438 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938 \U0001f469\u200d\U0001f467\ufffd\x00 "
    + "a"
    * 64
)


def values(value: Any) -> Iterator[Any]:
    """Yield a value of JSON, and all values in it."""
    yield value
    entries = list(value.values()) if isinstance(value, dict) else value
    for inner in entries if isinstance(entries, list) else ():
        yield from values(inner)


def oversized_part(tokenizer: dict[str, Any]) -> str | None:
    """Return which part of a tokenizer.json could make more of a text than fits into memory."""
    for stage in _STAGES:
        parts = list(values(tokenizer.get(stage)))
        objects = [part for part in parts if isinstance(part, dict)]
        charsmaps = [part["precompiled_charsmap"] for part in objects if "precompiled_charsmap" in part]
        sized = [part for part in parts if isinstance(part, (str, list)) and part not in charsmaps]
        if max(map(len, sized), default=0) > _LONGEST:
            return f"its {stage} holds a text or a list of more than {_LONGEST:,}"
        for content in map(b64decode, charsmaps):  # the bytes of a trie, then texts that end with a zero
            if max(map(len, content[4 + int.from_bytes(content[:4], "little") :].split(b"\0"))) > _LONGEST:
                return f"its {stage} writes more than {_LONGEST:,} bytes for a character"
        # texts that a pattern stands for cannot be tried; those that are written out are
        by_pattern = (part.get("content") for part in objects if "String" not in part.get("pattern", {"String": ""}))
        if prod(max(1, len(content)) for content in by_pattern if isinstance(content, str)) > _LONGEST:
            return f"its {stage} writes more than {_LONGEST:,} characters for one"
    return None


def attempt(content: str) -> str | None:
    """Use a tokenizer, with every text that it replaces, and every token. Raises whatever goes wrong."""
    from tokenizers import Tokenizer

    contents = json.loads(content)
    if found := oversized_part(contents):
        return found
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = {value for stage in _STAGES for value in values(contents.get(stage)) if isinstance(value, str)}
    for text in (*(text for text in texts if len(text) <= _LONGEST), _SAMPLE):
        for special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=special).ids
            tokenizer.decode(ids)
        if len(ids) > _LONGEST * (len(text) + 1):
            return f"it makes {len(ids):,} tokens of a text of {len(text):,} characters"
    written = tokenizer.decode_batch([[index] for index in tokenizer.get_vocab().values()], skip_special_tokens=False)
    longest = max(map(len, written), default=0)
    return f"it writes {longest:,} characters for a token" if longest > 100 * _LONGEST else None


if __name__ == "__main__":
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):  # a lower bound may hold already, and macOS has none: the parent watches
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    try:
        reason = attempt(sys.stdin.buffer.read().decode())
    except BaseException as failure:
        reason = f"{type(failure).__name__} {failure}"
    sys.stdout.buffer.write(" ".join((reason or "").split())[:300].encode())
