"""Medusa heads as training computes them: all rows of some documents at once.

The tensors, their names and their meaning are those of `MedusaConfig`. The rows are those of `heads/rows.py`: step k of
the row of a place is head k at that place's state, which predicts the token k + 2 further on, and the tokens of the
steps up to k are those that a sequential head reads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import ConfigError
from forerun.heads.medusa_config import MedusaConfig
from forerun.models.medusa import EMBEDDING_EPS
from forerun.train.heads.module import Augmentation, HeadModule, product
from forerun.train.heads.rows import HeadRows


class MedusaHead(HeadModule):
    """The trained tensors of Medusa heads, float32, under their names; NaN until they are set."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.config: MedusaConfig = config


def head_outputs(
    head: MedusaHead,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    augment: Augmentation | None = None,
) -> Tensor:
    """[J, A, hidden] what the output layer reads of the first J heads.

    Args:
        rows: of J steps.
        states: [N, layers, hidden] of the documents' tokens; the last layer's are read.
        embeddings: [N, hidden] of the same, unscaled.
        dtype: of products; the rest is in float32, or float64 for float64.
        augment: of what the heads' first layers read; what is passed by them stays as it is.

    Raises:
        ConfigError: there are fewer heads than steps.
    """
    config = head.config
    if rows.steps > config.num_heads:
        raise ConfigError(f"{config.num_heads} heads draft no {rows.steps} tokens. Ask for {config.num_heads}.")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = states[rows.states[rows.active], -1].to(wide)
    read = [state if augment is None else _augmented(state, augment)]
    outputs = []
    for k in range(rows.steps):
        if config.sequential:
            embedding = embeddings[rows.tokens[k]].to(wide)
            read.append(F.rms_norm(embedding, embedding.shape[-1:], eps=EMBEDDING_EPS))
        x = state
        for layer in range(config.num_layers):
            name = f"blocks.{k}.layers.{layer}"
            h = product(x if layer else torch.cat(read, -1), head.get_parameter(f"{name}.weight").to(dtype))
            x = x + F.silu(h + head.get_parameter(f"{name}.bias"))
        outputs.append(x)
    return torch.stack(outputs)


def output_layers(head: MedusaHead, output_rows: Tensor) -> list[Tensor]:
    """[V, hidden] of the heads' output layers: one of all, or one of each. output_rows: the target's."""
    config = head.config
    if config.output_rows == "target":
        return [output_rows]
    names = ["lm_head"] if config.output_rows == "one" else [f"lm_heads.{k}" for k in range(config.num_heads)]
    return [head.get_parameter(f"{name}.weight") for name in names]


@torch.no_grad()
def set_first_weights(head: MedusaHead, output_rows: Tensor) -> None:
    """Set all tensors: each head gives the target's state as it is, and output rows are the target's."""
    for name, parameter in head.named_parameters():
        parameter.copy_(output_rows if name.startswith("lm_head") else torch.zeros_like(parameter))
    head.check()


def _augmented(state: Tensor, augment: Augmentation) -> Tensor:
    """With noise and dropout of the state over its size."""
    size = state.square().mean(-1, keepdim=True).sqrt()
    return augment(state / size) * size
