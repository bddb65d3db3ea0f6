"""A plain PyTorch loop of many slots, to compare an engine with: what one writes in an afternoon.

Contiguous caches [slots, heads, positions, width], attention by `bmm`, linear layers by torch in the weights' number
format, all slots in step: prompts of one length, answers of one length, greedy. No engine, no scheduler, no kernels of
forerun's. Llama's layers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from forerun.errors import ConfigError
from forerun.models.loading import load_transformers_model

PREFILL_SLOTS = 16
"""Prompts that are computed together."""


class SlotsReference:
    """A Llama whose slots all stand at the same position.

    Args:
        name: a model as `load_model` takes it.
        slots: sequences.
        length: positions of each.
        dtype: of weights and caches.

    Raises:
        ConfigError: it is no plain Llama.
    """

    def __init__(self, name: str | Path, slots: int, length: int, dtype: str = "bfloat16") -> None:
        model = load_transformers_model(name, dtype)
        config: Any = model.config
        if config.model_type != "llama" or getattr(config, "attention_bias", False):
            raise ConfigError(
                f"The loop of slots computes plain Llamas only, but {name} is {config.model_type}. "
                "Give such a model, or leave this part out."
            )
        self._weights: dict[str, Tensor] = {key: value.detach() for key, value in model.state_dict().items()}
        self.num_layers: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._epsilon: float = config.rms_norm_eps
        inverse: Tensor = model.model.rotary_emb.inv_freq.float()
        angles = torch.outer(torch.arange(length).float(), inverse).repeat(1, 2)
        self._cos, self._sin = angles.cos(), angles.sin()
        kind = self._weights["model.embed_tokens.weight"].dtype
        shape = (self.num_layers, slots, self._kv_heads, length, self._width)
        self._keys, self._values = torch.zeros(shape, dtype=kind), torch.zeros(shape, dtype=kind)
        head = "lm_head.weight"
        self._head = self._weights[head if head in self._weights else "model.embed_tokens.weight"]
        self.slots = slots

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, start: int, first_slot: int = 0) -> Tensor:
        """[S, V] float32 logits of the last of [S, T] tokens, which stand at `start` and after in slots from the first
        one on. Keys and values are kept."""
        slots, count = token_ids.shape
        part = slice(first_slot, first_slot + slots)
        hidden = self._weights["model.embed_tokens.weight"][token_ids]
        cos, sin = (table[start : start + count].to(hidden.dtype) for table in (self._cos, self._sin))
        mask = torch.full((count, start + count), -math.inf).triu(start + 1) if count > 1 else None
        for layer in range(self.num_layers):
            hidden = hidden + self._attention(layer, hidden, part, start, cos, sin, mask)
            hidden = hidden + self._mlp(layer, hidden)
        last = self._norm(hidden[:, -1], "model.norm.weight")
        return linear(last, self._head).float()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy answers of so many tokens. prompts: one per slot, all of one length."""
        tokens = torch.tensor(prompts)
        parts = [
            self.forward(tokens[first : first + PREFILL_SLOTS], 0, first)
            for first in range(0, len(tokens), PREFILL_SLOTS)
        ]
        at, new = tokens.shape[1], torch.cat(parts).argmax(-1)
        answers = [new]
        while len(answers) < num_tokens:
            new = self.forward(new[:, None], at).argmax(-1)
            answers.append(new)
            at += 1
        answered: list[list[int]] = torch.stack(answers, 1).tolist()
        return answered

    def _attention(
        self, layer: int, hidden: Tensor, part: slice, start: int, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        slots, count, _ = hidden.shape
        normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
        query, key, value = (
            self._linear(normed, layer, f"self_attn.{name}_proj").view(slots, count, -1, self._width).transpose(1, 2)
            for name in "qkv"
        )
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        end = start + count
        self._keys[layer, part, :, start:end] = key
        self._values[layer, part, :, start:end] = value
        shape = (slots * self._kv_heads, end, self._width)
        keys = self._keys[layer, part, :, :end].reshape(shape)
        values = self._values[layer, part, :, :end].reshape(shape)
        group = self._heads // self._kv_heads
        rows = query.reshape(slots * self._kv_heads, group * count, self._width)
        scores = torch.bmm(rows, keys.transpose(1, 2)).float() / math.sqrt(self._width)
        if mask is not None:
            scores = scores + mask.repeat(group, 1)
        mixed = torch.bmm(scores.softmax(-1).to(values.dtype), values)
        mixed = mixed.view(slots, self._heads, count, self._width).transpose(1, 2).reshape(slots, count, -1)
        return self._linear(mixed, layer, "self_attn.o_proj")

    def _mlp(self, layer: int, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate = silu(self._linear(normed, layer, "mlp.gate_proj"))
        return self._linear(gate * self._linear(normed, layer, "mlp.up_proj"), layer, "mlp.down_proj")

    def _linear(self, rows: Tensor, layer: int, name: str) -> Tensor:
        return linear(rows, self._weights[f"model.layers.{layer}.{name}.weight"])

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return self._weights[name] * scaled.to(hidden.dtype)


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. rows: [S, H, T, W]; tables: [T, W]."""
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat([-second, first], -1) * sin
