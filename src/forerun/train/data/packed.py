"""Packed rows: documents of tokens laid one after another in rows of one length, in a folder of bounded shards.

A row is a window of tokens and the one that follows. Documents share rows, but a document that fits is never cut, and
`documents` says which positions belong together, so that attention need not cross from one into the next.

    packed.json                  window, vocabulary, shards with their checksums, what the rows were made from
    train-00000.safetensors      tokens int32, wanted bool, documents int32: each [rows, window + 1]
    held-out-00000.safetensors   the same, of prompts that are never trained on

`packing.py` writes such a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.files.write import file_digest

INDEX = "packed.json"
FORM = "forerun packed rows 1"
TRAINING, HELD_OUT = PARTS = ("train", "held-out")
NO_DOCUMENT = -1
"""The document number of positions that hold no token: the rest of a row behind its last document."""
REMEDY = "Remove the folder, and pack the data anew."
TYPES = {"tokens": torch.int32, "wanted": torch.bool, "documents": torch.int32}
"""The tensors of a shard, each [rows, window + 1]."""


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

    def positions(self) -> Tensor:
        """int64 [rows, window + 1]: each token's position in its document, from 0."""
        places = torch.arange(self.documents.shape[1]).expand_as(self.documents)
        begins = torch.ones_like(self.wanted)
        begins[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return places - torch.where(begins, places, 0).cummax(dim=1).values


class PackedRows:
    """One part of a folder of packed rows, mapped into memory.

    Attributes:
        folder: where they are.
        window: tokens of a row, less one.
        vocab_size: every token id is below it.
        made_from: what the rows depend on, by name: fingerprints of tokenizer, template and data, and options.
        num_documents, num_tokens, num_wanted: counts of this part.

    Raises:
        ConfigError: there is no such folder, or it is damaged.
    """

    def __init__(self, folder: Path, part: str = TRAINING) -> None:
        self.folder, self.part = folder, part
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
        """How many rows there are."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def held_out(self) -> PackedRows:
        """The rows of the same folder that are never trained on."""
        return PackedRows(self.folder, HELD_OUT)

    def batch(self, step: int, rows: int, seed: int) -> PackedBatch:
        """The batch of step `step` (from 0): it depends on the three numbers alone.

        All rows come once in a random order, then once more in another, for ever.

        Raises:
            ConfigError: this part has no rows.
        """
        if not len(self):
            raise ConfigError(f"{self.folder} holds no rows of the part {self.part!r}. Give more data.")
        chosen, place, left = [], step * rows, rows
        while left:
            epoch, start = divmod(place, len(self))
            order = np.random.default_rng([seed, epoch]).permutation(len(self))
            chosen.extend(order[start : start + left].tolist())
            place, left = place + min(left, len(self) - start), rows - len(chosen)
        return self.rows(chosen)

    def rows(self, numbers: list[int]) -> PackedBatch:
        """These rows, by their numbers in the folder's order."""
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
    """The tensors of a shard, mapped. Raises ConfigError where it is not as it was written."""
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
