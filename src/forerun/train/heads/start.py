"""The base of the trained kinds of heads, and the shape, vocabulary and first weights that a head starts with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from forerun.drafters.models.heads.config import HeadConfig
from forerun.errors import ConfigError
from forerun.models import LanguageModel
from forerun.models.families.build import of_first_layer
from forerun.models.loading.source import find_source
from forerun.train.heads.evaluate import HeldOut, LogitParts
from forerun.train.heads.options import EVALUATED_TOKENS, HeadTraining, LayerShape, layer_numbers
from forerun.train.heads.target_states import HeadInputs
from forerun.train.loop import Batch

DEVIATION = 0.02
"""Standard deviation of random weights."""
FIRST_SIZE = 0.5
"""Size of a head's output before training, over that of the target's last state. For a target of 135 M parameters the
first loss is 12.4, 8.0 and 8.3 with 1, 0.5 and 0.1."""

Options = TypeVar("Options", bound=HeadTraining)


class HeadKind(ABC, Generic[Options]):
    """A kind of head with the options of its training.

    Attributes:
        module: its tensors for a configuration, not set yet.
        drafter: drafts a chain with a stored head, not yet bound to a target.
        steps: tokens of a draft that are learnt.
        num_draft_tokens: K of the evaluations.

    Args:
        most: tokens of a draft at most; None for no bound.

    Raises:
        ConfigError: the options' K is above `most`.
    """

    module: ClassVar[Any]
    drafter: ClassVar[Any]

    def __init__(self, options: Options, steps: int, most: int | None = None) -> None:
        self.options = options
        self.steps = steps
        chosen = options.num_draft_tokens
        if chosen is not None and most is not None and chosen > most:
            raise ConfigError(
                f"num_draft_tokens is {chosen}, but such a head drafts {most} tokens at most. Evaluate with no more, "
                "or train a head that drafts more."
            )
        self.num_draft_tokens = chosen or min(EVALUATED_TOKENS, most or EVALUATED_TOKENS)

    @abstractmethod
    def config(self, name: str, inference_target: LanguageModel, max_positions: int) -> HeadConfig:
        """Return the head's shape for a target.

        Raises:
            ConfigError: the target has no such layers, or sizes contradict each other.
        """

    @abstractmethod
    def summed_loss(self, head: Any, inputs: HeadInputs, piece: Batch) -> Tensor:
        """Sum the loss over wanted tokens; the weights of the tokens of a draft sum up to 1."""

    @abstractmethod
    def predict(self, head: Any, inputs: HeadInputs) -> LogitParts:
        """Predict the tokens after those of a text (see `LogitParts`)."""

    def first_value(self, name: str, shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor | None:
        """Return the first value of a tensor that only this kind of head has; None for the others.

        scale: root mean square of the output rows.
        """
        return None

    @torch.no_grad()
    def set_first_weights(self, head: Any, last_states: Tensor, output_rows: Tensor) -> None:
        """Set all tensors.

        The fused state is the target's last one, normalised, the layers add little to what they read, and the final
        norm gives the state half of its size back: the state predicts the token before, and the head should not be
        confident of that one.

        Args:
            last_states: [n, target hidden] of some tokens, after the target's final norm.
            output_rows: [V, target hidden] of the draft vocabulary.
        """
        generator = torch.Generator().manual_seed(self.options.seed)
        size = FIRST_SIZE * float(last_states.float().square().mean(-1).sqrt().mean())
        scale = float(output_rows.float().square().mean().sqrt())
        depth = 2 * getattr(head.config, "num_layers", 1)
        for name, parameter in head.named_parameters():
            value = self.first_value(name, parameter.shape, scale, generator)
            if value is not None:
                pass
            elif name == "norm.weight":
                value = torch.full(parameter.shape, size)
            elif parameter.ndim == 1:
                value = torch.ones(parameter.shape)
            elif name == "fc.weight":
                width = last_states.shape[-1]
                value = torch.zeros(parameter.shape)
                value[:, -width:] = torch.eye(len(parameter), width)
            elif name == "embedding_residual.weight":
                value = torch.zeros(parameter.shape)
            elif name == "lm_head.weight" and parameter.shape == output_rows.shape:
                value = output_rows.float()
            else:
                value = DEVIATION * torch.randn(parameter.shape, generator=generator)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    value = value / math.sqrt(depth)
            parameter.copy_(value)
        head.check()

    def finish(self, head: Any, held_out_of: Callable[[int], HeldOut]) -> None:
        """Measure on held-out answers what drafting reads from a trained head's configuration.

        Args:
            held_out_of: K -> some of them, for drafts of K tokens.
        """


def target_config(target: str) -> Any:
    """Return Transformers' configuration of a target's decoder. target: as `load_model` takes it."""
    return find_source(target).config().get_text_config()


def hidden_size(inference_target: LanguageModel) -> int:
    """Return the width of the target's states and embeddings."""
    return int(inference_target.embedding_rows(torch.tensor([0])).shape[1])


def shape_for(
    target: str, inference_target: LanguageModel, shape: LayerShape, max_positions: int, version: int = 3
) -> dict[str, Any]:
    """Return the fields that configurations of heads with decoder layers share: sizes, layers, positions.

    Raises:
        ConfigError: the target has no such layers.
    """
    of_target = target_config(target)
    hidden = hidden_size(inference_target)
    num_layers: int = of_target.num_hidden_layers
    layers = layer_numbers(shape.layers) or spread_layers(num_layers, version)
    if max(layers) > num_layers:
        raise ConfigError(
            f"the state entering layer {max(layers)} is asked for, but {inference_target.name} has {num_layers} "
            f"layers, and {num_layers} stands for the state after its final norm. Ask for others."
        )
    if version == 1 and layers != (num_layers,):
        raise ConfigError(f"version 1 reads layer {num_layers} alone, not {list(layers)}. Leave layers out.")
    heads = of_target.num_attention_heads
    own = of_first_layer(of_target)
    return {
        "vocab_size": inference_target.vocab_size,
        "draft_vocab_size": min(shape.draft_vocab, inference_target.vocab_size),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": getattr(own, "num_key_value_heads", None) or heads,
        "head_dim": getattr(own, "head_dim", None) or hidden // heads,
        "intermediate_size": shape.intermediate_size or of_target.intermediate_size,
        "layers": layers,
        "sliding_window": shape.sliding_window or None,
        "max_positions": max_positions,
    }


def spread_layers(num_layers: int, version: int) -> tuple[int, ...]:
    """Return the layers whose entering states are read: about a tenth, half and nine tenths of the way, and the last's
    output."""
    if version == 1:
        return (num_layers,)
    return tuple(sorted({num_layers, *(max(1, round(num_layers * share)) for share in (0.1, 0.5, 0.9))}))
