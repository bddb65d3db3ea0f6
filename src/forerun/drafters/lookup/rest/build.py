"""Building an index from documents, and adding documents to one.

An index that is appended to is sorted anew: the result is, byte for byte, that of building from both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.config import INDEX_DEPTH
from forerun.drafters.lookup.rest.index import Index
from forerun.drafters.lookup.rest.index_file import (
    IndexHeader,
    check_sortable,
    read_index_header,
    sort_suffixes,
    token_bytes_for,
    write_file,
)
from forerun.errors import ConfigError
from forerun.utils.files import locked, refuse_to_overwrite
from forerun.utils.text_files import TextDocument

_BATCH = 64

Tick = Callable[[float], None]
Ids = Sequence[int] | NDArray[Any]


def tokenise(documents: Iterable[TextDocument], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the token ids of each document, without special tokens."""
    source = iter(documents)
    while batch := list(islice(source, _BATCH)):
        texts = [document.text for document in batch]
        yield from tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def build_index(
    path: Path,
    documents: Iterable[Ids],
    vocab_size: int,
    *,
    tokenizer: str = "",
    fingerprint: str = "",
    depth: int = INDEX_DEPTH,
    compact: bool = False,
    force: bool = False,
    tick: Tick = lambda share: None,
) -> IndexHeader:
    """Write an index of token ids.

    Args:
        path: the file.
        documents: token ids of each; empty ones are left out.
        vocab_size: every id is below it; decides whether a token takes two bytes or four.
        tokenizer, fingerprint: name and `fingerprint` of the tokenizer.
        depth: tokens by which suffixes are sorted: what is matched and what follows may not be longer together.
        compact: leave the suffix array out of the file, two thirds of it; it is sorted at each opening instead.
        force: a file that is there is replaced, when all is done.
        tick: receives the share of the sorting that is done.

    Raises:
        ConfigError: the file exists; no tokens, an id out of range, or the file cannot be written.
    """
    if not force:
        refuse_to_overwrite(path, ConfigError)
    width = token_bytes_for(vocab_size)
    tokens, count = _joined(documents, width, vocab_size)
    header = IndexHeader(len(tokens), count, width, depth, vocab_size, tokenizer, fingerprint, "", compact)
    suffixes = _sorted(header, tokens, tick)
    with locked(path, ConfigError, wait=True):
        if not force:
            refuse_to_overwrite(path, ConfigError)
        return write_file(path, header, tokens, suffixes)


def append_index(
    path: Path, documents: Iterable[Ids], *, fingerprint: str = "", tick: Tick = lambda share: None
) -> IndexHeader:
    """Add documents to an index; readers that have it open keep the old one.

    Several at once wait for each other.

    Args:
        fingerprint: of the tokenizer that made the ids.

    Raises:
        ConfigError: another tokenizer; else as `build_index`, and as `Index`.
    """
    read_index_header(path)
    with locked(path, ConfigError, wait=True):
        index = Index(path)
        old = index.header
        if fingerprint != old.fingerprint:
            raise ConfigError(
                f"The index {path} was made with another tokenizer ({old.tokenizer or 'unnamed'}): its fingerprint is "
                f"{old.fingerprint or 'empty'}, not {fingerprint or 'empty'}. Append with that one, or build a new "
                "index."
            )
        tokens, count = _joined(documents, old.token_bytes, old.vocab_size)
        tokens = np.concatenate([index.tokens.astype(tokens.dtype), tokens])
        header = replace(old, num_documents=old.num_documents + count, num_tokens=len(tokens))
        return write_file(path, header, tokens, _sorted(header, tokens, tick))


def _sorted(header: IndexHeader, tokens: NDArray[Any], tick: Tick) -> NDArray[np.uint32] | None:
    """Return the suffix array; None if the file is compact."""
    if header.compact:
        check_sortable(len(tokens), header.depth)
        return None
    return sort_suffixes(tokens, header.depth, tick)


def _joined(documents: Iterable[Ids], width: int, vocab_size: int) -> tuple[NDArray[Any], int]:
    """Join all documents with a marker after each, and return them with their number."""
    parts = []
    marker = (1 << 8 * width) - 1
    for ids in documents:
        part = np.asarray(ids, dtype=np.int64)
        if len(part) == 0:
            continue
        if part.min() < 0 or part.max() >= vocab_size:
            raise ConfigError(
                f"A document holds token {part.min() if part.min() < 0 else part.max()}, outside the vocabulary of "
                f"{vocab_size:,}. Give the size of the tokenizer's vocabulary, added tokens included."
            )
        parts.append(np.append(part, marker).astype(f"<u{width}"))
    if not parts:
        raise ConfigError("Nothing to index: the sources hold no text. Give sources that do.")
    return np.concatenate(parts), len(parts)
