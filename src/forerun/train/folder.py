"""Model folders: reading and writing ordinary Transformers folders with a card beside the weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from forerun.errors import ModelLoadError
from forerun.models import load_tokenizer as read_tokenizer
from forerun.models import load_transformers_model

TRAINING_RECORD = "training.json"
CARD = "README.md"


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep Transformers' progress bars off the screen: the commands have their own."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights (bfloat16 safetensors), configuration and tokenizer; `model` itself is left as it is."""
    stored = copy.deepcopy(model).to(device="cpu", dtype=torch.bfloat16)
    with without_bars():
        stored.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer from a local folder, in evaluation mode.

    Raises:
        ModelLoadError: the folder is missing, or Transformers cannot read a model from it.
    """
    return load_transformers_model(folder, str(dtype).removeprefix("torch.")), read_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder.

    Raises:
        ModelLoadError: there is none.
    """
    if not (folder / "tokenizer.json").exists():
        raise ModelLoadError(f"{folder} holds no tokenizer.json. Give the folder of a saved tokenizer or model.")
    return read_tokenizer(folder)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `training.json`: what the card says, for programs."""
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    (folder / TRAINING_RECORD).write_text(text, encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` wrote, or an empty dictionary if the folder has no record."""
    path = folder / TRAINING_RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
