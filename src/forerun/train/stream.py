"""From files to windows of tokens: the order in which training reads the corpus.

The order depends on the seed and the corpus only, never on the budget, so a run that is resumed
with another budget goes on exactly where it stopped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from forerun.train.augment import with_copies
from forerun.train.corpus import SourceFile


def document(file: SourceFile, seed: int, copy_share: float) -> str:
    """The text to train on: the file's, or (for `copy_share` of the files) with repeated and edited spans."""
    rng = random.Random(f"{seed}:{file.name}")
    return with_copies(file.text, rng) if rng.random() < copy_share else file.text


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """All texts one after the other as uint16 token ids, each ended by the end-of-text token."""
    end = tokenizer.eos_token_id
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 64):
        encoded = tokenizer(list(texts[start : start + 64]), verbose=False)["input_ids"]
        parts.extend(np.asarray([*ids, end], dtype=np.uint16) for ids in encoded)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)


class Windows:
    """Windows of `length` tokens plus the one that follows, in a shuffled order, for ever."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int) -> None:
        self.tokens = tokens
        self.length = length
        self._order = np.random.default_rng(seed).permutation(max(0, (len(tokens) - 1) // length))
        if len(self._order) == 0:
            raise ValueError(f"{len(tokens)} tokens do not fill one window of {length + 1}")

    def batch(self, first: int, count: int) -> Tensor:
        """Windows `first` to `first + count` of the endless order: int64 [count, length + 1]."""
        rows = []
        for index in range(first, first + count):
            start = int(self._order[index % len(self._order)]) * self.length
            rows.append(self.tokens[start : start + self.length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


class TwoStageStream:
    """Short windows first, long ones for the last part of the budget, from different files.

    Attention costs less in short windows; the long ones at the end train the late positions.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        copy_share: float,
        short_window: int,
        long_window: int,
        long_share: float,
        tokens_per_step: int,
    ) -> None:
        order = sorted(files, key=lambda file: file.name)
        random.Random(seed).shuffle(order)
        tokens = tokenize([document(file, seed, copy_share) for file in order], tokenizer)
        cut = int(len(tokens) * (1 - long_share))
        self.short = Windows(tokens[:cut], short_window, seed)
        self.long = Windows(tokens[cut:], long_window, seed + 1)
        self.long_share = long_share
        self.tokens_per_step = tokens_per_step
        self.total_tokens = len(tokens)

    def batch(self, step: int, total_steps: int) -> Tensor:
        """The batch of step `step` (from 0) of a run of `total_steps`: int64 [B, window + 1]."""
        first_long = total_steps - int(total_steps * self.long_share)
        windows, index = (self.short, step) if step < first_long else (self.long, step - first_long)
        count = max(1, self.tokens_per_step // windows.length)
        return windows.batch(index * count, count)
