"""Model folders: reading and writing ordinary Transformers folders with a card beside the weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ModelLoadError
from forerun.models.loading import without_bars

TRAINING_RECORD = "training.json"
CARD = "README.md"


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
    if not (folder / "config.json").exists():
        raise ModelLoadError(f"{folder} holds no config.json: not a model folder. Give the folder of a saved model.")
    try:
        with without_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{folder} cannot be read: {error}. Save the model anew, as safetensors.") from error
    return model.eval(), tokenizer


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder.

    Raises:
        ModelLoadError: there is none.
    """
    if not (folder / "tokenizer.json").exists():
        raise ModelLoadError(f"{folder} holds no tokenizer.json. Give the folder of a saved tokenizer or model.")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `training.json`: what the card says, for programs."""
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    (folder / TRAINING_RECORD).write_text(text, encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` wrote, or an empty dictionary if the folder has no record."""
    path = folder / TRAINING_RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
