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
from forerun.models.base import output_order

_log = logging.getLogger(MEMORY_LOG)

DRAFT_VOCAB = 49_152
"""For vocabularies of more than twice as many."""
MIN_DRAFT_VOCAB = 1_000
_BLOCK = 16
"""Tokens that are computed together."""
_HELD_PART = 4
"""Of the tokens that a model was trained to propose, one for so many is computed for tokens of requests beside them."""
_MIN_HELD = 1_024
"""Tokens that are computed for those at least. One that a request holds takes a block."""


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
        order: [V] int64, the tokens of all blocks, those that the target lacks last; None: rising.
    """

    def __init__(self, whole: Columns, blocks: NDArray[np.int32], order: NDArray[np.int64] | None = None) -> None:
        self._whole = whole
        places = (blocks.astype(np.int64)[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
        places = places[: np.searchsorted(places, whole.num_columns)]
        self._token_ids = places if order is None else order[places]
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
    """The tokens that a model can propose: special tokens, and the first in the order of its outputs, which are those
    that it was trained to propose, and then the lowest ids, the most frequent ones of a byte-pair vocabulary. The later
    half gives way, the last first, to tokens that requests hold or held, and these in turn to those that came later.

    Attributes:
        model: computes the logits of these tokens alone.
        columns: what its columns are.
        size: how many they are, beside special tokens and `num_held`.

    Args:
        model, columns: of all tokens, which are the columns in order.
        always: tokens that stay.
        num_held: nothing gives way, as so many are computed beside them for tokens of requests; None: half gives way.

    Raises:
        ConfigError: the size is above the vocabulary's, or the model computes all of its outputs at once.
    """

    def __init__(
        self,
        size: int,
        model: LanguageModel,
        columns: Columns,
        always: Iterable[int],
        num_held: int | None = None,
    ) -> None:
        self._whole = model, columns
        if size > columns.num_columns:
            raise ConfigError(
                f"draft_vocab is {size:,}, but {model.name} has {columns.num_columns:,} tokens to draft. Give fewer, "
                "or 0 for all of them."
            )
        if not _can_choose(model, columns):
            raise ConfigError(
                f"draft_vocab is {size:,}, but {model.name} computes all outputs at once: only the native CPU "
                "kernels compute some, of models that can draft every token. Leave draft_vocab out."
            )
        self.size = size
        self._order: NDArray[np.int64] | None = None
        self._places: NDArray[np.int64] | None = None
        if model.output_tokens is not None:
            self._order = output_order(model.output_tokens, model.vocab_size).numpy()
            self._places = self._order.argsort()
        end = -(-size // _BLOCK)
        num_kept = size // 2 if num_held is None else size
        self._kept = {*range(-(-num_kept // _BLOCK)), *self._blocks_of(always)}
        self._recent = dict.fromkeys(block for block in range(end - 1, -1, -1) if block not in self._kept)
        self._most = len(self._recent) if num_held is None else -(-num_held // _BLOCK)
        self._choose()

    def include(self, token_ids: Iterable[int]) -> None:
        """Let these tokens be proposed from now on."""
        wanted = [block for block in self._blocks_of(token_ids) if block not in self._kept]
        is_known = self._recent.keys() >= {*wanted}
        for block in wanted:
            self._recent.pop(block, None)
            self._recent[block] = None
        if not is_known:
            for block in list(self._recent)[: max(0, len(self._recent) - self._most)]:
                del self._recent[block]
            self._choose()

    def _blocks_of(self, token_ids: Iterable[int]) -> list[int]:
        """Return the blocks of those tokens that the target has, in their order."""
        found = [token_id for token_id in token_ids if token_id < self._whole[1].num_columns]
        places = found if self._places is None else self._places[found].tolist()
        return [place // _BLOCK for place in places]

    def _choose(self) -> None:
        model, columns = self._whole
        blocks = np.array(sorted([*self._kept, *self._recent]), np.int32)
        part = model.of_outputs(blocks)
        assert part is not None
        self.model = part
        self.columns: Columns = SomeTokens(columns, blocks, self._order)


def _can_choose(model: LanguageModel, columns: Columns) -> bool:
    """Return whether the kernels compute some outputs alone, and the target has the tokens of the first ones."""
    first = model.output_tokens
    is_known = first is None or int(first.max()) < columns.num_columns
    return is_known and model.of_outputs(np.zeros(1, np.int32)) is not None


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
    """Return the tokens that a model can propose; None for all that it computes.

    Args:
        size: how many; 0 for all; None, where the model's kernels can compute some alone: those that it was trained to
            propose with some of requests beside them, or DRAFT_VOCAB if the vocabulary has more than twice as many.

    Raises:
        ConfigError: as `DraftVocabulary`; all are asked for, but it computes only those that it was trained to propose.
    """
    trained = model.output_tokens
    num_columns = columns.num_columns
    is_small = size is None and num_columns <= 2 * DRAFT_VOCAB
    if trained is None and (is_small or size in (0, num_columns)):
        return None
    if not size and not _can_choose(model, columns):
        if trained is not None and size is not None:
            raise ConfigError(
                f"draft_vocab is 0, but {model.name} computes only the {len(trained):,} tokens that it was trained to "
                "propose: the native CPU kernels alone compute others, of models that can draft every token. Leave "
                "draft_vocab out."
            )
        return None
    num_held = None
    if size is None and trained is not None:
        size = len(trained)
        num_held = max(_MIN_HELD, size // _HELD_PART)
    elif size is None:
        size = DRAFT_VOCAB
    found = DraftVocabulary(size or num_columns, model, columns, always, num_held)
    _log.info(
        "%s proposes %s of its %s tokens: those of requests, special ones, and for the rest %s; draft_vocab=0 is for "
        "all.",
        *(model.name, f"{found.size:,}", f"{num_columns:,}"),
        "the lowest ids" if trained is None else "those that it was trained to propose",
    )
    return found
