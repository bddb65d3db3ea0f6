"""The target's hidden states of many documents at once, for training alone.

A document's states need not be the same bits whatever stands beside it, so the products may take the shapes that are
quickest: Transformers' modules compute all documents as one row of bfloat16, and attention goes document by document.
That these are the states which the served model gives is checked before a run (`check_states`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from forerun.errors import ConfigError, UnsupportedModelError
from forerun.models import LanguageModel, Rows
from forerun.train.accelerator import SHAPE_STEP

NAME = "forerun_documents"
MOST_APART = 0.1
"""Largest root-mean-square difference of a layer's states, over their size, between this forward and the served one.
bfloat16 gives about 0.01; states of another layer differ by more than their size."""
CHECKED_TOKENS = 128
_NOT_SERVED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that change its scores and are not computed here."""


class TargetStates:
    """The states that enter chosen layers.

    Args:
        model: the target as Transformers computes it, in evaluation mode.
        layers: rising; the number of its layers stands for the state after the final norm.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        if model.config._attn_implementation != NAME:
            AttentionInterface.register(NAME, _forward)
            model.set_attn_implementation(NAME)
        self.layers = tuple(layers)
        self._decoder: Any = model.get_decoder()

    def replica(self) -> TargetStates:
        """Another one of the same weights, for another thread."""
        other = copy.copy(self)
        memo: dict[int, Any] = {id(each): each for each in (*self._decoder.parameters(), *self._decoder.buffers())}
        other._decoder = copy.deepcopy(self._decoder, memo)
        return other

    @torch.no_grad()
    def of(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """[N, layers, H] bfloat16 of documents that lie one after another. token_ids: [N] int64."""
        where = next(self._decoder.parameters()).device
        count = len(token_ids)
        if count % SHAPE_STEP:  # one more document, of which nothing is read
            lengths = [*lengths, -count % SHAPE_STEP]
            token_ids = F.pad(token_ids, (0, lengths[-1]))
        positions = torch.cat([torch.arange(length) for length in lengths])
        found = self._decoder(
            input_ids=token_ids[None].to(where),
            position_ids=positions[None].to(where),
            use_cache=False,
            output_hidden_states=True,
            document_lengths=tuple(lengths),
        ).hidden_states
        return torch.stack([found[layer][0, :count] for layer in self.layers], 1).bfloat16()


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    document_lengths: Sequence[int] = (),
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature Transformers calls. query: [1, heads, N, D]; the mask is not read."""
    for name in _NOT_SERVED:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"attention with {name} cannot be trained for. Choose another target.")
    queries, keys, values = (torch.split(part, list(document_lengths), 2) for part in (query, key, value))
    attended = [
        _one(*document, scaling=scaling, window=sliding_window) for document in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(attended, 2).transpose(1, 2).contiguous(), None


def _one(query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None) -> Tensor:
    length = query.shape[2]
    if window is not None and length > window:
        places = torch.arange(length, device=query.device)
        apart = places[:, None] - places
        seen = (apart >= 0) & (apart < window)
        return F.scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)


def learnt_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers whose states a head reads, and after them the state after the final norm, which gives the target's
    distribution whether the head reads it or not."""
    return (*(layer for layer in layers if layer < num_layers), num_layers)


def served_states(served: LanguageModel, token_ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """[n, layers, H] of one document, as the model gives them that the head will draft for."""
    cache = served.new_cache()
    try:
        hidden_outputs = served.forward(
            [Rows(cache, list(token_ids), num_logits=1, num_hidden_outputs=len(token_ids))], layers
        ).hidden_outputs
    finally:
        cache.free()
    assert hidden_outputs is not None
    return hidden_outputs


def check_states(states: TargetStates, served: LanguageModel, token_ids: Sequence[int]) -> list[float]:
    """Compare the states of one document in training with those in drafting.

    Returns:
        For each layer, the root-mean-square difference over the states' size.

    Raises:
        ConfigError: a layer's differ by more than rounding.
    """
    document = list(token_ids[:CHECKED_TOKENS])
    # the first token's state is larger than all others by orders of magnitude in many models
    expected = served_states(served, document, states.layers).float().cpu()[1:]
    found = states.of(torch.tensor(document), [len(document)]).float().cpu()[1:]
    apart = ((found - expected).square().mean((0, 2)) / expected.square().mean((0, 2))).sqrt().tolist()
    for layer, difference in zip(states.layers, apart, strict=True):
        if not difference <= MOST_APART:
            raise ConfigError(
                f"the states entering layer {layer} of {served.name} differ by {difference:.0%} of their size between "
                "training and drafting, so that a head trained on them would not fit. Report the architecture."
            )
    return apart
