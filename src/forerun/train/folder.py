"""Model folders: reading and writing ordinary Transformers folders with a card beside the weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError, ModelLoadError
from forerun.files.json_file import Fields
from forerun.files.write import REMEDY, new_files, write_json
from forerun.models.loading import without_bars

TRAINING_RECORD = "training.json"
CARD = "README.md"


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights (bfloat16 safetensors), configuration and tokenizer; `model` itself is left as it is.

    Raises:
        ConfigError: they cannot be written; what was in the folder is still there.
    """
    stored = copy.deepcopy(model).to(device="cpu", dtype=torch.bfloat16)
    with new_files(folder, ConfigError) as fresh, without_bars():
        try:
            stored.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        except SafetensorError as error:
            raise ConfigError(f"{folder} cannot be written: {error}. {REMEDY}") from error


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer from a local folder, in evaluation mode.

    Raises:
        ModelLoadError: the folder is missing, or Transformers cannot read a model from it.
    """
    if not (folder / "config.json").exists():
        raise ModelLoadError(f"{folder} holds no config.json: not a model folder. Give the folder of a saved model.")
    try:
        with without_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
            tokenizer = load_tokenizer(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{folder} cannot be read: {error}. Save the model anew, as safetensors.") from error
    return model.eval(), tokenizer


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder.

    Raises:
        ModelLoadError: there is none, or it is damaged.
    """
    if not (folder / "tokenizer.json").exists():
        raise ModelLoadError(f"{folder} holds no tokenizer.json. Give the folder of a saved tokenizer or model.")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing more special
        raise ModelLoadError(f"The tokenizer of {folder} cannot be read: {error}. Save it anew.") from error


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `training.json`: what the card says, for programs."""
    write_json(folder / TRAINING_RECORD, record, error=ConfigError)


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` wrote, or an empty dictionary if the folder has no record. Raises ModelLoadError: damaged."""
    path = folder / TRAINING_RECORD
    return dict(Fields.read(path, ModelLoadError, remedy="Remove it or put it right.").values) if path.exists() else {}
