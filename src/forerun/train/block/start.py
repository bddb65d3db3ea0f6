"""Where the training of a block head starts: its shape and its first weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.heads.block_config import BlockConfig
from forerun.models import LanguageModel
from forerun.models.sources import find_source
from forerun.train.block.module import BlockHead
from forerun.train.block.options import BlockShape
from forerun.train.eagle.options import layer_numbers
from forerun.train.eagle.start import DEVIATION, FIRST_SIZE, spread_layers


def block_config(target: str, served: LanguageModel, shape: BlockShape, max_positions: int) -> BlockConfig:
    """The configuration of a head for a target.

    Raises:
        ConfigError: layers or a token that the target does not have, or sizes that contradict each other.
    """
    of_target: Any = find_source(target).config().get_text_config()
    num_layers: int = of_target.num_hidden_layers
    layers = layer_numbers(shape.layers) or spread_layers(num_layers, 3)
    if max(layers) > num_layers:
        raise ConfigError(
            f"the state entering layer {max(layers)} is asked for, but {served.name} has {num_layers} layers, and "
            f"{num_layers} stands for the state after its final norm. Ask for others."
        )
    hidden = int(served.embedding_rows(torch.tensor([0])).shape[1])
    heads = shape.num_heads or of_target.num_attention_heads
    return BlockConfig(
        vocab_size=served.vocab_size,
        draft_vocab_size=min(shape.draft_vocab, served.vocab_size),
        hidden_size=hidden,
        num_layers=shape.num_layers,
        num_heads=heads,
        num_kv_heads=shape.num_kv_heads or getattr(of_target, "num_key_value_heads", None) or heads,
        head_dim=shape.head_dim or getattr(of_target, "head_dim", None) or hidden // heads,
        intermediate_size=shape.intermediate_size or of_target.intermediate_size,
        layers=layers,
        block_size=shape.block_size,
        sample_from_anchor=shape.sample_from_anchor,
        mask_token_id=shape.mask_token,
        markov_rank=shape.markov_rank,
        confidence=not shape.no_confidence,
        norm_before_fc=not shape.plain_states,
        own_output_rows=shape.own_output_rows,
        sliding_window=shape.sliding_window or None,
        max_positions=max_positions,
    )


@torch.no_grad()
def set_first_weights(head: BlockHead, last_states: Tensor, output_rows: Tensor, seed: int) -> None:
    """Set all tensors: the context is the target's last state, normalised, the layers add little to what stands in the
    slots, the final norm gives half of the size of the target's last states, and bias and confidence say nothing yet.

    Args:
        last_states: [n, hidden] of some tokens, after the target's final norm.
        output_rows: [V, hidden] of the draft vocabulary.
    """
    config = head.config
    generator = torch.Generator().manual_seed(seed)
    size = FIRST_SIZE * float(last_states.float().square().mean(-1).sqrt().mean())
    scale = float(output_rows.float().square().mean().sqrt())
    for name, parameter in head.named_parameters():
        if name == "norm.weight":
            value = torch.full(parameter.shape, size)
        elif name == "mask_embedding.weight":
            value = scale * torch.randn(parameter.shape, generator=generator)
        elif name.startswith("confidence_head") or name.endswith("markov_w2.weight"):
            value = torch.zeros(parameter.shape)
        elif parameter.ndim == 1:
            value = torch.ones(parameter.shape)
        elif name == "fc.weight":
            value = torch.zeros(parameter.shape)
            value[:, -config.hidden_size :] = torch.eye(config.hidden_size)
        elif name == "lm_head.weight":
            value = output_rows.float()
        else:
            value = DEVIATION * torch.randn(parameter.shape, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value /= math.sqrt(2 * config.num_layers)
        parameter.copy_(value)
    head.check()
