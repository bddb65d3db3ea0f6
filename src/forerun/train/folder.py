"""Model folders: reading and writing ordinary Transformers folders with a card beside the weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError, ModelLoadError
from forerun.files.json_file import Fields
from forerun.files.write import REMEDY, new_files, write_json
from forerun.models import load_tokenizer as read_tokenizer, load_transformers_model
from forerun.models.transformers_model import quietly

TRAINING_RECORD = "training.json"
CARD = "README.md"


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights (bfloat16 safetensors), configuration and tokenizer; `model` itself is left as it is.

    Raises:
        ConfigError: they cannot be written; what was in the folder is still there.
    """
    stored = copy.deepcopy(model).to(device="cpu", dtype=torch.bfloat16)
    with new_files(folder, ConfigError) as fresh, quietly():
        try:
            stored.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        except SafetensorError as error:
            raise ConfigError(f"{folder} cannot be written: {error}. {REMEDY}") from error


def load(name: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer, in evaluation mode.

    name: a local folder, a GGUF file, or what `forerun fetch` brings. Weights in codes become numbers.

    Raises:
        ModelLoadError: it is missing, or Transformers cannot read a model from it.
    """
    return load_transformers_model(name, str(dtype).removeprefix("torch.")), read_tokenizer(name)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder.

    Raises:
        ModelLoadError: there is none, or it is damaged.
    """
    if not (folder / "tokenizer.json").exists():
        raise ModelLoadError(f"{folder} holds no tokenizer.json. Give the folder of a saved tokenizer or model.")
    return read_tokenizer(folder)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `training.json`: what the card says, for programs."""
    write_json(folder / TRAINING_RECORD, record, error=ConfigError)


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` wrote, or an empty dictionary if the folder has no record. Raises ModelLoadError: damaged."""
    path = folder / TRAINING_RECORD
    return dict(Fields.read(path, ModelLoadError, remedy="Remove it or put it right.").values) if path.exists() else {}
