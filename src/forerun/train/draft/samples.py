"""The distillation set: shards of packed rows with the target's soft labels, on disk.

Shards are written whole or not at all and depend on their number alone, so that a killed run goes on where it stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.errors import ConfigError
from forerun.models import LanguageModel
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.train.accelerator import columns_of, id_type
from forerun.train.checkpoint import METRICS, TARGET, LoopState, pin, pinned, pinned_weights
from forerun.train.data.packed import PackedBatch, PackedShard
from forerun.train.draft.parallel import check_family
from forerun.train.evaluate import TopProbs
from forerun.train.heads.target_states import forwards
from forerun.train.loop import Batch
from forerun.utils.files import check_seal, digest, sealed_file

_PARTS = ("ids", "probabilities", "documents", "wanted", "tokens")
_REMEDY = "Remove this shard's files, and --resume of the run that wrote them computes it again."
_NO_COLUMN = 0xFFFF
"""A token in 16 bits that the draft does not propose."""
MOST_COLUMNS = _NO_COLUMN
"""Tokens that a draft can propose with labels of 16 bits."""
_SHARD_ROWS = "shard_rows"
"""Key of the rows of a shard, which differ by device; a run keeps its own."""
SHARD_ROWS = {"cpu": 16, "cuda": 64, "mps": 16}
"""Rows of a shard: what a killed run loses at most is a shard, two minutes of a target of 1.5 B parameters."""
_LOGIT_ROWS = 32
"""Rows of logits whose sum and most probable tokens are found together, which a processor's cache holds."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Packed rows with the target's distributions.

    Attributes:
        tokens: [B, T + 1], uint16 or uint32.
        probs: of wanted tokens among 1 to T, [B, T, k]; the others' are 0. Its ids are columns of the draft's
            vocabulary in uint16, `_NO_COLUMN` for a token outside it, or tokens where there is no such vocabulary.
        documents, wanted: int32 and bool, [B, T + 1], as `PackedBatch` has them: attention does not cross from one
            document into the next, and the prediction of the wanted tokens is what is learnt.
    """

    tokens: np.ndarray
    probs: TopProbs
    documents: np.ndarray
    wanted: np.ndarray


@dataclass(frozen=True, slots=True)
class Labels:
    """The target's soft labels of packed rows.

    Attributes:
        target: what the draft is for.
        rows: whose wanted tokens are learnt.
        folder: of the shards.
        top: tokens of a distribution that are kept.
        vocabulary: int64, the tokens that the draft can propose, of which ids are columns; None: ids are tokens.
        size: tokens that the draft has logits of, the first ones; None: all of the target's.
        name: of the shards; those of other rows have another.
    """

    target: LanguageModel
    rows: PackedShard
    folder: Path
    top: int
    vocabulary: Tensor | None = None
    name: str = "shard"
    size: int | None = None
    shard_rows: int = field(init=False)
    _columns: NDArray[np.uint16] | None = field(init=False)

    def __post_init__(self) -> None:
        columns = None
        if self.vocabulary is not None:
            if len(self.vocabulary) > MOST_COLUMNS:
                raise ConfigError(
                    f"output_tokens is {len(self.vocabulary):,}, but at most {MOST_COLUMNS:,} can be learnt. Give "
                    "fewer, or leave it out."
                )
            # -1 becomes _NO_COLUMN
            columns = columns_of(self.vocabulary, self.target.vocab_size).numpy().astype(np.uint16)
        object.__setattr__(self, "_columns", columns)
        usual = SHARD_ROWS[self.target.device.type]
        object.__setattr__(self, "shard_rows", pinned(self.folder).integer(_SHARD_ROWS, usual, low=1))

    def __len__(self) -> int:
        """Return the number of shards of all rows."""
        return self.shards_of(len(self.rows))

    def shards_of(self, rows: int) -> int:
        """Return the number of shards of the first rows."""
        return math.ceil(rows / self.shard_rows)

    def pin(self) -> None:
        """Write into the folder what its shards depend on, or compare that with what is there.

        Raises:
            ConfigError: they are of other rows, of another target, or of another vocabulary.
        """
        refusal = f"{self.folder} holds labels of another target, whose weights are not these."
        target = pinned_weights(self.folder, TARGET, target_fingerprint(self.target), refusal)
        vocabulary = None if self.vocabulary is None else digest(self.vocabulary.numpy().tobytes())
        made_from = {"packed": dict(self.rows.made_from), "top": self.top, "vocabulary": vocabulary}
        pin(self.folder, made_from | {TARGET: target, _SHARD_ROWS: self.shard_rows}, later=[_SHARD_ROWS])

    def num_complete(self, shards: int) -> int:
        """Count those of the first shards that are there."""
        return sum(self.path(number).exists() for number in range(shards))

    def missing_bytes(self, shards: int) -> int:
        """Return about how many bytes the first shards take that the folder lacks."""
        missing = shards - self.num_complete(shards)
        width = self.rows.window + 1
        ids = 4 if self._columns is None else 2
        rows = min(missing * self.shard_rows, len(self.rows))
        return rows * width * (self.top * (ids + 2) + 9)

    def path(self, number: int, part: str = "tokens") -> Path:
        """Return the file of one part of a shard. A shard is complete once its tokens exist."""
        return self.folder / f"{self.name}-{number:04d}.{part}.npy"

    def write(self, show: Callable[[int, int], None], shards: int, end: float = math.inf) -> int:
        """Compute the shards that the folder lacks; return how many of the first are there.

        Args:
            show: is told how many are done and how many tokens that took, after each.
            end: when no more are begun but the first, on the clock of time.monotonic.
        """
        tokens = 0
        for number in range(shards):
            if not self.path(number).exists():
                if number and time.monotonic() >= end:
                    return number
                size = self.shard_rows
                began = time.monotonic()
                batch = self.rows.rows(list(range(number * size, min((number + 1) * size, len(self.rows)))))
                self._write(number, self.of(batch))
                found = int((batch.documents >= 0).sum())
                tokens += found
                entry = {"shard": self.path(number).name, "tokens": found, "seconds": time.monotonic() - began}
                with (self.folder / METRICS).open("a") as metrics:
                    metrics.write(json.dumps(entry) + "\n")
            show(number + 1, tokens)
        return shards

    def computing(self) -> LoopState:
        """Return what computing all that is in the folder took, as a stage of the run."""
        path = self.folder / METRICS
        entries = []
        for line in path.read_text().splitlines() if path.exists() else []:
            with suppress(ValueError):  # cut short by a kill
                entries.append(json.loads(line))
        tokens = sum(int(entry["tokens"]) for entry in entries)
        return LoopState(tokens=tokens, seconds=sum(float(entry["seconds"]) for entry in entries))

    def of(self, batch: PackedBatch) -> Shard:
        """Compute the labels of some rows, with the target's own weights and kernels."""
        shape = len(batch.tokens), batch.tokens.shape[1] - 1, self.top
        ids = np.zeros(shape, id_type(self.target.vocab_size) if self._columns is None else np.uint16)
        probabilities = np.zeros(shape, np.float16)
        spans = [*_spans(batch)]
        documents = [batch.tokens[row, start:end].tolist() for row, start, _, end in spans]
        for here, found in forwards(self.target, documents, [end - first for _, _, first, end in spans]):
            offset = 0
            for row, _, first, end in spans[here]:
                wanted = batch.wanted[row, first + 1 : end + 1].nonzero()[:, 0]
                top, likeliest = _top_probs(found.logits, wanted + offset, self.top)
                places = first + wanted.numpy()
                ids[row, places] = likeliest if self._columns is None else self._columns[likeliest]
                probabilities[row, places] = top
                offset += end - first
            del found  # its logits go before the next ones come
        tokens = batch.tokens.numpy().astype(id_type(self.target.vocab_size))
        return Shard(
            tokens, TopProbs(ids, probabilities), batch.documents.numpy().astype(np.int32), batch.wanted.numpy()
        )

    def _write(self, number: int, shard: Shard) -> None:
        """Write one shard, its tokens last."""
        arrays = shard.probs.ids, shard.probs.probabilities, shard.documents, shard.wanted, shard.tokens
        for part, array in zip(_PARTS, arrays, strict=True):
            with sealed_file(self.path(number, part), ConfigError) as file:
                np.save(file, array, allow_pickle=False)

    def read(self, number: int) -> Shard:
        """Map one shard into memory. Raises ConfigError where it is damaged."""
        arrays = []
        for path in (self.path(number, part) for part in _PARTS):
            check_seal(path, ConfigError, _REMEDY)
            try:
                arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError, EOFError) as failure:
                raise ConfigError(f"{path} cannot be read: {failure}. {_REMEDY}") from None
        ids, probabilities, documents, wanted, tokens = arrays
        return Shard(tokens, TopProbs(ids, probabilities), documents, wanted)


