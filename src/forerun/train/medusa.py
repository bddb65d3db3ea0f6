"""The training of Medusa heads: their forward, loss, accuracies and configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.medusa import Medusa
from forerun.drafters.models.medusa.config import RANKS, MedusaConfig
from forerun.drafters.models.medusa.model import EMBEDDING_EPS
from forerun.errors import ConfigError
from forerun.models import LanguageModel
from forerun.train.accelerator import device_of
from forerun.train.heads.evaluate import HeldOut, LogitParts
from forerun.train.heads.loss import ChainTargets, Targets, chain_loss, step_weights, weighted_loss
from forerun.train.heads.module import Augmentation, HeadModule, HeadRows, predicted, product
from forerun.train.heads.options import DECAY, MedusaTraining
from forerun.train.heads.start import HeadKind, hidden_size, target_config
from forerun.train.heads.target_states import HeadInputs
from forerun.train.loop import Batch


class MedusaHead(HeadModule):
    """The trained tensors of Medusa heads, float32, under their names; NaN until they are set."""

    config: MedusaConfig


def head_outputs(
    head: MedusaHead,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    augment: Augmentation | None = None,
) -> Tensor:
    """Compute the inputs of the output layer of the first J heads, [J, A, hidden].

    Args:
        rows: of J steps.
        states: [N, layers, hidden] of the documents' tokens; the last layer's are read.
        embeddings: [N, hidden] of the same, unscaled.
        dtype: of products; the rest is in float32, or float64 for float64.
        augment: noise and dropout of the first layers' input; the residual stays as it is.

    Raises:
        ConfigError: there are fewer heads than steps.
    """
    config = head.config
    if rows.steps > config.num_heads:
        raise ConfigError(f"{config.num_heads} heads draft no {rows.steps} tokens. Ask for {config.num_heads}.")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = states[rows.states[rows.active], -1].to(wide)
    size = state.square().mean(-1, keepdim=True).sqrt()
    read = [state if augment is None else augment(state / size) * size]
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
    """Return the heads' output layers, [V, hidden]: one for all, or one for each. output_rows: the target's."""
    config = head.config
    if config.output_rows == "target":
        return [output_rows]
    names = ["lm_head"] if config.output_rows == "one" else [f"lm_heads.{k}" for k in range(config.num_heads)]
    return [head.get_parameter(f"{name}.weight") for name in names]


def accuracies(found: Iterable[tuple[HeadRows, Tensor]], num_heads: int) -> tuple[float, ...]:
    """Measure `MedusaConfig.accuracies`; none where nothing was found.

    Args:
        found: rows and [K, N] ranks of the text's token among each head's predictions, at the position from whose state
            the target predicts it; below 0 where it does not count.
    """
    tried = torch.zeros(num_heads)
    right = torch.zeros(num_heads, RANKS)
    for rows, ranks in found:
        starts = rows.states[rows.active].to(ranks.device)
        alive = torch.ones(len(starts), dtype=torch.bool, device=ranks.device)
        for k in range(num_heads):
            offsets = starts + 1 + k
            rank = ranks[k, offsets.clamp(max=ranks.shape[1] - 1)]
            alive = alive & (offsets < ranks.shape[1]) & (rank >= 0)
            tried[k] += int(alive.sum())
            alive = alive & (rank < RANKS)
            right[k] += torch.bincount(rank[alive].cpu(), minlength=RANKS)
    if not bool(tried[0]):
        return ()
    return tuple(round(float(value), 4) for value in (right / tried.clamp(min=1)[:, None]).flatten())


class MedusaKind(HeadKind[MedusaTraining]):
    """Trains Medusa heads, also in Hydra's order."""

    module = MedusaHead
    drafter = Medusa

    def __init__(self, options: MedusaTraining) -> None:
        super().__init__(options, options.shape.num_heads, options.shape.num_heads)

    def config(self, name: str, inference_target: LanguageModel, max_positions: int) -> MedusaConfig:
        """Return the heads' shape for a target."""
        shape = self.options.shape
        return MedusaConfig(
            vocab_size=inference_target.vocab_size,
            draft_vocab_size=min(shape.draft_vocab, inference_target.vocab_size),
            target_hidden_size=hidden_size(inference_target),
            num_heads=shape.num_heads,
            layers=(target_config(name).num_hidden_layers,),
            num_layers=shape.num_layers,
            sequential=shape.sequential,
            output_rows=shape.output_rows,
        )

    @torch.no_grad()
    def set_first_weights(self, head: MedusaHead, last_states: Tensor, output_rows: Tensor) -> None:
        """Set all tensors: each head returns the target's state as it is, and output rows are the target's."""
        for name, parameter in head.named_parameters():
            parameter.copy_(output_rows if name.startswith("lm_head") else torch.zeros_like(parameter))
        head.check()

    def finish(self, head: MedusaHead, held_out_of: Callable[[int], HeldOut]) -> None:
        """Measure the accuracies that shape trees."""
        found = accuracies(held_out_of(head.config.num_heads).ranks(head), head.config.num_heads)
        head.config = replace(head.config, accuracies=found)

    def summed_loss(self, head: MedusaHead, inputs: HeadInputs, piece: Batch) -> Tensor:
        """Sum the loss over the heads."""
        options = self.options
        of_target = inputs.target.output_rows
        where = device_of(head)
        rows = inputs.rows.to(where)
        outputs = head_outputs(head, rows, inputs.states, inputs.embeddings, inputs.target.dtype, inputs.augment)
        layers = output_layers(head, of_target)
        if options.position_weights != DECAY:
            chains = ChainTargets.of(inputs, rows, predicted(rows).float(), options)
            return chain_loss([(outputs.transpose(0, 1).flatten(0, 1), layers[0])], chains)[0]
        weights = step_weights(options.step_weight, rows.steps).to(where)[:, None] * rows.valid
        last = inputs.states[rows.predictors, -1]
        targets = Targets(last, of_target, rows.rows, weights, options.loss)  # type: ignore[arg-type]
        if len(layers) == 1:
            return weighted_loss(outputs, None if head.config.output_rows == "target" else layers[0], targets)
        total = torch.zeros((), dtype=outputs.dtype, device=where)
        for k, layer in enumerate(layers):
            part = replace(targets, rows=rows.rows[k : k + 1], weights=weights[k : k + 1])
            total = total + weighted_loss(outputs[k : k + 1], layer, part)
        return total

    def predict(self, head: MedusaHead, inputs: HeadInputs) -> LogitParts:
        """Predict by the first heads, one for each step."""
        outputs = head_outputs(head, inputs.rows, inputs.states, inputs.embeddings, inputs.target.dtype)
        layers = output_layers(head, inputs.target.output_rows)[: len(outputs)]
        if len(layers) == 1:
            return [(outputs, layers[0])]
        # one part for each head, which has features at its step alone
        parts = [torch.zeros_like(outputs) for _ in layers]
        for k, part in enumerate(parts):
            part[k] = outputs[k]
        return list(zip(parts, layers, strict=True))
