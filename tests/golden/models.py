"""Tiny models whose numbers are the same on every machine: eighths of small integers, which bfloat16 holds exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.utils import logging

import gguf_models
from families import tiny_config, tiny_model
from forerun.models import load_model
from forerun.models.families.table import ARCHITECTURES
from gguf_files import ARCHITECTURES as WRITTEN, write_gguf
from golden.sources import Numbers

logging.disable_progress_bar()
logging.set_verbosity_error()
_VECTORS = ("sinks", "bias", "alpha", "norm", "router", "A_log", ".D")
_BUFFERS = ("correction_bias", "expert_bias", "layer_scalar")
_RENAMED = {"qwen2vl": ("qwen2", "qwen2_vl_text"), "qwen3vl": ("qwen3", "qwen3_vl_text")}


def numbers(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a parameter, which depend on its name and shape alone."""
    step = 32 if "conv" in name else 128 if tensor.dim() > 1 else 64
    drawn = np.random.default_rng(crc32(name.encode())).integers(-24, 25, tuple(tensor.shape))
    is_constant = tensor.dim() == 1 and bool((tensor == tensor[0]).all())
    base = 0.0 if tensor.dim() > 1 or "bias" in name else float(tensor[0]) if is_constant else 0.5
    return torch.from_numpy(drawn / step + base).to(tensor.dtype)


def draw(model: PreTrainedModel) -> PreTrainedModel:
    """Give all parameters other numbers."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1 or (tensor.dim() == 1 and any(part in name for part in _VECTORS)):
                tensor.copy_(numbers(name, tensor))
        for name, tensor in model.named_buffers():
            if name.endswith(_BUFFERS):
                tensor.copy_(numbers(name, tensor))
    return model


def save_family(family: str, folder: Path) -> dict[str, Numbers]:
    """Save the tiny model of a family, and return the file's tensors."""
    draw(tiny_model(family)).save_pretrained(folder)
    return {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


def load_untried(path: Path, **options: Any) -> Any:
    """Load a model without its self-test, of which no text tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.models.loading.load.self_test", lambda model, **_: model.exactness)
        return load_model(path, **options)


def default_config(family: str) -> Any:
    """Return Transformers' default configuration."""
    return CONFIG_MAPPING[family]()


def written_of(architecture: str) -> list[str]:
    """Return the families whose tiny models are written as files of the architecture."""
    from families import DESCRIBED

    if architecture in _RENAMED:
        return [_RENAMED[architecture][0]]
    return [family for family in DESCRIBED if WRITTEN.get(family, family) == architecture]


def save_gguf(architecture: str, family: str, path: Path, type_name: str = "F32") -> dict[str, Numbers]:
    """Write a GGUF file of the tiny model of a family, and return the file's tensors as the gguf package reads them."""
    model = draw(gguf_models.tiny(family))
    keys: dict[str, Any] = {}
    if architecture in _RENAMED:
        model.config.model_type = _RENAMED[architecture][1]
        keys["rope.dimension_sections"] = [4, 2, 2, 0]
    write_gguf(path, model, type_name, keys)
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        found[tensor.name] = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(
            shape
        )
    return found


def architectures() -> list[str]:
    """Return the names of GGUF's architectures that are read."""
    return list(ARCHITECTURES)


__all__ = ["architectures", "default_config", "load_untried", "save_family", "save_gguf", "tiny_config", "written_of"]
