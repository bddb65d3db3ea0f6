"""Block heads as a kind of head that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from forerun.drafters.model.block import Block
from forerun.errors import ConfigError
from forerun.heads import BlockConfig, EagleConfig, load_head
from forerun.heads.fingerprint import check_target
from forerun.models import LanguageModel, Model
from forerun.train.block.loss import BlockLoss, block_outputs, logit_parts
from forerun.train.block.module import BlockHead
from forerun.train.heads.module import HeadModule
from forerun.train.heads.options import BlockShape, BlockTraining
from forerun.train.heads.run import Read
from forerun.train.heads.start import HeadKind, first_size, random_matrix, shape_for

_OUTPUT, _OUTWARD = "lm_head.weight", "down_proj.weight"
SLOT_SHARE = 0.3
"""Size of the slots' own vectors before training, over that of what they are added to."""


def block_config(target: str, served: LanguageModel, shape: BlockShape, max_positions: int) -> BlockConfig:
    """The configuration of a head for a target.

    Raises:
        ConfigError: layers or a token that the target does not have, or sizes that contradict each other.
    """
    return BlockConfig(
        **shape_for(target, served, shape, max_positions),
        num_layers=shape.num_layers,
        block_size=shape.block_size,
        context_tokens=shape.context_tokens,
        sample_from_anchor=shape.sample_from_anchor,
        mask_token_id=shape.mask_token,
        markov_rank=shape.markov_rank,
        markov_shared=shape.markov_shared,
        confidence=shape.confidence,
        norm_before_fc=not shape.plain_states,
        own_output_rows=shape.own_output_rows,
    )


def start_of(folder: Path, config: BlockConfig, served: LanguageModel) -> dict[str, Tensor]:
    """What a head with `context_tokens` takes over from a trained EAGLE head: all but the output rows. Of a wider
    feed-forward part, the channels of the largest weights.

    Raises:
        ModelLoadError: there is no head, or it is damaged.
        IncompatibleDrafterError: it is one for another target.
        ConfigError: it is of another kind or other sizes.
    """
    stored = load_head(folder, served.num_layers if isinstance(served, Model) else None)
    check_target(stored.fingerprint, served, str(folder))
    wanted, found = config.layer_of_pairs, stored.config
    if not isinstance(found, EagleConfig):
        raise ConfigError(
            f"{folder} holds a head of the kind {found.kind}, but an EAGLE-3 head is needed to start from."
        )
    free = {"draft_vocab_size", "own_output_rows", "rms_norm_eps", "max_positions", "norm_output", "sliding_window"}
    for name, value in asdict(wanted).items():
        there = getattr(found, name)
        if name not in free and (there < value if name == "intermediate_size" else there != value):
            raise ConfigError(
                f"the head in {folder} has {name} {there}, but the one to be trained {value}: their layers are not "
                "alike. Train both with the same sizes and states (the EAGLE head may have a wider feed-forward part)."
            )
    return _narrowed({name: each for name, each in stored.tensors.items() if name != _OUTPUT}, config.intermediate_size)


def _narrowed(tensors: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """With so many channels of the feed-forward part: those whose weights, in and out, have the largest product."""
    parts = {name: each for name, each in tensors.items() if ".mlp." in name}
    inward = [each.norm(dim=1) for name, each in parts.items() if not name.endswith(_OUTWARD)]
    outward = [each.norm(dim=0) for name, each in parts.items() if name.endswith(_OUTWARD)]
    kept = torch.stack(inward + outward).log().sum(0).topk(width).indices.sort().values
    return tensors | {name: each[:, kept] if name.endswith(_OUTWARD) else each[kept] for name, each in parts.items()}


@torch.no_grad()
def set_first_weights(
    head: BlockHead, last_states: Tensor, output_rows: Tensor, seed: int, start: Mapping[str, Tensor] | None = None
) -> None:
    """Set all tensors: the context is the target's last state, normalised, the layers add little to what stands in the
    slots (`context_tokens`: the last state, told apart by small vectors), the final norm gives half of the size of the
    target's last states, and bias and confidence say nothing yet.

    Args:
        last_states: [n, hidden] of some tokens, after the target's final norm.
        output_rows: [V, hidden] of the draft vocabulary.
        start: tensors that are there already, by name.
    """
    config = head.config
    generator = torch.Generator().manual_seed(seed)
    size = first_size(last_states)
    scale = float(output_rows.float().square().mean().sqrt())
    for name, parameter in head.named_parameters():
        if start and name in start:
            value = start[name].float()
        elif name == "norm.weight":
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
        elif name == "embedding_residual.weight":
            value = torch.zeros(parameter.shape)
        elif name.startswith("slot_"):
            size_of_row = scale if name == "slot_embeddings.weight" else 1.0
            value = SLOT_SHARE * size_of_row * torch.randn(parameter.shape, generator=generator)
            value[0] = 0  # it begins as the context's last row
        elif name == "lm_head.weight":
            value = output_rows.float()
        else:
            value = random_matrix(name, parameter.shape, config.num_layers, generator)
        parameter.copy_(value)
    head.check()


def block_guess(head: HeadModule, read: Read) -> list[tuple[Tensor, Tensor]]:
    """As `evaluate.Guess`: of a block at every active row, as many tokens as there are steps, each after the text's
    token before it."""
    assert isinstance(head, BlockHead)
    outputs, before = block_outputs(head, read.rows, read)
    parts = logit_parts(head, read.target, outputs.flatten(0, 1), before.flatten())
    return [(features.view(*before.shape, -1).transpose(0, 1), layer) for features, layer in parts]


class BlockKind(HeadKind[BlockTraining]):
    """Block heads."""

    loss = BlockLoss
    guess = staticmethod(block_guess)

    module, drafter = BlockHead, Block

    def __init__(self, options: BlockTraining) -> None:
        super().__init__(options, options.shape.block_size)
        if options.start and not options.shape.context_tokens:
            raise ConfigError("start is given, but only a head with context_tokens has the layer of an EAGLE head.")
        self._start: Mapping[str, Tensor] = {}

    def config(self, name: str, served: LanguageModel, max_positions: int) -> BlockConfig:
        """As `HeadKind.config`.

        Raises:
            ModelLoadError, IncompatibleDrafterError, ConfigError: the head to start from is none, or not such a one.
        """
        config = block_config(name, served, self.options.shape, max_positions)
        if self.options.start:
            self._start = start_of(Path(self.options.start), config, served)
        return config

    def set_first_weights(self, head: BlockHead, last_states: Tensor, output_rows: Tensor) -> None:
        """As `HeadKind.set_first_weights`."""
        set_first_weights(head, last_states, output_rows, self.options.seed, self._start)
