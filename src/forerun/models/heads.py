"""What models of heads have in common: the target that they belong to, the tokens that they propose, and what those
with rows of their own make of the target's states."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from forerun.cache import PagePool, SequenceCache
from forerun.heads.config import HeadConfig
from forerun.heads.stored import StoredHead
from forerun.models.attention.base import Planner
from forerun.models.base import Exactness, LanguageModel
from forerun.models.head_layers import check_sizes


class HeadModel(LanguageModel):
    """A head over its target, as a language model whose rows need a state beside the token (`Rows.states`).

    `Forward.logits` are [R, draft_vocab_size], of the tokens that the head can propose: `widened` gives them the
    target's width.

    Attributes:
        target: whose embeddings, and perhaps output layer, it reads.
        token_ids: [draft_vocab_size] the target's tokens that it can propose.
        proposes_all: whether these are all tokens, in order.

    Args:
        name: for messages and stored costs.

    Raises:
        IncompatibleDrafterError: the target is of another size.
    """

    def __init__(self, head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> None:
        check_sizes(head.config, target, name)
        super().__init__(
            name=name,
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            eos_token_ids=target.eos_token_ids,
            dtype=target.dtype,
            device=target.device,
            num_parameters=sum(tensor.numel() for tensor in head.tensors.values()),
            exactness=Exactness(False, "the self-test does not try heads"),
            quantize=None if target.quantize is None else "int8",
            kernels=target.kernels,
        )
        self.target = target
        tokens = torch.arange(head.config.draft_vocab_size)
        self.token_ids = (tokens if head.d2t is None else tokens + head.d2t).to(target.device)
        self.proposes_all = head.d2t is None
        self._listed: list[int] = [] if self.proposes_all else self.token_ids.tolist()

    def names(self, columns: list[int]) -> list[int]:
        """The target's tokens of columns of the logits."""
        return columns if self.proposes_all else [self._listed[column] for column in columns]

    def widened(self, logits: Tensor) -> Tensor:
        """[R, vocab_size] of [R, draft_vocab_size]: -inf where the head has no row."""
        if self.proposes_all:
            return logits
        wide = torch.full((len(logits), self.vocab_size), -torch.inf, dtype=logits.dtype, device=logits.device)
        return wide.index_copy_(1, self.token_ids, logits)


class FusingHeadModel(HeadModel):
    """A head with a row for each token, that reads several of the target's states, fused.

    Attributes:
        planner: of its layers' attention; makes its caches.
    """

    planner: Planner

    @property
    def pool(self) -> PagePool:
        """Where the pages of its caches come from."""
        return self.planner.pool

    def new_cache(self) -> SequenceCache:
        """An empty cache for one sequence."""
        return self.planner.new_cache()

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """What rows read of the target's states.

        Args:
            taps: [n, layers, target_hidden_size], of the layers of the configuration.

        Returns:
            [n, S].
        """
