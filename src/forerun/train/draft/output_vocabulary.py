"""The part of the vocabulary that a draft can propose: chosen by the samples, kept in its configuration.

Reading the rows of a whole output layer is most of what so small a model costs. The folder that is written holds the
layer whole; `output_token_ids` in its configuration says which rows were trained (`models/configuration.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.errors import ConfigError
from forerun.models.configuration import OUTPUT_TOKENS
from forerun.models.llama import llama_refusal
from forerun.train.draft.samples import read_shard
from forerun.train.token_ids import columns_of


def output_tokens_of(model: PreTrainedModel) -> Tensor | None:
    """int64, the tokens that a model of `folder.load` proposes; None for all."""
    ids: list[int] | None = vars(model.config).get(OUTPUT_TOKENS)
    return None if ids is None else torch.tensor(ids)


def frequent_tokens(samples: Path, num_shards: int, count: int, vocab_size: int, always: Iterable[int]) -> Tensor:
    """The `count` tokens that the target gives most probability in the samples, rising; `always` are among them.

    Raises:
        ConfigError: there are fewer in the vocabulary.
    """
    if count > vocab_size:
        raise ConfigError(f"--output-tokens is {count:,}, but the vocabulary has {vocab_size:,} tokens.")
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
    """Say in the model's configuration that it proposes these tokens, int64 and rising.

    Raises:
        ConfigError: it is of a family whose output layer is computed whole.
    """
    refusal = llama_refusal(model.config)
    if refusal is not None:
        raise ConfigError(
            f"A reduced output vocabulary is served for the Llama family, and this draft is not of it: {refusal}. "
            "Leave --output-tokens out."
        )
    setattr(model.config, OUTPUT_TOKENS, tokens.tolist())


@contextmanager
def restricted(model: PreTrainedModel) -> Iterator[None]:
    """Inside this block the model's logits are those that are served: -inf for tokens that it does not propose."""
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
