"""Packing: documents of any lengths into rows of one length, and rows into shards on disk, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from forerun.errors import ConfigError
from forerun.files.write import digest, leftovers, remove, whole_folder, write_bytes, write_json
from forerun.train.data.packed import FORM, HELD_OUT, INDEX, NO_DOCUMENT, PARTS, TRAINING, PackedRows

SHARD_BYTES = 16 << 20
OPEN_ROWS = 256
"""Rows that wait for documents which fill them; each document goes into the fullest one that has room for it."""
_BYTES_PER_TOKEN = 9


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens that belong together.

    Attributes:
        tokens: their ids.
        wanted: of each, whether its prediction is to be trained.
        held_out: it goes to the part that is never trained on.
    """

    tokens: Sequence[int]
    wanted: Sequence[bool]
    held_out: bool = False


@dataclass(slots=True)
class _Row:
    """A row that is being filled."""

    tokens: list[int] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, document: Document) -> None:
        self.tokens += document.tokens
        # nothing stands before the first token, by which it could be predicted
        self.wanted += [False, *document.wanted[1:]]
        self.documents += [self.count] * len(document.tokens)
        self.count += 1


def pack(
    documents: Iterable[Document], folder: Path, *, window: int, vocab_size: int, made_from: Mapping[str, Any]
) -> PackedRows:
    """Write documents into a folder of packed rows, which takes the place of a former one when it is whole.

    A document longer than a row is cut from its end, so that what answers a long prompt keeps what stands just before
    it; parts of which nothing is wanted are left out. Memory holds one shard and the open rows.

    Args:
        window: tokens of a row, less one.
        made_from: what the rows depend on, as JSON values.

    Raises:
        ConfigError: nothing is wanted of any document, an id lies outside the vocabulary, or the disk is full.
    """
    for left in leftovers(folder):
        remove(left)
    with whole_folder(folder, ConfigError) as fresh:
        writers = {part: _Writer(fresh, part, window + 1, vocab_size) for part in PARTS}
        for document in documents:
            for part in _cut(document, window + 1):
                writers[HELD_OUT if part.held_out else TRAINING].add(part)
        counts = {part: writer.finish() for part, writer in writers.items()}
        if not counts[TRAINING]["wanted"]:
            raise ConfigError(
                "The data holds no token to be trained on: no answer, or no text of two tokens or more. "
                "Give other or more data."
            )
        index = {"form": FORM, "window": window, "vocab_size": vocab_size, "made_from": dict(made_from), **counts}
        write_json(fresh / INDEX, index, error=ConfigError)
    return PackedRows(folder)


def _cut(document: Document, width: int) -> Iterator[Document]:
    """Parts of at most `width` tokens, of which something is wanted."""
    first = len(document.tokens) % width or width
    for start, end in zip(
        range(first - width, len(document.tokens), width),
        range(first, len(document.tokens) + 1, width),
        strict=True,
    ):
        wanted = document.wanted[max(0, start) : end]
        if any(wanted[1:]):
            yield Document(document.tokens[max(0, start) : end], wanted, document.held_out)


class _Writer:
    """The rows of one part, and its shards."""

    def __init__(self, folder: Path, part: str, width: int, vocab_size: int) -> None:
        self._folder, self._part, self._width, self._vocab_size = folder, part, width, vocab_size
        self._open: list[_Row] = []
        self._full: list[_Row] = []
        self._shards: dict[str, str] = {}
        self._rows_per_shard = max(1, SHARD_BYTES // (_BYTES_PER_TOKEN * width))
        self._counts = {"documents": 0, "tokens": 0, "wanted": 0, "rows": 0}

    def add(self, document: Document) -> None:
        """Into the fullest open row that has room."""
        if min(document.tokens) < 0 or max(document.tokens) >= self._vocab_size:
            raise ConfigError(
                f"The data holds a token id of {max(document.tokens)}, but the target's vocabulary ends before "
                f"{self._vocab_size:,}. Give data of the same tokenizer."
            )
        room = [row for row in self._open if len(row.tokens) + len(document.tokens) <= self._width]
        row = max(room, key=lambda each: len(each.tokens), default=None)
        if row is None:
            if len(self._open) == OPEN_ROWS:
                self._close(max(self._open, key=lambda each: len(each.tokens)))
            row = _Row()
            self._open.append(row)
        row.add(document)
        self._counts["documents"] += 1
        if len(row.tokens) >= self._width - 1:
            self._close(row)

    def finish(self) -> dict[str, Any]:
        """Write what is left. Returns counts, and the checksums of the shards by name."""
        for row in list(self._open):
            self._close(row)
        self._write()
        return {**self._counts, "shards": self._shards}

    def _close(self, row: _Row) -> None:
        self._open = [each for each in self._open if each is not row]
        self._full.append(row)
        if len(self._full) == self._rows_per_shard:
            self._write()

    def _write(self) -> None:
        if not self._full:
            return
        shape = (len(self._full), self._width)
        tokens, wanted = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
        documents = np.full(shape, NO_DOCUMENT, np.int32)
        for place, row in enumerate(self._full):
            size = len(row.tokens)
            tokens[place, :size], wanted[place, :size], documents[place, :size] = row.tokens, row.wanted, row.documents
        arrays = {"tokens": tokens, "wanted": wanted, "documents": documents}
        content = save({name: torch.from_numpy(array) for name, array in arrays.items()})
        name = f"{self._part}-{len(self._shards):05}.safetensors"
        write_bytes(self._folder / name, content, error=ConfigError)
        self._shards[name] = digest(content)
        self._counts["rows"] += shape[0]
        self._counts["tokens"] += int((documents != NO_DOCUMENT).sum())
        self._counts["wanted"] += int(wanted.sum())
        self._full = []
