"""The distillation set: shards of the target's continuations with its distributions, on disk.

A shard is one batch of prompts of one length at one temperature. Shards are written whole or not at
all and depend on their number alone, so that sampling goes on where a killed run stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import ConfigError
from forerun.files.write import check_seal, sealed_file
from forerun.train.continuations import TopProbs, continue_prompts, top_probs_of, write_on
from forerun.train.defaults import DraftTraining
from forerun.train.resumed_options import pin
from forerun.train.stream import Windows
from forerun.train.token_ids import model_vocabulary, stored_ids
from forerun.train.workers import Batch

SHARDS = "shard-*.tokens.npy"
"""The files of a folder of samples that hold tokens, one a shard."""
_REMEDY = "Remove this shard's three files, and --resume of the run that wrote them draws it again."
_LOGITS_OF_PROMPTS = 1 << 28
"""Largest number of logits of prompts that a CPU computes at once while it continues them."""
_PACKED = ("documents", "wanted")
OWN_PROMPT_STARTS_WITH = 32
"""Tokens of training text before what the target writes into its own prompts."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Texts of one length with the target's distributions.

    Attributes:
        tokens: [B, T + 1], uint16 or uint32.
        probs: of tokens 1 to T, [B, T, k].
        packed: documents int32 and wanted bool, [B, T + 1] each, as `PackedBatch` has them: attention does not cross
            from one document into the next, and the prediction of the wanted tokens is what is learnt. None: each row
            is one document, all of which is learnt.
    """

    tokens: np.ndarray
    probs: TopProbs
    packed: tuple[np.ndarray, np.ndarray] | None = None


def shard_path(folder: Path, number: int, part: str = "tokens") -> Path:
    """The file of one part of a shard. One whose tokens are there is complete."""
    return folder / f"shard-{number:04d}.{part}.npy"


def write_shard(folder: Path, number: int, shard: Shard) -> None:
    """Write one shard, its tokens last."""
    parts = {"ids": shard.probs.ids, "probabilities": shard.probs.probabilities}
    if shard.packed is not None:
        parts |= zip(_PACKED, shard.packed, strict=True)
    for part, array in (parts | {"tokens": shard.tokens}).items():
        with sealed_file(shard_path(folder, number, part), ConfigError) as file:
            np.save(file, array, allow_pickle=False)


def read_shard(folder: Path, number: int) -> Shard:
    """Map one shard into memory. Raises ConfigError where it is damaged."""
    ids, probabilities, tokens = (
        read_array(shard_path(folder, number, part)) for part in ("ids", "probabilities", "tokens")
    )
    packed = None
    if shard_path(folder, number, _PACKED[0]).exists():
        documents, wanted = (read_array(shard_path(folder, number, part)) for part in _PACKED)
        packed = documents, wanted
    return Shard(tokens, TopProbs(ids, probabilities), packed)


def read_array(path: Path) -> np.ndarray:
    """Map one file of a shard into memory (see `SHARDS`). Raises ConfigError where it is damaged."""
    check_seal(path, ConfigError, _REMEDY)
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as failure:
        raise ConfigError(f"{path} cannot be read: {failure}. {_REMEDY}") from None
    return array


def shard_count(options: DraftTraining) -> int:
    """How many shards hold `options.sample_tokens` sampled tokens."""
    return max(1, round(options.sample_tokens / (options.sample_batch * options.new_tokens)))


def sample_shard(target: PreTrainedModel, tokens: np.ndarray, number: int, options: DraftTraining) -> Shard:
    """Sample shard `number` from prompts cut out of the training stream `tokens`."""
    length = options.prompt_lengths[number % len(options.prompt_lengths)]
    temperature = options.temperatures[number // len(options.prompt_lengths) % len(options.temperatures)]
    windows = Windows(tokens, length, options.seed + length)
    prompts = windows.batch(number * options.sample_batch, options.sample_batch)[:, :-1].to(target.device)
    prompts = _partly_own(target, prompts, number, options)
    if target.device.type != "cpu" or prompts.numel() * model_vocabulary(target) > _LOGITS_OF_PROMPTS:
        # Distributions of many prompts all at once need more memory than there is, and a second forward is cheap.
        written = write_on(target, prompts, options.new_tokens, temperature, options.seed + number)
        probs = top_probs_of(target, written, options.top)
        return Shard(stored_ids(written, model_vocabulary(target)), probs)
    written, probs = continue_prompts(
        target, prompts, options.new_tokens, temperature, options.seed + number, options.top
    )
    return Shard(stored_ids(written, model_vocabulary(target)), probs)


def _partly_own(target: PreTrainedModel, prompts: Tensor, number: int, options: DraftTraining) -> Tensor:
    """Let the target write some of the prompts [B, P] itself, at temperature 1, after their first tokens.

    It has read the training text and knows some of it by heart; what it writes there is not what it
    writes after text it never saw.
    """
    count, length = round(options.own_prompt_share * len(prompts)), prompts.shape[1]
    if not count or length <= OWN_PROMPT_STARTS_WITH:
        return prompts
    starts = prompts[:count, :OWN_PROMPT_STARTS_WITH]
    # Not the seed of the continuation, whose draws would otherwise come twice.
    seed = options.seed + number + 2**31
    return torch.cat([write_on(target, starts, length - OWN_PROMPT_STARTS_WITH, 1.0, seed), prompts[count:]])


def total_shards(options: DraftTraining) -> int:
    """The sampled shards, and after them those of plain text, which hold `options.text_law_tokens` tokens."""
    return shard_count(options) + round(options.text_law_tokens / (options.text_batch * options.text_window))


def text_shard(target: PreTrainedModel, tokens: np.ndarray, number: int, options: DraftTraining) -> Shard:
    """Text shard `number` (from 0): windows of the training stream with the target's distributions."""
    windows = Windows(tokens, options.text_window, options.seed + 1)
    batch = windows.batch(number * options.text_batch, options.text_batch).to(target.device)
    return Shard(stored_ids(batch, model_vocabulary(target)), top_probs_of(target, batch, options.top))


