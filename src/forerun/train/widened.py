"""Models of any size in memory that give a small model's text: wider states, more heads, layers, feed-forward columns.

What is added is computed in full and adds nothing. States have the source's numbers first and zeros after them, as the
weights that write to states have zeros in the rows of the others, and in the columns of added heads and feed-forward
columns. A norm over f times as many numbers, of which all added ones are zero, is the source's norm times the square
root of f: its weights are divided by that. f is a power of 4, so that this is exact in any number format. Such a model
is made on the device that computes it, and is saved nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.errors import ConfigError
from forerun.train.padded import GRAIN

_GROUP = 4
"""Query heads per key head, at least."""
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


def wide_shape(config: LlamaConfig, parameters: int) -> WideShape:
    """The shape nearest to so many parameters, of proportions that are about those of published models.

    Raises:
        ConfigError: the source is larger, or is of a shape that cannot be widened.
    """
    layers = max(config.num_hidden_layers, next(count for most, count in _LAYERS if parameters <= most))
    usual = math.sqrt(parameters / (13 * layers))
    factor = 4 ** max(0, round(math.log(usual / config.hidden_size, 4)))
    hidden, width = factor * config.hidden_size, config.head_dim
    group = max(_GROUP, config.num_attention_heads // config.num_key_value_heads)
    kv_heads = max(config.num_key_value_heads, hidden // width // group)
    heads = kv_heads * group
    outer = (1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden + hidden
    attention = 2 * hidden * width * (heads + kv_heads) + 2 * hidden
    columns = round(((parameters - outer) / layers - attention) / (3 * hidden) / GRAIN) * GRAIN
    if columns < config.intermediate_size:
        raise ConfigError(
            f"{parameters:,} parameters are too few for {layers} layers of width {hidden}, which a model in memory of "
            "this source would have. Ask for more."
        )
    total = outer + layers * (attention + 3 * hidden * columns)
    return WideShape(factor, hidden, layers, heads, kv_heads, columns, total)


def widen(model: LlamaForCausalLM, shape: WideShape, device: torch.device, seed: int = 0) -> LlamaForCausalLM:
    """A new model of this shape on the device, in the number format of `model`, that computes the same logits up to
    rounding. Added weights that reach no state are random."""
    config = LlamaConfig.from_dict(model.config.to_dict())
    config.hidden_size, config.intermediate_size = shape.hidden_size, shape.intermediate_size
    config.num_hidden_layers, config.num_attention_heads = shape.num_layers, shape.num_heads
    config.num_key_value_heads = shape.num_kv_heads
    config.rms_norm_eps = model.config.rms_norm_eps / shape.factor
    torch.manual_seed(seed)
    with torch.device(device), _default_dtype(model.dtype):
        wide = LlamaForCausalLM(config)
    with torch.no_grad():
        _fill(wide, model, shape)
    return wide.eval().requires_grad_(False)


def _fill(wide: LlamaForCausalLM, model: LlamaForCausalLM, shape: WideShape) -> None:
    own, source = wide.state_dict(), model.state_dict()
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
    """Each head to where it still reads its key head: rows of queries, keys and values, columns of the output."""
    width, kv_heads = config.head_dim, config.num_key_value_heads
    old_group, new_group = config.num_attention_heads // kv_heads, shape.num_heads // shape.num_kv_heads
    if ".k_proj" in name or ".v_proj" in name:
        old_group = new_group = 1
    if ".o_proj" in name:
        target, source = target.T, source.T
    inputs = source.shape[1]
    for head in range(kv_heads * old_group):
        place = head // old_group * new_group + head % old_group
        rows = source[head * width : (head + 1) * width]
        target[place * width : (place + 1) * width, :inputs] = rows


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
