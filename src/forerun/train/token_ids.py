"""What training must know of a vocabulary: its size, the type that holds its ids, a part of it, a text's end."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError


def id_type(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """uint16 where every id fits, else uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def stored_ids(ids: Tensor, vocab_size: int) -> np.ndarray:
    """Token ids of a tensor on any device, as they are kept on disk."""
    stored: np.ndarray = ids.cpu().numpy().astype(id_type(vocab_size))
    return stored


def columns_of(tokens: Tensor, vocab_size: int) -> Tensor:
    """int64 [vocab_size]: each token's place among these, -1 for the others."""
    columns = torch.full((vocab_size,), -1)
    columns[tokens] = torch.arange(len(tokens))
    return columns


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id, added tokens included."""
    largest: int = max(tokenizer.get_vocab().values())
    return largest + 1


def model_vocabulary(model: PreTrainedModel) -> int:
    """How many tokens the model's logits speak of; some models have more than their tokenizer."""
    return len(model.get_input_embeddings().weight)


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the token that ends a text.

    Raises:
        ConfigError: the tokenizer has none.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError(
            f"The tokenizer of {tokenizer.name_or_path} has no end-of-text token, which parts the training texts. "
            "Set eos_token in its tokenizer_config.json."
        )
    return int(end)
