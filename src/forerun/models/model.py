"""A language model as the engine sees it: one packed forward for rows of any sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.cache import SequenceCache
from forerun.models.rows import Layout, Rows, lay_out


class Decoder(Protocol):
    """The part of a model that computes."""

    def forward(self, layout: Layout) -> Tensor:
        """Logits of the wanted rows, [R, V] with R >= layout.num_logits."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether a row's result is bit-identical alone and in company, as tried at load.

    Attributes:
        exact: it was, in every trial.
        reason: what prevents it, with the module's name; None when exact.
    """

    exact: bool
    reason: str | None = None


class Model:
    """A target or draft model.

    Attributes:
        name: what it was loaded as.
        vocab_size: width of the logits.
        context_length: positions it can compute.
        eos_token_ids: tokens that end its output.
        dtype: of the weights.
        path: "lean" or "general".
        exactness: the self-test's verdict.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        name: str,
        vocab_size: int,
        context_length: int,
        eos_token_ids: frozenset[int],
        dtype: torch.dtype,
        num_parameters: int,
        path: str,
    ) -> None:
        self.decoder = decoder
        self.name = name
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.eos_token_ids = eos_token_ids
        self.dtype = dtype
        self.num_parameters = num_parameters
        self.path = path
        self.compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.exactness = Exactness(False, "the self-test has not run")

    def new_cache(self) -> SequenceCache:
        """An empty cache for one sequence. Keys and values are kept in float32 (float64 for a float64 model):
        converting a narrower cache at every step costs more than reading the wider one."""
        return SequenceCache(self.compute_dtype)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows]) -> Tensor:
        """Compute the new rows of several sequences, and write their keys and values as scratch.

        Args:
            batch: at least one Rows. `commit` on each cache decides what stays.

        Returns:
            [sum of num_logits, V] logits in packed order; float32, or float64 for a float64 model.
        """
        layout = lay_out(batch, self.compute_dtype)
        logits = self.decoder.forward(layout)
        return logits[: layout.num_logits].to(self.compute_dtype)
