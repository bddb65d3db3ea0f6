"""Packed rows as samples: the target reads them, and its distributions are kept beside them on disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.train.continuations import top_probs_of
from forerun.train.data.packed import INDEX, PackedRows
from forerun.train.defaults import DraftTraining
from forerun.train.draft.samples import Shard, write_all
from forerun.train.resumed_options import pin
from forerun.train.token_ids import model_vocabulary, stored_ids
from forerun.vocabulary.fingerprint import fingerprint


def is_packed(data: Path) -> bool:
    """Whether a folder holds packed rows."""
    return (data / INDEX).is_file()


def packed_record(rows: PackedRows) -> dict[str, Any]:
    """What the card says of them."""
    return {
        "description": f"packed rows ({rows.num_tokens:,} tokens, {rows.num_wanted:,} of them learnt)",
        "licence": "that of the data",
        "unit": "documents",
        "training_files": rows.num_documents,
        "held_out_files": rows.held_out().num_documents,
        "split": "by a hash of the prompt",
    }


def check_packed(rows: PackedRows, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError where the rows are of another tokenizer than the target's, or there are none."""
    made_by = rows.made_from.get("tokenizer")
    if rows.vocab_size > model_vocabulary(target) or (made_by is not None and made_by != fingerprint(tokenizer)):
        raise ConfigError(
            f"{rows.folder} was packed with another tokenizer than the target's. Pack the data for this target."
        )
    if not len(rows):
        raise ConfigError(f"{rows.folder} holds no rows to train on. Give more data.")


def packed_shards(rows: PackedRows, options: DraftTraining) -> int:
    """Shards of all the rows."""
    return math.ceil(len(rows) / options.text_batch)


def sample_packed(
    target: PreTrainedModel, rows: PackedRows, folder: Path, options: DraftTraining, done: Callable[[int], None]
) -> None:
    """Write every shard that `folder` lacks; `done(number)` after each, those already there included."""
    pin(folder, {"packed": dict(rows.made_from), "text_batch": options.text_batch, "top": options.top})

    def made(number: int) -> Shard:
        first = number * options.text_batch
        batch = rows.rows(list(range(first, min(first + options.text_batch, len(rows)))))
        tokens, documents = batch.tokens.to(target.device), batch.documents.to(target.device)
        probs = top_probs_of(target, tokens, options.top, documents)
        packed = batch.documents.numpy().astype(np.int32), batch.wanted.numpy()
        return Shard(stored_ids(tokens, model_vocabulary(target)), probs, packed)

    write_all(folder, packed_shards(rows, options), made, target, options.threads, done)
