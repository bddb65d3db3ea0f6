"""What models of heads have in common: they read the target's states, and fit one target alone."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from forerun.errors import IncompatibleDrafterError
from forerun.heads.kinds import HeadConfig
from forerun.heads.stored import StoredHead
from forerun.models.base import Exactness, LanguageModel


class HeadModel(LanguageModel):
    """A head over its target, as a language model whose rows need a state beside the token (`Rows.states`).

    Attributes:
        config: its shape.
        target: whose embeddings, and perhaps output layer, it reads.
        token_ids: [draft_vocab_size] the target's tokens that it can propose.

    Args:
        name: for messages and stored costs.

    Raises:
        IncompatibleDrafterError: the target is of another size.
    """

    config: HeadConfig

    def __init__(self, head: StoredHead, target: LanguageModel, name: str) -> None:
        check_size(head.config, target, name)
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

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """What rows read of the target's states.

        Args:
            taps: [n, layers, target_hidden_size], of the layers of the configuration.

        Returns:
            [n, S].
        """


def check_size(config: HeadConfig, target: LanguageModel, name: str) -> None:
    """Raises IncompatibleDrafterError where vocabulary or width are not the target's."""
    if config.vocab_size != target.vocab_size:
        raise IncompatibleDrafterError(
            f"{name} is of a target of {config.vocab_size:,} tokens, but {target.name} has "
            f"{target.vocab_size:,}. Take a head that was trained for {target.name}."
        )
    width = target.embedding_rows(torch.zeros(1, dtype=torch.int64)).shape[1]
    if config.target_hidden_size != width:
        raise IncompatibleDrafterError(
            f"{name} is of a target whose states have {config.target_hidden_size} numbers, but those of "
            f"{target.name} have {width}. Take a head that was trained for {target.name}."
        )
    if not config.own_output_rows and config.hidden_size != config.target_hidden_size:
        raise IncompatibleDrafterError(
            f"{name} has {config.hidden_size} numbers a state and reads the target's output layer, which has "
            f"{width}. A head of another width needs output rows of its own."
        )
