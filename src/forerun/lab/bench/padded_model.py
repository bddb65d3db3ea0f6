"""Models of any size in memory that give a small model's text: wider states, more heads, layers, feed-forward columns.

What is added is computed in full and adds nothing. States have the source's numbers first and zeros after them, as the
weights that write to states have zeros in the rows of the others, and in the columns of added heads and feed-forward
columns. A norm over f times as many numbers, of which all added ones are zero, is the source's norm times the square
root of f: its weights are divided by that. f is a power of 4, so that this is exact in any number format. Such a model
is made on the device that computes it, and is saved nowhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralForCausalLM

from forerun.errors import ConfigError, NotEnoughMemoryError
from forerun.models.loading.load import load_transformers_model
from forerun.utils.device import resolve_device
from forerun.utils.machine import GIB, available_memory

GRAIN = 64
"""Intermediate sizes are multiples of this, so that vector kernels leave no scalar tail."""
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
_GROUP = 4
"""Query heads per key head, at least."""
Wide: TypeAlias = LlamaForCausalLM | MistralForCausalLM
"""What can be widened: both have the same weights."""
_LAYERS = ((2e9, 12), (1e10, 32), (math.inf, 60))
"""Up to so many parameters, so many layers, at least: about what published models have."""


@dataclass(frozen=True, slots=True)
class WideShape:
    """Sizes of a widened model.

    Attributes:
        factor: numbers of a state for one of the source's: a power of 4.
    """

    factor: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    parameters: int


def parse_parameters(text: str) -> int:
    """Parse a parameter count such as `200M`, `1.3B` or `500000`.

    Raises:
        ConfigError: `text` is no positive number with one of these units.
    """
    unit = text[-1:].upper()
    try:
        value = float(text[:-1]) * _UNITS[unit] if unit in _UNITS else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{text!r} is no number of parameters. Give one such as 200M, 1.3B or 500000.")
    return int(value)


def wide_shape(config: LlamaConfig, parameters: int) -> WideShape:
    """Return the shape nearest to so many parameters, with proportions close to those of published models.

    Raises:
        ConfigError: the source is larger, or is of a shape that cannot be widened.
    """
    layers = max(config.num_hidden_layers, next(count for most, count in _LAYERS if parameters <= most))
    usual = math.sqrt(parameters / (13 * layers))
    nearest = max(0, round(math.log(usual / config.hidden_size, 4)))
    for power in range(nearest, -1, -1):
        shape = _of_width(config, parameters, layers, 4**power)
        if shape.intermediate_size >= config.intermediate_size:
            return shape
    raise ConfigError(
        f"{parameters:,} parameters are too few for a model in memory of this source, which has {layers} layers. Give "
        "more."
    )


def _of_width(config: LlamaConfig, parameters: int, layers: int, factor: int) -> WideShape:
    hidden = factor * config.hidden_size
    width = config.head_dim
    group = max(_GROUP, config.num_attention_heads // config.num_key_value_heads)
    kv_heads = max(config.num_key_value_heads, hidden // width // group)
    heads = kv_heads * group
    outer = (1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden + hidden
    attention = 2 * hidden * width * (heads + kv_heads) + 2 * hidden
    columns = round(((parameters - outer) / layers - attention) / (3 * hidden) / GRAIN) * GRAIN
    total = outer + layers * (attention + 3 * hidden * columns)
    return WideShape(factor, hidden, layers, heads, kv_heads, columns, total)


def make_wide(source: str | Path, parameters: str, dtype: str, device: str | torch.device) -> Wide:
    """Create a model of about so many parameters on the device that gives the text of a Llama or Mistral model.

    Args:
        source: as `load_model` takes names. parameters: such as "8B". dtype: of its weights.

    Raises:
        ConfigError: the size is none, or cannot be reached from this source; the device is not there.
        ModelLoadError: there is no such source.
        NotEnoughMemoryError: it does not fit into the device's memory.
    """
    target_device = resolve_device(device)
    model = load_transformers_model(source, dtype)
    if model.config.model_type not in ("llama", "mistral"):
        raise ConfigError(
            f"{source} is a {model.config.model_type} model, but Llama and Mistral models can be widened."
        )
    shape = wide_shape(model.config, parse_parameters(parameters))
    needed = shape.parameters * model.dtype.itemsize
    available = torch.cuda.mem_get_info(target_device)[0] if target_device.type == "cuda" else available_memory()
    if available is not None and needed > available:
        raise NotEnoughMemoryError(
            f"{parameters} parameters in {dtype} take {needed / GIB:.1f} GiB, but {available / GIB:.1f} GiB of memory "
            f"are available on {target_device}. Give fewer.",
            needed,
            available,
        )
    return widen(model, shape, target_device)


def widen(model: Wide, shape: WideShape, device: torch.device, seed: int = 0) -> Wide:
    """Create a model of this shape on the device, in the number format of `model`, that computes the same logits up to
    rounding. Added weights that reach no state are random."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.hidden_size = shape.hidden_size
    config.intermediate_size = shape.intermediate_size
    config.num_hidden_layers = shape.num_layers
    config.num_attention_heads = shape.num_heads
    config.num_key_value_heads = shape.num_kv_heads
    config.rms_norm_eps = model.config.rms_norm_eps / shape.factor
    torch.manual_seed(seed)
    with torch.device(device):
        wide = type(model)._from_config(config, dtype=model.dtype)
    with torch.no_grad():
        _fill(wide, model, shape)
    return wide.eval().requires_grad_(False)


def _fill(wide: Wide, model: Wide, shape: WideShape) -> None:
    own = wide.state_dict()
    source = model.state_dict()
    for name, tensor in own.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            tensor.zero_()
    shrink = 1 / math.sqrt(shape.factor)
    for name, tensor in source.items():
        if name.endswith("norm.weight"):
            own[name][: len(tensor)] = (tensor * shrink).to(own[name].device)
        elif ".self_attn." in name:
            _place_heads(own[name], tensor.to(own[name].device), name, model.config, shape)
        else:
            own[name][tuple(slice(0, size) for size in tensor.shape)] = tensor.to(own[name].device)


def _place_heads(target: Tensor, source: Tensor, name: str, config: LlamaConfig, shape: WideShape) -> None:
    """Copy each head to where it still reads its key head: rows of queries, keys and values, columns of the output."""
    width = config.head_dim
    kv_heads = config.num_key_value_heads
    old_group = config.num_attention_heads // kv_heads
    new_group = shape.num_heads // shape.num_kv_heads
    if ".k_proj" in name or ".v_proj" in name:
        old_group = new_group = 1
    if ".o_proj" in name:
        target = target.T
        source = source.T
    inputs = source.shape[1]
    for head in range(kv_heads * old_group):
        target_head = head // old_group * new_group + head % old_group
        rows = source[head * width : (head + 1) * width]
        target[target_head * width : (target_head + 1) * width, :inputs] = rows
