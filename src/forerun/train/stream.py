"""From files to windows of tokens: the order in which training reads the corpus.

The order depends on the seed and the corpus only, never on the budget, so a run that is resumed
with another budget goes on exactly where it stopped.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.train.augment import name_pool, renamed_throughout, with_copies
from forerun.train.corpus import SourceFile
from forerun.train.token_ids import end_of_text, id_type, vocabulary_size


@dataclass(frozen=True, slots=True)
class EpochTexts:
    """What an epoch reads: the files in a fresh order, some with other names, some with repeated spans.

    `copy_share` of the files carry copies (see `augment.with_copies`), `rename_share` other names.
    """

    files: tuple[SourceFile, ...]
    seed: int
    copy_share: float
    rename_share: float = 0.0
    pool: tuple[str, ...] = ()

    @classmethod
    def make(cls, files: Sequence[SourceFile], seed: int, copy_share: float, rename_share: float) -> EpochTexts:
        """From any order of files."""
        ordered = tuple(sorted(files, key=lambda file: file.name))
        pool = tuple(name_pool(file.text for file in ordered)) if rename_share else ()
        return cls(ordered, seed, copy_share, rename_share if pool else 0.0, pool)

    def of(self, epoch: int) -> list[str]:
        """The texts of epoch `epoch`, in its order."""
        order = list(self.files)
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        return [self.document(file, epoch) for file in order]

    def document(self, file: SourceFile, epoch: int) -> str:
        """One file's text in epoch `epoch`."""
        rng = random.Random(f"{self.seed}:{epoch}:{file.name}")
        text = file.text
        if rng.random() < self.rename_share:
            text = renamed_throughout(text, rng, self.pool)
        return with_copies(text, rng) if rng.random() < self.copy_share else text


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """All texts one after the other as token ids (uint16 or uint32), each ended by the end-of-text token."""
    end, kind = end_of_text(tokenizer), id_type(vocabulary_size(tokenizer))
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 64):
        encoded = tokenizer(list(texts[start : start + 64]), verbose=False)["input_ids"]
        parts.extend(np.asarray([*ids, end], dtype=kind) for ids in encoded)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=kind)


class Windows:
    """Windows of `length` tokens plus the one that follows, in a shuffled order, for ever."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int) -> None:
        self.tokens = tokens
        self.length = length
        self._order = np.random.default_rng(seed).permutation(max(0, (len(tokens) - 1) // length))
        if len(self._order) == 0:
            raise ConfigError(
                f"{len(tokens):,} tokens of text do not fill one window of {length + 1:,}. Give more text."
            )

    def batch(self, first: int, count: int) -> Tensor:
        """Windows `first` to `first + count` of the endless order: int64 [count, length + 1]."""
        rows = []
        for index in range(first, first + count):
            start = int(self._order[index % len(self._order)]) * self.length
            rows.append(self.tokens[start : start + self.length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


class Epochs:
    """The token stream of each epoch: the files in an order of its own, with copies and names of its own.

    An epoch depends on its number and the seed alone. With `processes`, the epochs that `expect` speaks of are
    made in so many processes while the present one is trained on: an accelerator reads faster than one core encodes.
    """

    AHEAD = 2
    """Epochs asked for before they are needed, for each process."""

    def __init__(self, texts: EpochTexts, tokenizer: PreTrainedTokenizerBase, processes: int = 0) -> None:
        self._texts, self._tokenizer, self._last = texts, tokenizer, 0
        self._ready: dict[int, np.ndarray] = {}
        self._coming: dict[int, Future[np.ndarray]] = {}
        self._ahead = processes * self.AHEAD
        self._pool: ProcessPoolExecutor | None = None
        if processes:
            # Not forked: the parent may hold an accelerator's context and threads.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, spawn, _set_up_worker, (texts, tokenizer))

    def expect(self, last: int) -> None:
        """Say which epoch will be the last one read, so that those up to it may be made ahead."""
        self._last = last

    def tokens(self, epoch: int) -> np.ndarray:
        """Epoch `epoch` as token ids."""
        if epoch not in self._ready:
            coming = self._coming.pop(epoch, None)
            made = tokenize(self._texts.of(epoch), self._tokenizer) if coming is None else coming.result()
            self._ready = {epoch: made}
        if self._pool is not None:
            for later in range(epoch + 1, min(epoch + self._ahead, self._last) + 1):
                if later not in self._coming:
                    self._coming[later] = self._pool.submit(_work, later)
        return self._ready[epoch]

    def close(self) -> None:
        """End the processes; epochs that were only asked for are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


_worker: tuple[EpochTexts, PreTrainedTokenizerBase] | None = None


def _set_up_worker(texts: EpochTexts, tokenizer: PreTrainedTokenizerBase) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    _worker = (texts, tokenizer)


def _work(epoch: int) -> np.ndarray:
    if _worker is None:
        raise RuntimeError("a process that makes epochs was not set up")
    return tokenize(_worker[0].of(epoch), _worker[1])


class TwoStageStream:
    """Short windows first, long ones for the last part of the budget, over fresh epochs.

    Attention costs less in short windows; the long ones at the end train the late positions. Every epoch
    counts as many steps as the first one fills.
    """

    def __init__(
        self,
        epochs: Epochs,
        *,
        seed: int,
        short_window: int,
        long_window: int,
        long_share: float,
        tokens_per_step: int,
    ) -> None:
        self.epochs = epochs
        self.seed = seed
        self.short_window, self.long_window = short_window, long_window
        self.long_share = long_share
        self.tokens_per_step = tokens_per_step
        self.steps_per_epoch = max(1, len(epochs.tokens(0)) // tokens_per_step)
        self._current: tuple[int, int, Windows] | None = None

    def batch(self, step: int, total_steps: int) -> Tensor:
        """The batch of step `step` (from 0) of a run of `total_steps`: int64 [B, window + 1]."""
        self.epochs.expect((total_steps - 1) // self.steps_per_epoch)
        first_long = total_steps - int(total_steps * self.long_share)
        length = self.short_window if step < first_long else self.long_window
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._current is None or self._current[:2] != (epoch, length):
            self._current = (epoch, length, Windows(self.epochs.tokens(epoch), length, self.seed + epoch))
        count = max(1, self.tokens_per_step // length)
        return self._current[2].batch(index * count, count)
