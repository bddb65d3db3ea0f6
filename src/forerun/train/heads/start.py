"""Where the training of a head starts, and what differs between kinds of heads in training them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from forerun.drafters.heads.config import HeadConfig
from forerun.errors import ConfigError
from forerun.models import LanguageModel
from forerun.models.loading.find_source import find_source
from forerun.train.data.packed import NO_DOCUMENT, PackedShard
from forerun.train.heads.evaluate import Guess, HeldOut
from forerun.train.heads.options import EVALUATED_TOKENS, LayerShape, layer_numbers
from forerun.train.heads.run import Options

DEVIATION = 0.02
"""Of random weights."""
FIRST_SIZE = 0.5
"""Of a head's output before training, over that of the target's last state. For a target of 135 M parameters the first
loss is 12.4, 8.0 and 8.3 with 1, 0.5 and 0.1."""
_ROWS_AT_ONCE = 256


def target_config(target: str) -> Any:
    """Transformers' configuration of a target's decoder. target: as `load_model` takes it."""
    return find_source(target).config().get_text_config()


def hidden_size(served: LanguageModel) -> int:
    """Of the target's states and embeddings."""
    return int(served.embedding_rows(torch.tensor([0])).shape[1])


def shape_for(
    target: str, served: LanguageModel, shape: LayerShape, max_positions: int, version: int = 3
) -> dict[str, Any]:
    """What configurations of heads with decoder layers share: sizes of the target's width, layers, positions.

    Raises:
        ConfigError: the target has no such layers.
    """
    of_target, hidden = target_config(target), hidden_size(served)
    num_layers: int = of_target.num_hidden_layers
    layers = layer_numbers(shape.layers) or spread_layers(num_layers, version)
    if max(layers) > num_layers:
        raise ConfigError(
            f"the state entering layer {max(layers)} is asked for, but {served.name} has {num_layers} layers, and "
            f"{num_layers} stands for the state after its final norm. Ask for others."
        )
    if version == 1 and layers != (num_layers,):
        raise ConfigError(f"version 1 reads layer {num_layers} alone, not {list(layers)}. Leave layers out.")
    heads = shape.num_heads or of_target.num_attention_heads
    return {
        "vocab_size": served.vocab_size,
        "draft_vocab_size": min(shape.draft_vocab, served.vocab_size),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": shape.num_kv_heads or getattr(of_target, "num_key_value_heads", None) or heads,
        "head_dim": shape.head_dim or getattr(of_target, "head_dim", None) or hidden // heads,
        "intermediate_size": shape.intermediate_size or of_target.intermediate_size,
        "layers": layers,
        "sliding_window": shape.sliding_window or None,
        "max_positions": max_positions,
    }


def spread_layers(num_layers: int, version: int) -> tuple[int, ...]:
    """The layers whose entering states are read: about a tenth, half and nine tenths of the way, and after the last."""
    if version == 1:
        return (num_layers,)
    chosen = {max(1, round(num_layers * share)) for share in (0.1, 0.5, 0.9)}
    return tuple(sorted({*chosen, num_layers}))


def token_counts(rows: PackedShard) -> Tensor:
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


class HeadKind(ABC, Generic[Options]):
    """A kind of head, with what its training was told.

    Attributes:
        loss: makes its loss.
        guess: what it predicts of texts.
        module: its tensors for a configuration, not set yet.
        drafter: drafts a chain with a stored head, not yet bound to a target.
        num_draft_tokens: K of the evaluations.

    Raises:
        ConfigError: K was asked for, and the head drafts fewer tokens.
    """

    loss: ClassVar[Any]
    guess: Guess
    module: ClassVar[Any]
    drafter: ClassVar[Any]

    def __init__(self, options: Options, most: int | None = None) -> None:
        """most: tokens of a draft; None for no bound."""
        self.options, asked = options, options.num_draft_tokens
        if asked is not None and most is not None and asked > most:
            raise ConfigError(
                f"num_draft_tokens is {asked}, but such a head drafts {most} tokens at most. Evaluate with no more, "
                "or train a head that drafts more."
            )
        self.num_draft_tokens = asked or min(EVALUATED_TOKENS, most or EVALUATED_TOKENS)

    @abstractmethod
    def config(self, name: str, served: LanguageModel, max_positions: int) -> HeadConfig:
        """Its shape for a target. Raises ConfigError where the target has no such layers, or sizes contradict."""

    def first_value(self, name: str, shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor | None:
        """The first value of a tensor of this kind of head alone; None for the others.

        scale: root mean square of the output rows.
        """
        return None

    @torch.no_grad()
    def set_first_weights(self, head: Any, last_states: Tensor, output_rows: Tensor) -> None:
        """Set all tensors: the fused state is the target's last one, normalised, the layers add little to what they
        read, and the final norm gives it half of its size back: what it predicts is a token too early, and should not
        be believed too much.

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
        """Keep beside a trained head what drafting wants to know of held-out answers.

        Args:
            held_out_of: K -> some of them, for drafts of K tokens.
        """
