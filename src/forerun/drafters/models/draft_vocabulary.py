"""Which of the target's tokens a model that drafts can propose: all, or those that are likely (FR-Spec, 2502.14856).

The output layer of a small model with a large vocabulary takes a third of its time or more. Kernels that can compute
some blocks of its rows alone need not compute those of tokens that hardly ever come. What the model cannot propose has
no share in its distribution, so that verification, which knows this distribution, stays exact.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.config import MEMORY_LOG
from forerun.errors import ConfigError
from forerun.models import LanguageModel

_log = logging.getLogger(MEMORY_LOG)

DRAFT_VOCAB = 49_152
"""For vocabularies of more than twice as many."""
MIN_DRAFT_VOCAB = 1_000
_BLOCK = 16
"""Tokens that are computed together."""


class Columns(Protocol):
    """What the columns of a model's logits are among the target's tokens, and how it reads these."""

    @property
    def num_columns(self) -> int:
        """Return how many columns, from the first, can be drafted from."""

    def widened(self, logits: Tensor) -> Tensor:
        """Widen [R, draft vocabulary] to [R, V], the target's tokens: -inf where the model has none."""

    def named(self, columns: Tensor) -> Tensor:
        """Return the target's tokens of columns, before these are widened."""

    def names(self, columns: list[int]) -> list[int]:
        """Return the target's tokens of columns, as a list."""

    def readable(self, token_ids: list[int]) -> list[int]:
        """Return the target's tokens as the model can read them."""


class SomeTokens:
    """The columns of a model that computes some blocks of its tokens (`Columns`).

    Args:
        whole: its columns where it computes all, which are the target's tokens in order.
        blocks: rising.
    """

    def __init__(self, whole: Columns, blocks: NDArray[np.int32]) -> None:
        self._whole = whole
        token_ids = (blocks.astype(np.int64)[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
        self._token_ids = token_ids[: np.searchsorted(token_ids, whole.num_columns)]
        self._index = torch.from_numpy(self._token_ids)

    @property
    def num_columns(self) -> int:
        return len(self._token_ids)

    def widened(self, logits: Tensor) -> Tensor:
        wide = logits.new_full((len(logits), self._whole.num_columns), -torch.inf)
        return self._whole.widened(wide.index_copy_(1, self._index, logits[:, : self.num_columns]))

    def named(self, columns: Tensor) -> Tensor:
        return self._index[columns]

    def names(self, columns: list[int]) -> list[int]:
        names: list[int] = self._token_ids[columns].tolist()
        return names

    def readable(self, token_ids: list[int]) -> list[int]:
        return self._whole.readable(token_ids)


class DraftVocabulary:
    """The tokens that a model can propose: special tokens, and those of the lowest ids, the most frequent ones of a
    byte-pair vocabulary. The upper half of these ids give way, the highest first, to tokens that requests hold or held,
    and these in turn to those that came later.

    Attributes:
        model: computes the logits of these tokens alone.
        columns: what its columns are.
        size: how many they are, beside special tokens.

    Args:
        model, columns: of all tokens, which are the columns in order.
        always: tokens that stay.

    Raises:
        ConfigError: the size is above the vocabulary's, or the model computes all of its outputs at once.
    """

    def __init__(self, size: int, model: LanguageModel, columns: Columns, always: Iterable[int]) -> None:
        self._whole = model, columns
        if size > columns.num_columns:
            raise ConfigError(
                f"draft_vocab is {size:,}, but {model.name} has {columns.num_columns:,} tokens to draft. Give fewer, "
                "or 0 for all of them."
            )
        self.size = size
        end = -(-size // _BLOCK)
        self._kept = self._blocks_of([*range(size // 2), *always])
        self._recent = dict.fromkeys(block for block in range(end - 1, -1, -1) if block not in self._kept)
        self._most = len(self._recent)
        self._choose()

    def include(self, token_ids: Iterable[int]) -> None:
        """Let these tokens be proposed from now on."""
        wanted = self._blocks_of(token_ids) - self._kept
        is_known = wanted <= self._recent.keys()
        for block in wanted:
            self._recent.pop(block, None)
            self._recent[block] = None
        if not is_known:
            for block in list(self._recent)[: len(self._recent) - self._most]:
                del self._recent[block]
            self._choose()

    def _blocks_of(self, token_ids: Iterable[int]) -> set[int]:
        return {token_id // _BLOCK for token_id in token_ids if token_id < self._whole[1].num_columns}

    def _choose(self) -> None:
        model, columns = self._whole
        blocks = np.array(sorted([*self._kept, *self._recent]), np.int32)
        part = model.of_outputs(blocks)
        if part is None:
            raise ConfigError(
                f"draft_vocab is {self.size:,}, but {model.name} computes all outputs at once: only the native CPU "
                "kernels compute some, of models that can draft every token. Leave draft_vocab out."
            )
        self.model = part
        self.columns: Columns = SomeTokens(columns, blocks)


def check_draft_vocab(size: int | None) -> None:
    """Raise ConfigError for a number of tokens that is too small to draft from. size: as of `chosen_vocabulary`."""
    if size is not None and size != 0 and size < MIN_DRAFT_VOCAB:
        raise ConfigError(
            f"draft_vocab is {size:,}, but with fewer than {MIN_DRAFT_VOCAB:,} tokens hardly any draft is accepted. "
            "Give more, or 0 for all tokens."
        )


def chosen_vocabulary(
    size: int | None, model: LanguageModel, columns: Columns, always: Iterable[int]
) -> DraftVocabulary | None:
    """Return the tokens that a model can propose; None for all.

    Args:
        size: how many; 0 for all; None: DRAFT_VOCAB if the vocabulary has more than twice as many and the model's
            kernels can compute some alone.

    Raises:
        ConfigError: as `DraftVocabulary`.
    """
    if size is None:
        can_choose = columns.num_columns > 2 * DRAFT_VOCAB and model.of_outputs(np.zeros(1, np.int32)) is not None
        size = DRAFT_VOCAB if can_choose else 0
    if size in (0, columns.num_columns):
        return None
    found = DraftVocabulary(size, model, columns, always)
    _log.info(
        "%s proposes %s of its %s tokens: those of requests, special ones, and for the rest the lowest ids; "
        "draft_vocab=0 is for all.",
        *(model.name, f"{size:,}", f"{columns.num_columns:,}"),
    )
    return found