def sample_all(
    target: PreTrainedModel, tokens: np.ndarray, folder: Path, options: DraftTraining, done: Callable[[int], None]
) -> None:
    """Write every shard that `folder` lacks; `done(number)` after each, those already there included."""
    names = (
        "sample_tokens",
        "sample_batch",
        "prompt_lengths",
        "new_tokens",
        "temperatures",
        "own_prompt_share",
        "text_window",
        "text_batch",
        "top",
        "seed",
    )
    pin(folder, {name: getattr(options, name) for name in names})
    sampled = shard_count(options)

    def made(number: int) -> Shard:
        if number < sampled:
            return sample_shard(target, tokens, number, options)
        return text_shard(target, tokens, number - sampled, options)

    write_all(folder, total_shards(options), made, target, options.threads, done)


def write_all(
    folder: Path,
    count: int,
    made: Callable[[int], Shard],
    target: PreTrainedModel,
    threads: int,
    done: Callable[[int], None],
) -> None:
    """Write those of so many shards that `folder` lacks, several at once on a CPU; `done(number)` after each of all."""
    workers = (threads or torch.get_num_threads()) if target.device.type == "cpu" else 1

    def work(number: int) -> int:
        if workers > 1:
            torch.set_num_threads(1)
        if not shard_path(folder, number).exists():
            write_shard(folder, number, made(number))
        return number

    with ThreadPoolExecutor(workers) as pool:
        try:
            for future in as_completed([pool.submit(work, number) for number in range(count)]):
                done(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # those begun are finished, and kept
            raise


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
        """(tokens int32 [B, T + 1], ids int32 [B, T, k], probabilities float16 [B, T, k]) of step `step`; then what
        `Shard.packed` has, if anything."""
        epoch, position = divmod(step, len(self._chunks))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._chunks))
        index, start, end = self._chunks[int(order[position])]
        shard = self.shards[index]
        parts = (
            torch.from_numpy(shard.tokens[start:end].astype(np.int32)),
            torch.from_numpy(shard.probs.ids[start:end].astype(np.int32)),
            torch.from_numpy(np.array(shard.probs.probabilities[start:end])),
        )
        return (*parts, *(torch.from_numpy(np.array(part[start:end])) for part in shard.packed or ()))
