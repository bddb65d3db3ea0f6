"""The stream of training text: files with repeated and edited spans, in an order of epochs, as windows of tokens.

People edit code by copying: the same function again with a name changed, a line added, a line gone. The standard
library itself shows little of it, and a model that cannot copy serves editing badly. The order depends on the seed and
the corpus alone, not on the run's tokens, so a run that is resumed with more tokens continues exactly.
"""

from __future__ import annotations

import builtins
import keyword
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.train.accelerator import end_of_text, id_type
from forerun.train.corpus import SourceFile

_IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{2,}\b")
_DEFINED = re.compile(r"\b(?:def|class|for|as)\s+([A-Za-z_]\w{2,})|^[ \t]*([A-Za-z_]\w{2,})\s*=[^=]", re.MULTILINE)
_KEPT = frozenset({"self", "cls", "__init__", *keyword.kwlist, *dir(builtins)})
_MIN_LINES, _MAX_LINES = 6, 40
_LINES_PER_COPY = 80
"""In long files, up to one copy for so many lines."""
_RENAMED_AT_MOST = 0.5


def renamed(lines: list[str], rng: random.Random) -> list[str]:
    """Return `lines` with one to three identifiers renamed throughout."""
    text = "\n".join(lines)
    names = sorted({n for n in _IDENTIFIER.findall(text) if not keyword.iskeyword(n)})
    for name in rng.sample(names, min(len(names), rng.randint(1, 3))):
        new = rng.choice(["new_", "other_", "my_", "old_", "_"]) + name if rng.random() < 0.5 else rng.choice(names)
        text = re.sub(rf"\b{name}\b", new, text)
    return text.split("\n")


def edited(lines: list[str], rng: random.Random) -> list[str]:
    """Return `lines` with renamed identifiers, or a line deleted, or one inserted, or unchanged (a third)."""
    kind = rng.random()
    if kind < 1 / 3:
        return list(lines)
    result = renamed(lines, rng) if kind < 2 / 3 else list(lines)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(result))
        if rng.random() < 0.5 and len(result) > 2:
            del result[at]
        else:
            result.insert(at, rng.choice(lines))
    return result


def with_copies(text: str, rng: random.Random) -> str:
    """Return `text` with some of its spans repeated, exactly or edited, at once or up to thirty lines further on.

    One to three spans, in long texts up to one in 80 lines. Texts shorter than two spans come back unchanged.
    """
    lines = text.split("\n")
    for _ in range(rng.randint(1, max(3, len(lines) // _LINES_PER_COPY))):
        if len(lines) < 2 * _MIN_LINES:
            break
        length = rng.randint(_MIN_LINES, min(_MAX_LINES, len(lines) // 2))
        start = rng.randrange(len(lines) - length)
        span = lines[start : start + length]
        at = min(len(lines), start + length + rng.randint(0, 30))
        lines[at:at] = ["", *edited(span, rng)]
    return "\n".join(lines)


def defined_names(text: str) -> list[str]:
    """Return the names that `text` itself defines or binds, sorted, without `self`, builtins and dunder names."""
    found = {name for pair in _DEFINED.findall(text) for name in pair if name}
    return sorted(name for name in found if name not in _KEPT and not name.startswith("__"))


def name_pool(texts: Iterable[str]) -> list[str]:
    """Return every name defined in some text, sorted."""
    return sorted({name for text in texts for name in defined_names(text)})


def renamed_throughout(text: str, rng: random.Random, pool: Sequence[str]) -> str:
    """Return `text` with up to half of the names it defines replaced, wherever they stand, by names from `pool`.

    Such names cannot be memorised; the model has to copy them from the text before.
    """
    names = defined_names(text)
    chosen = rng.sample(names, round(rng.random() * _RENAMED_AT_MOST * len(names)))
    replacement = {name: rng.choice(pool) for name in chosen}
    return _IDENTIFIER.sub(lambda match: replacement.get(match[0], match[0]), text) if replacement else text


@dataclass(frozen=True, slots=True)
class EpochTexts:
    """The texts of an epoch: the files in a fresh order, some with other names, some with repeated spans.

    `copy_share` of the files carry copies (see `with_copies`), `rename_share` other names.
    """

    files: tuple[SourceFile, ...]
    seed: int
    copy_share: float
    rename_share: float = 0.0
    pool: tuple[str, ...] = ()

    @classmethod
    def make(cls, files: Sequence[SourceFile], seed: int, copy_share: float, rename_share: float) -> EpochTexts:
        """Sort the files, and collect the names for renaming."""
        ordered = tuple(sorted(files, key=lambda file: file.name))
        pool = tuple(name_pool(file.text for file in ordered)) if rename_share else ()
        return cls(ordered, seed, copy_share, rename_share if pool else 0.0, pool)

    def of(self, epoch: int) -> list[str]:
        """Return the texts of epoch `epoch`, in its order."""
        order = list(self.files)
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        return [self.document(file, epoch) for file in order]

    def document(self, file: SourceFile, epoch: int) -> str:
        """Return one file's text in epoch `epoch`."""
        rng = random.Random(f"{self.seed}:{epoch}:{file.name}")
        text = file.text
        if rng.random() < self.rename_share:
            text = renamed_throughout(text, rng, self.pool)
        return with_copies(text, rng) if rng.random() < self.copy_share else text


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest id, added tokens included."""
    largest: int = max(tokenizer.get_vocab().values())
    return largest + 1


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Encode all texts one after the other as token ids (uint16 or uint32), each ended by the end-of-text token."""
    end, kind = end_of_text(tokenizer), id_type(vocabulary_size(tokenizer))
    encoded = (tokenizer(text, verbose=False)["input_ids"] for text in texts)
    parts = [np.asarray([*ids, end], dtype=kind) for ids in encoded]
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
        """Return windows `first` to `first + count` of the endless order: int64 [count, length + 1]."""
        rows = []
        for index in range(first, first + count):
            start = int(self._order[index % len(self._order)]) * self.length
            rows.append(self.tokens[start : start + self.length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


class TwoStageStream:
    """Short windows first, long ones for the last part of the run, over fresh epochs.

    Attention costs less in short windows; the long ones at the end train the late positions. Every epoch
    counts as many steps as the first one fills.

    Args:
        windows: tokens of a short and of a long one.
        long_share: part of the run that is in long ones.
    """

    def __init__(
        self,
        texts: EpochTexts,
        tokenizer: PreTrainedTokenizerBase,
        windows: tuple[int, int],
        long_share: float,
        tokens_per_step: int,
    ) -> None:
        self._texts, self._tokenizer, self._windows, self._long_share = texts, tokenizer, windows, long_share
        self._tokens_per_step = tokens_per_step
        self._epoch = 0, tokenize(texts.of(0), tokenizer)
        self._current: tuple[int, int, Windows] | None = None
        self.tokens_per_epoch = len(self._epoch[1])

    def batch(self, step: int, total_steps: int) -> Tensor:
        """Return the batch of step `step` (from 0) of a run of `total_steps`: int64 [B, window + 1]."""
        length = self._windows[step >= total_steps - int(total_steps * self._long_share)]
        epoch, index = divmod(step, max(1, self.tokens_per_epoch // self._tokens_per_step))
        if self._epoch[0] != epoch:
            self._epoch = epoch, tokenize(self._texts.of(epoch), self._tokenizer)
        if self._current is None or self._current[:2] != (epoch, length):
            self._current = (epoch, length, Windows(self._epoch[1], length, self._texts.seed + epoch))
        count = max(1, self._tokens_per_step // length)
        return self._current[2].batch(index * count, count)
