"""What forerun reads from a Transformers configuration, whatever files it was made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forerun.errors import UnsupportedModelError

UNLIMITED = 2**20
"""Positions of a model whose configuration sets no limit."""
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
OUTPUT_TOKENS = "output_token_ids"
"""Key of config.json, of forerun's: the tokens that the output layer was trained to propose. All others have no
probability, and their rows are not computed. The folder holds the whole layer, and is an ordinary one to others."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def refuse_unservable(config: Any, name: str) -> None:
    """Raise UnsupportedModelError, with the reason, for kinds of models that forerun cannot serve."""
    foreign = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if foreign:
        reason = f"its layers of type {', '.join(sorted(foreign))} keep a state that cannot be rolled back"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder; forerun serves decoder-only models"
    else:
        return
    raise UnsupportedModelError(f"{name} ({config.model_type}) cannot be served: {reason}.")


def context_length(config: Any) -> int:
    """Return the number of positions that the model can compute."""
    lengths = (getattr(config, key, None) for key in CONTEXT_KEYS)
    return next((int(length) for length in lengths if length is not None), UNLIMITED)


def token_ids_of(ids: Iterable[int], config: Any) -> frozenset[int]:
    """Return the ids that are tokens of the vocabulary."""
    return frozenset(token_id for token_id in ids if 0 <= token_id < config.vocab_size)
