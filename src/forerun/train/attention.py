"""Attention for training and sampling on a CPU with short windows: two plain products and a softmax.

PyTorch's fused CPU kernel recomputes scores block by block, which is faster for long windows only. At
512 tokens and bfloat16 the plain form takes 27 ms a layer, forward and backward, against 50 ms; for
one new token in each of 128 sequences of 300 tokens, 7 ms against 18.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "forerun_short_window"
LONGEST_WINDOW = 512
"""Above this many tokens PyTorch's fused kernel is the faster one."""


def document_mask(documents: Tensor) -> Tensor:
    """What each position may see where a row holds several documents: itself, and those before it in its document.

    documents: [B, T]; returns bool [B, 1, T, T], as Transformers takes it for attention_mask.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, seen: Tensor | None = None) -> Tensor:
    """Causal grouped-query attention over one whole window.

    query [B, H, T, D], key and value [B, G, T, D] with H a multiple of G; seen bool [B, 1, T, T], in place of all
    before (`document_mask`); returns [B, H, T, D].
    """
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    per_group = heads // groups
    rows = query.reshape(batch * groups, per_group * length, width)
    keys = key.reshape(batch * groups, length, width)
    values = value.reshape(batch * groups, length, width)
    if seen is None:
        hidden = torch.full((length, length), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
        mask = hidden.repeat(per_group, 1).unsqueeze(0)
    else:
        hidden = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, float("-inf"))
        mask = hidden[:, 0].repeat(1, per_group, 1).repeat_interleave(groups, 0)
    scores = torch.baddbmm(mask, rows, keys.transpose(1, 2), alpha=scaling)
    weights = torch.softmax(scores, dim=-1, dtype=query.dtype)
    return torch.bmm(weights, values).view(batch, heads, length, width)


def newest_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention of the newest token over all of its sequence: query [B, H, 1, D], key and value [B, G, T, D]."""
    batch, heads, _, width = query.shape
    grouped = query.view(batch, key.shape[1], -1, width)
    weights = torch.softmax(torch.matmul(grouped, key.transpose(2, 3)) * scaling, dim=-1)
    return torch.matmul(weights, value).view(batch, heads, 1, width)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature Transformers calls: a whole window, in which documents may lie one after another, or the newest
    token of one that holds nothing else."""
    if query.shape[2] == 1:
        attended = newest_attention(query, key, value, scaling)
    else:
        attended = causal_attention(query, key, value, scaling, attention_mask)
    return attended.transpose(1, 2).contiguous(), None


def use_for(model: nn.Module, window: int) -> None:
    """Choose the attention of a model of Transformers' that is faster at `window` tokens on its device."""
    if not isinstance(model, PreTrainedModel):
        return
    on_cpu = next(model.parameters()).device.type == "cpu"
    chosen = NAME if on_cpu and window <= LONGEST_WINDOW else "sdpa"
    if model.config._attn_implementation != chosen:
        AttentionInterface.register(NAME, _forward)
        model.set_attn_implementation(chosen)
