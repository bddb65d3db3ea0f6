"""A draft with a vocabulary of its own: what its target writes, as text, is what it learns from.

Distributions over other tokens cannot be compared, so there is nothing to distil: the draft is a language model
of the training text and of the target's samples, decoded and encoded anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.train.corpus import SourceFile
from forerun.train.draft.samples import SHARDS, read_array

ROWS_PER_DOCUMENT = 16
"""Samples begin and end anywhere; joined, they teach no end of text where there is none."""


def sample_documents(folder: Path, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[SourceFile]:
    """Up to `tokens` tokens of the samples in `folder` as text, as many from every shard.

    Raises:
        ConfigError: the folder holds no samples.
    """
    shards = sorted(folder.glob(SHARDS))
    if not shards:
        raise ConfigError(f"{folder} holds no samples. Give the folder `samples` of a run of `forerun train draft`.")
    documents = []
    for path in shards:
        for number, rows in enumerate(_groups(read_array(path), tokens // len(shards))):
            texts = tokenizer.backend_tokenizer.decode_batch(rows.tolist(), skip_special_tokens=True)
            documents.append(SourceFile(f"samples/{path.name}/{number}", "\n".join(texts)))
    return documents


def _groups(rows: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Groups of rows [ROWS_PER_DOCUMENT, T] with about `tokens` tokens together."""
    for start in range(0, min(len(rows), max(1, tokens // rows.shape[1])), ROWS_PER_DOCUMENT):
        yield rows[start : start + ROWS_PER_DOCUMENT]