def _spans(batch: PackedBatch) -> Iterator[tuple[int, int, int, int]]:
    """Yield row, start, first and end of each document with wanted tokens: tokens start to end are fed, and predictions
    are learnt at some of first to end."""
    for row, documents in enumerate(batch.documents.tolist()):
        starts = [place for place in range(len(documents)) if place == 0 or documents[place] != documents[place - 1]]
        for start, stop in pairwise([*starts, len(documents)]):
            wanted = batch.wanted[row, start:stop].nonzero()[:, 0].tolist()
            if wanted:
                yield row, start, start + wanted[0] - 1, start + wanted[-1]


def _top_probs(logits: Tensor, rows: Tensor, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities float16 and ids int64 of the most probable tokens of some rows of logits, [N, top]."""
    probabilities = []
    ids = []
    for part in torch.split(rows.to(logits.device), _LOGIT_ROWS):
        some = logits[part].float()
        values, found = some.topk(top)
        probabilities.append((values - some.logsumexp(-1, keepdim=True)).exp().half().cpu())
        ids.append(found.cpu())
    return torch.cat(probabilities).numpy(), torch.cat(ids).numpy()


class ShardBatches:
    """Batches of about `tokens_per_step` tokens from the first shards, in a shuffled order, for ever."""

    def __init__(self, labels: Labels, shards: int, tokens_per_step: int, seed: int) -> None:
        self.shards = [labels.read(number) for number in range(shards)]
        self.rows = [(index, row) for index, shard in enumerate(self.shards) for row in range(len(shard.tokens))]
        self.per_step = min(len(self.rows), max(1, tokens_per_step // labels.rows.window))
        self.seed = seed
        self._outside = labels.size or labels.target.vocab_size if labels.vocabulary is None else _NO_COLUMN

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of documents, of tokens, and of those that are wanted."""
        documents = sum(int((shard.documents.max(1) + 1).sum()) for shard in self.shards)
        tokens = sum(int((shard.documents >= 0).sum()) for shard in self.shards)
        return documents, tokens, sum(int(shard.wanted.sum()) for shard in self.shards)

    def batch(self, step: int) -> Batch:
        """Return the batch of step `step`, as `rows_of` makes it of the next rows of this epoch's order."""
        epoch, position = divmod(step, len(self.rows) // self.per_step)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        chosen = order[position * self.per_step : (position + 1) * self.per_step]
        return self.rows_of([self.rows[int(number)] for number in chosen], step * self.per_step)

    def rows_of(self, chosen: Sequence[tuple[int, int]], first: int = 0) -> Batch:
        """Return rows, by their shards and places in them: tokens int32 [B, T + 1], ids int32 (columns of the draft's
        vocabulary, -1 for a token outside it) and probabilities float16 [B, T, k], documents and wanted as `Shard` has
        them, and numbers int64 [B] from `first` on that seed what is drawn for each row."""

        def stacked(part: Callable[[Shard], np.ndarray], kind: type[np.generic]) -> Tensor:
            return torch.from_numpy(np.stack([part(self.shards[index])[row] for index, row in chosen]).astype(kind))

        ids = stacked(lambda shard: shard.probs.ids, np.int32)
        ids[ids >= self._outside] = -1
        return (
            stacked(lambda shard: shard.tokens, np.int32),
            ids,
            stacked(lambda shard: shard.probs.probabilities, np.float16),
            stacked(lambda shard: shard.documents, np.int32),
            stacked(lambda shard: shard.wanted, np.bool_),
            first + torch.arange(len(chosen)),
        )


def output_tokens_of(model: PreTrainedModel) -> Tensor | None:
    """Return the tokens, int64, that a draft proposes; None for all."""
    ids: list[int] | None = vars(model.config).get(OUTPUT_TOKENS)
    return None if ids is None else torch.tensor(ids)


def restrict(model: PreTrainedModel, tokens: Tensor) -> None:
    """Set in the model's configuration the tokens that it proposes, int64 and rising.

    Raises:
        ConfigError: it is of a family whose output layer is computed whole.
    """
    check_family(model, "A reduced output vocabulary is", "output_tokens")
    setattr(model.config, OUTPUT_TOKENS, tokens.tolist())


@contextmanager
def mask_unproposed(model: PreTrainedModel) -> Iterator[None]:
    """Set the logits of tokens that the model does not propose to -inf inside this block, as inference does."""
    tokens = output_tokens_of(model)
    if tokens is None:
        yield
        return
    missing = columns_of(tokens, model.config.vocab_size) < 0

    def mask(module: nn.Module, _: Any, logits: Tensor) -> Tensor:
        return logits.masked_fill(missing.to(logits.device), -torch.inf)

    handle = model.get_output_embeddings().register_forward_hook(mask)
    try:
        yield
    finally:
        handle.remove()
