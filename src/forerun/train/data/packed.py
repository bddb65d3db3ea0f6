"""Packed rows: documents of tokens laid one after another in rows of one length, in a folder of bounded shards.

A row is a window of tokens and the one that follows. Documents share rows, but a document that fits is never cut, and
`documents` numbers the positions of each, so that attention need not cross from one into the next.

    packed.json                  window, vocabulary, shards with their checksums, what the rows were made from
    train-00000.safetensors      tokens int32, wanted bool, documents int32: each [rows, window + 1]
    held-out-00000.safetensors   the same, of prompts that are never trained on

`pack` writes such a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from forerun.errors import ConfigError
from forerun.utils.files import digest, file_digest, leftovers, remove, whole_folder, write_bytes, write_json
from forerun.utils.json_file import Fields

INDEX = "packed.json"
FORM = "forerun packed rows 1"
TRAINING, HELD_OUT = PARTS = ("train", "held-out")
NO_DOCUMENT = -1
"""The document number of positions that hold no token, behind the last document of a row."""
REMEDY = "Remove the folder, and pack the data anew."
TYPES = {"tokens": torch.int32, "wanted": torch.bool, "documents": torch.int32}
"""The tensors of a shard, each [rows, window + 1]."""
SHARD_BYTES = 16 << 20
OPEN_ROWS = 256
"""Rows that are being filled; each document goes into the fullest one that it fits into."""
_BYTES_PER_TOKEN = 9
_COUNTED_ROWS = 256
"""Rows whose tokens are counted at a time."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Some rows: three tensors [rows, window + 1] on the CPU.

    Attributes:
        tokens: int64 token ids, 0 where there is none.
        wanted: bool: the prediction of this very token, from those before it in its document, is to be trained. Never
            the first token of a document.
        documents: int32: counts the documents of a row from 0; `NO_DOCUMENT` behind the last of them.
    """

    tokens: Tensor
    wanted: Tensor
    documents: Tensor


class PackedShard:
    """One part of a folder of packed rows, mapped into memory.

    Attributes:
        folder: where they are.
        window: tokens of a row, less one.
        vocab_size: every token id is below it.
        made_from: the inputs that the rows depend on, by name: fingerprints of tokenizer, template and data;
            options.
        num_documents, num_tokens, num_wanted: counts of this part.

    Raises:
        ConfigError: there is no such folder, or it is damaged.
    """

    def __init__(self, folder: Path, part: str = TRAINING) -> None:
        self.folder = folder
        self.part = part
        index = Fields.read(folder / INDEX, ConfigError, remedy=REMEDY)
        if index.string("form", "") != FORM:
            raise ConfigError(f"{folder / INDEX} is not of the form {FORM!r}. {REMEDY}")
        self.window = index.integer("window", low=1)
        self.vocab_size = index.integer("vocab_size", low=1)
        self.made_from: Mapping[str, Any] = index.fields("made_from").values
        counts = index.fields(part)
        self.num_documents = counts.integer("documents", low=0)
        self.num_tokens = counts.integer("tokens", low=0)
        self.num_wanted = counts.integer("wanted", low=0)
        checksums = counts.fields("shards").values
        self._shards = [_read_shard(folder / name, checksums[name], self.window + 1) for name in sorted(checksums)]
        self._ends = np.cumsum([len(shard["tokens"]) for shard in self._shards], dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def held_out(self) -> PackedShard:
        """Open the rows of the same folder that are never trained on."""
        return PackedShard(self.folder, HELD_OUT)

    def batch(self, step: int, rows: int, seed: int) -> PackedBatch:
        """Return the batch of step `step` (from 0), which depends on the three numbers alone.

        All rows come once in a random order, then once more in another, for ever.

        Raises:
            ConfigError: this part has no rows.
        """
        if not len(self):
            raise ConfigError(f"{self.folder} holds no rows of the part {self.part!r}. Give more data.")
        chosen = []
        position = step * rows
        left = rows
        while left:
            epoch, start = divmod(position, len(self))
            order = np.random.default_rng([seed, epoch]).permutation(len(self))
            chosen.extend(order[start : start + left].tolist())
            position = position + min(left, len(self) - start)
            left = rows - len(chosen)
        return self.rows(chosen)

    def rows(self, numbers: list[int]) -> PackedBatch:
        """Read these rows, by their numbers in the folder's order."""
        shards = np.searchsorted(self._ends, numbers, side="right")
        starts = [0, *self._ends.tolist()]
        found = {
            name: torch.stack(
                [self._shards[s][name][number - starts[s]] for s, number in zip(shards, numbers, strict=True)]
            )
            for name in TYPES
        }
        return PackedBatch(found["tokens"].long(), found["wanted"], found["documents"])


def _read_shard(path: Path, checksum: object, width: int) -> dict[str, Tensor]:
    """Map the tensors of a shard into memory. Raises ConfigError where it is not as it was written."""
    try:
        with path.open("rb") as file:
            same = file_digest(file) == checksum
        shard = load_file(path) if same else {}
    except (OSError, SafetensorError) as failure:
        raise ConfigError(f"{path} cannot be read: {failure}. {REMEDY}") from None
    if {name: tensor.dtype for name, tensor in shard.items()} != TYPES or any(
        tensor.shape != (len(shard["tokens"]), width) for tensor in shard.values()
    ):
        raise ConfigError(f"{path} is damaged: it is not as it was written. {REMEDY}")
    return shard


@dataclass(frozen=True, slots=True)
class PackedDocument:
    """Tokens that belong together.

    Attributes:
        tokens: their ids.
        wanted: for each, whether its prediction is trained.
        held_out: it goes to the part that is never trained on.
    """

    tokens: Sequence[int]
    wanted: Sequence[bool]
    held_out: bool = False


