"""Where the training of an EAGLE head starts: its shape and its first weights."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.heads.eagle_config import EagleConfig
from forerun.models import LanguageModel
from forerun.train.eagle.module import EagleHead
from forerun.train.eagle.options import EagleShape
from forerun.train.heads.start import (
    check_has_layers,
    first_size,
    hidden_size,
    random_matrix,
    sizes_for,
    spread_layers,
    target_config,
)


def head_config(target: str, served: LanguageModel, shape: EagleShape, max_positions: int) -> EagleConfig:
    """The configuration of a head for a target.

    Raises:
        ConfigError: layers that the target does not have, or sizes that contradict each other.
    """
    of_target = target_config(target)
    num_layers: int = of_target.num_hidden_layers
    layers = shape.chosen_layers() or spread_layers(num_layers, shape.version)
    check_has_layers(layers, num_layers, served.name)
    if shape.version == 1 and layers != (num_layers,):
        raise ConfigError(f"version 1 reads layer {num_layers} alone, not {list(layers)}. Leave layers out.")
    is_third = shape.version == 3
    return EagleConfig(
        **sizes_for(of_target, served, shape),
        version=shape.version,
        target_hidden_size=hidden_size(served),
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
    size = first_size(last_states)
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
            value = random_matrix(name, parameter.shape, 1, generator)
        parameter.copy_(value)
    head.check()
