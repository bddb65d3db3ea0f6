"""The distillation set: shards of packed rows with the target's soft labels, on disk.

Shards are written whole or not at all and depend on their number alone, so that a killed run goes on where it stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.errors import ConfigError
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.train.accelerator import columns_of, dtype_name, model_vocabulary, stored_ids
from forerun.train.checkpoint import DTYPE, pin
from forerun.train.data.packed import PackedShard
from forerun.train.defaults import DraftTraining
from forerun.train.draft.parallel import check_family
from forerun.train.evaluate import TopProbs, top_probs_of
from forerun.train.loop import Batch
from forerun.utils.files import check_seal, sealed_file

_PARTS = ("ids", "probabilities", "documents", "wanted", "tokens")
_REMEDY = "Remove this shard's files, and --resume of the run that wrote them draws it again."


@dataclass(frozen=True, slots=True)
class Shard:
    """Packed rows with the target's distributions.

    Attributes:
        tokens: [B, T + 1], uint16 or uint32.
        probs: of tokens 1 to T, [B, T, k].
        documents, wanted: int32 and bool, [B, T + 1], as `PackedBatch` has them: attention does not cross from one
            document into the next, and the prediction of the wanted tokens is what is learnt.
    """

    tokens: np.ndarray
    probs: TopProbs
    documents: np.ndarray
    wanted: np.ndarray


def shard_path(folder: Path, number: int, part: str = "tokens") -> Path:
    """Return the file of one part of a shard. A shard is complete once its tokens exist."""
    return folder / f"shard-{number:04d}.{part}.npy"


def write_shard(folder: Path, number: int, shard: Shard) -> None:
    """Write one shard, its tokens last."""
    arrays = shard.probs.ids, shard.probs.probabilities, shard.documents, shard.wanted, shard.tokens
    for part, array in zip(_PARTS, arrays, strict=True):
        with sealed_file(shard_path(folder, number, part), ConfigError) as file:
            np.save(file, array, allow_pickle=False)


def read_shard(folder: Path, number: int) -> Shard:
    """Map one shard into memory. Raises ConfigError where it is damaged."""
    arrays = []
    for path in (shard_path(folder, number, part) for part in _PARTS):
        check_seal(path, ConfigError, _REMEDY)
        try:
            arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as failure:
            raise ConfigError(f"{path} cannot be read: {failure}. {_REMEDY}") from None
    ids, probabilities, documents, wanted, tokens = arrays
    return Shard(tokens, TopProbs(ids, probabilities), documents, wanted)


def num_shards(rows: PackedShard, options: DraftTraining) -> int:
    """Return the number of shards of all rows."""
    return math.ceil(len(rows) / options.text_batch)


def make_shard(target: PreTrainedModel, rows: PackedShard, number: int, options: DraftTraining) -> Shard:
    """Compute the soft labels of the rows of shard `number`."""
    first = number * options.text_batch
    batch = rows.rows(list(range(first, min(first + options.text_batch, len(rows)))))
    tokens = batch.tokens.to(target.device)
    documents = batch.documents.to(target.device)
    probs = top_probs_of(target, tokens, options.top, documents)
    ids = stored_ids(tokens, model_vocabulary(target))
    return Shard(ids, probs, batch.documents.numpy().astype(np.int32), batch.wanted.numpy())


def sample_all(
    target: PreTrainedModel,
    rows: PackedShard,
    folder: Path,
    options: DraftTraining,
    done: Callable[[int], None],
    shards: int,
    end: float = math.inf,
) -> int:
    """Write the shards that `folder` lacks, several at once on a CPU; return how many of the first are there.

    Args:
        done: is told how many are done, after each.
        end: when no more are begun but the first, on the clock of time.monotonic.
    """
    labels = {"text_batch": options.text_batch, "top": options.top, DTYPE: dtype_name(target.dtype)}
    pin(folder, {"packed": dict(rows.made_from), **labels})
    workers = (options.threads or torch.get_num_threads()) if target.device.type == "cpu" else 1

    def work(number: int) -> None:
        if workers > 1:
            torch.set_num_threads(1)
        if not shard_path(folder, number).exists() and (number == 0 or time.monotonic() < end):
            write_shard(folder, number, make_shard(target, rows, number, options))

    with ThreadPoolExecutor(workers) as pool:
        try:
            for count, future in enumerate(as_completed([pool.submit(work, number) for number in range(shards)]), 1):
                future.result()
                done(count)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # those that began are finished and kept
            raise
    return next((number for number in range(shards) if not shard_path(folder, number).exists()), shards)


class ShardBatches:
    """Batches of about `tokens_per_step` tokens from all shards in a shuffled order, for ever."""

    def __init__(self, folder: Path, count: int, tokens_per_step: int, seed: int) -> None:
        self.shards = [read_shard(folder, number) for number in range(count)]
        self.seed = seed
        self._chunks: list[tuple[int, int, int]] = []
        for index, shard in enumerate(self.shards):
            rows, width = shard.tokens.shape
            size = min(rows, max(1, tokens_per_step // (width - 1)))
            self._chunks.extend((index, start, start + size) for start in range(0, rows - size + 1, size))

    def batch(self, step: int) -> Batch:
        """Return the batch of step `step`: tokens int32 [B, T + 1], ids int32 and probabilities float16 [B, T, k],
        documents and wanted as `Shard` has them, and numbers int64 [B] that seed what is drawn for each row."""
        epoch, position = divmod(step, len(self._chunks))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._chunks))
        index, start, end = self._chunks[int(order[position])]
        shard = self.shards[index]
        arrays = (
            shard.tokens[start:end].astype(np.int32),
            shard.probs.ids[start:end].astype(np.int32),
            *(np.array(each[start:end]) for each in (shard.probs.probabilities, shard.documents, shard.wanted)),
        )
        numbers = step * (end - start) + np.arange(end - start)
        return tuple(map(torch.from_numpy, (*arrays, numbers)))


def output_tokens_of(model: PreTrainedModel) -> Tensor | None:
    """Return the tokens, int64, that a draft proposes; None for all."""
    ids: list[int] | None = vars(model.config).get(OUTPUT_TOKENS)
    return None if ids is None else torch.tensor(ids)


def frequent_tokens(samples: Path, num_shards: int, count: int, vocab_size: int, always: Iterable[int]) -> Tensor:
    """Select the `count` tokens of most probability in the samples, rising; `always` are among them.

    Raises:
        ConfigError: there are fewer in the vocabulary.
    """
    if count > vocab_size:
        raise ConfigError(f"output_tokens is {count:,}, but the vocabulary has {vocab_size:,} tokens.")
    mass = np.zeros(vocab_size)
    for number in range(num_shards):
        probs = read_shard(samples, number).probs
        mass += np.bincount(
            probs.ids.reshape(-1).astype(np.int64), probs.probabilities.reshape(-1).astype(np.float64), vocab_size
        )
    mass[list(always)] = np.inf
    # ties, most of them between tokens that never came, go to the lower id
    order = np.lexsort((np.arange(vocab_size), -mass))
    return torch.from_numpy(np.sort(order[:count]))


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