@dataclass(slots=True)
class _OpenRow:
    """A row that is being filled."""

    tokens: list[int] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, document: PackedDocument) -> None:
        self.tokens += document.tokens
        # the first token has none before it to be predicted from
        self.wanted += [False, *document.wanted[1:]]
        self.documents += [self.count] * len(document.tokens)
        self.count += 1


def pack(
    documents: Iterable[PackedDocument], folder: Path, *, window: int, vocab_size: int, made_from: Mapping[str, Any]
) -> PackedShard:
    """Write documents into a folder of packed rows, which replaces a former one when it is complete.

    A document longer than a row is cut from its end, so that the answer to a long prompt keeps the text just before
    it; parts without wanted tokens are left out. Memory holds one shard and the open rows.

    Args:
        window: tokens of a row, less one.
        made_from: the inputs that the rows depend on, as JSON values.

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
    return PackedShard(folder)


def _cut(document: PackedDocument, width: int) -> Iterator[PackedDocument]:
    """Cut into parts of at most `width` tokens with wanted ones."""
    first = len(document.tokens) % width or width
    for start, end in zip(
        range(first - width, len(document.tokens), width),
        range(first, len(document.tokens) + 1, width),
        strict=True,
    ):
        wanted = document.wanted[max(0, start) : end]
        if any(wanted[1:]):
            yield PackedDocument(document.tokens[max(0, start) : end], wanted, document.held_out)


class _Writer:
    """Writes the rows of one part into shards."""

    def __init__(self, folder: Path, part: str, width: int, vocab_size: int) -> None:
        self._folder = folder
        self._part = part
        self._width = width
        self._vocab_size = vocab_size
        self._open: list[_OpenRow] = []
        self._full: list[_OpenRow] = []
        self._shards: dict[str, str] = {}
        self._rows_per_shard = max(1, SHARD_BYTES // (_BYTES_PER_TOKEN * width))
        self._counts = {"documents": 0, "tokens": 0, "wanted": 0, "rows": 0}

    def add(self, document: PackedDocument) -> None:
        """Add a document to the fullest open row that it fits into."""
        if min(document.tokens) < 0 or max(document.tokens) >= self._vocab_size:
            raise ConfigError(
                f"The data holds a token id of {max(document.tokens)}, but the target's vocabulary ends before "
                f"{self._vocab_size:,}. Give data of the same tokenizer."
            )
        fitting = [row for row in self._open if len(row.tokens) + len(document.tokens) <= self._width]
        row = max(fitting, key=lambda each: len(each.tokens), default=None)
        if row is None:
            if len(self._open) == OPEN_ROWS:
                self._close(max(self._open, key=lambda each: len(each.tokens)))
            row = _OpenRow()
            self._open.append(row)
        row.add(document)
        self._counts["documents"] += 1
        if len(row.tokens) >= self._width - 1:
            self._close(row)

    def finish(self) -> dict[str, Any]:
        """Write the remaining rows. Returns counts, and the checksums of the shards by name."""
        for row in list(self._open):
            self._close(row)
        self._write()
        return {**self._counts, "shards": self._shards}

    def _close(self, row: _OpenRow) -> None:
        self._open = [each for each in self._open if each is not row]
        self._full.append(row)
        if len(self._full) == self._rows_per_shard:
            self._write()

    def _write(self) -> None:
        if not self._full:
            return
        shape = (len(self._full), self._width)
        tokens = np.zeros(shape, np.int32)
        wanted = np.zeros(shape, np.bool_)
        documents = np.full(shape, NO_DOCUMENT, np.int32)
        for index, row in enumerate(self._full):
            size = len(row.tokens)
            tokens[index, :size] = row.tokens
            wanted[index, :size] = row.wanted
            documents[index, :size] = row.documents
        arrays = {"tokens": tokens, "wanted": wanted, "documents": documents}
        content = save({name: torch.from_numpy(array) for name, array in arrays.items()})
        name = f"{self._part}-{len(self._shards):05}.safetensors"
        write_bytes(self._folder / name, content, error=ConfigError)
        self._shards[name] = digest(content)
        self._counts["rows"] += shape[0]
        self._counts["tokens"] += int((documents != NO_DOCUMENT).sum())
        self._counts["wanted"] += int(wanted.sum())
        self._full = []


def token_counts(rows: PackedShard, size: int) -> tuple[Tensor, Tensor]:
    """Count the tokens whose prediction is trained, and all, each of the first `size` ids, [size] int64."""
    wanted = torch.zeros(size, dtype=torch.int64)
    held = torch.zeros(size, dtype=torch.int64)
    for first in range(0, len(rows), _COUNTED_ROWS):
        batch = rows.rows(list(range(first, min(first + _COUNTED_ROWS, len(rows)))))
        wanted += torch.bincount(batch.tokens[batch.wanted], minlength=size)[:size]
        held += torch.bincount(batch.tokens[batch.documents != NO_DOCUMENT], minlength=size)[:size]
    return wanted, held


def frequent_tokens(counts: tuple[Tensor, Tensor], count: int, always: Iterable[int]) -> Tensor:
    """Select the `count` tokens of a draft's vocabulary, int64 and rising: `always`, those that are trained most often,
    then those that rows hold, then the lowest ids, which byte-pair vocabularies give to frequent tokens.

    counts: as `token_counts` gives them.

    Raises:
        ConfigError: there are fewer in the vocabulary.
    """
    wanted, held = (each.numpy() for each in counts)
    if count > len(wanted):
        raise ConfigError(f"output_tokens is {count:,}, but the vocabulary has {len(wanted):,} tokens. Give fewer.")
    chosen = np.isin(np.arange(len(wanted)), [*always])
    return torch.from_numpy(np.sort(np.lexsort((-held, -wanted, ~chosen))[:count]))
