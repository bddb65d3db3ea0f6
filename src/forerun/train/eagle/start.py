"""Where the training of an EAGLE head starts: its shape, its vocabulary and its first weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.heads.eagle_config import EagleConfig
from forerun.models import LanguageModel
from forerun.models.sources import find_source
from forerun.train.data.packed import NO_DOCUMENT, PackedRows
from forerun.train.eagle.module import EagleHead
from forerun.train.eagle.options import EagleShape

DEVIATION = 0.02
"""Of random weights."""
FIRST_SIZE = 0.5
"""Of a head's output before training, over that of the target's last state. For a target of 135 M parameters the first
loss is 12.4, 8.0 and 8.3 with 1, 0.5 and 0.1."""
_ROWS_AT_ONCE = 256


def head_config(target: str, served: LanguageModel, shape: EagleShape, max_positions: int) -> EagleConfig:
    """The configuration of a head for a target.

    Raises:
        ConfigError: layers that the target does not have, or sizes that contradict each other.
    """
    of_target: Any = find_source(target).config().get_text_config()
    num_layers: int = of_target.num_hidden_layers
    layers = shape.chosen_layers() or spread_layers(num_layers, shape.version)
    if max(layers) > num_layers:
        raise ConfigError(
            f"the state entering layer {max(layers)} is asked for, but {served.name} has {num_layers} layers, and "
            f"{num_layers} stands for the state after its final norm. Ask for others."
        )
    if shape.version == 1 and layers != (num_layers,):
        raise ConfigError(f"version 1 reads layer {num_layers} alone, not {list(layers)}. Leave layers out.")
    hidden = int(served.embedding_rows(torch.tensor([0])).shape[1])
    heads = shape.num_heads or of_target.num_attention_heads
    is_third = shape.version == 3
    return EagleConfig(
        version=shape.version,
        vocab_size=served.vocab_size,
        draft_vocab_size=min(shape.draft_vocab, served.vocab_size),
        hidden_size=hidden,
        target_hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=shape.num_kv_heads or getattr(of_target, "num_key_value_heads", None) or heads,
        head_dim=shape.head_dim or getattr(of_target, "head_dim", None) or hidden // heads,
        intermediate_size=shape.intermediate_size or of_target.intermediate_size,
        layers=layers,
        norm_before_fc=is_third,
        norm_before_residual=is_third,
        norm_output=is_third,
        embedding_residual=is_third and not shape.plain_residual,
        own_output_rows=(is_third or shape.is_mtp) and shape.own_output_rows,
        sliding_window=shape.sliding_window or None,
        max_positions=max_positions,
        is_mtp=shape.is_mtp,
    )


def spread_layers(num_layers: int, version: int) -> tuple[int, ...]:
    """The layers whose entering states are read: about a tenth, half and nine tenths of the way, and after the last."""
    if version == 1:
        return (num_layers,)
    chosen = {max(1, round(num_layers * share)) for share in (0.1, 0.5, 0.9)}
    return tuple(sorted({*chosen, num_layers}))


def token_counts(rows: PackedRows) -> Tensor:
    """How often each token of the target's vocabulary stands in the rows, prompts included, [V] int64."""
    counts = torch.zeros(rows.vocab_size, dtype=torch.int64)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        batch = rows.rows(list(range(start, min(len(rows), start + _ROWS_AT_ONCE))))
        counts += torch.bincount(batch.tokens[batch.documents != NO_DOCUMENT], minlength=rows.vocab_size)
    return counts


def draft_vocabulary(counts: Tensor, size: int, always: frozenset[int]) -> Tensor:
    """The ids of the `size` most frequent tokens and of those that are always there, rising; ties to the lower id."""
    counts = counts.clone()
    counts[[token for token in always if token < len(counts)]] = torch.iinfo(counts.dtype).max
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def offsets(vocabulary: Tensor) -> Tensor:
    """d2t: the token of the target less that of the head, for each of the head's."""
    return vocabulary - torch.arange(len(vocabulary))


@torch.no_grad()
def set_first_weights(head: EagleHead, last_states: Tensor, output_rows: Tensor, seed: int) -> None:
    """Set all tensors: the fused state is the target's last one, normalised, the layer adds little to it, and the final
    norm gives it half of its size back: what it predicts is a token too early, and should not be believed too much.

    Args:
        last_states: [n, target hidden] of some tokens.
        output_rows: [V, target hidden] of the draft vocabulary.
    """
    config = head.config
    generator = torch.Generator().manual_seed(seed)
    size = FIRST_SIZE * float(last_states.float().square().mean(-1).sqrt().mean())
    for name, parameter in head.named_parameters():
        if name == "norm.weight":
            value = torch.full((len(parameter),), size)
        elif parameter.ndim == 1:
            value = torch.ones(len(parameter))
        elif name == "fc.weight":
            value = torch.zeros(parameter.shape)
            value[:, -config.target_hidden_size :] = torch.eye(config.hidden_size, config.target_hidden_size)
        elif name == "embedding_residual.weight":
            value = torch.zeros(parameter.shape)
        elif name == "lm_head.weight" and parameter.shape == output_rows.shape:
            value = output_rows.float()
        else:
            value = DEVIATION * torch.randn(parameter.shape, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value /= math.sqrt(2)
        parameter.copy_(value)
    head.check()
