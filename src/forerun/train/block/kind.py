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
from forerun.train.heads.options import BlockTraining
from forerun.train.heads.run import Read
from forerun.train.heads.start import HeadKind, shape_for

_OUTPUT, _OUTWARD = "lm_head.weight", "down_proj.weight"
SLOT_SHARE = 0.3
"""Size of the slots' own vectors before training, over that of what they are added to."""


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
        shape = self.options.shape
        config = BlockConfig(
            **shape_for(name, served, shape, max_positions),
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
        if self.options.start:
            self._start = start_of(Path(self.options.start), config, served)
        return config

    def first_value(self, name: str, shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor | None:
        """As `HeadKind.first_value`: bias and confidence say nothing yet, and small vectors tell slots apart."""
        if name in self._start:
            return self._start[name].float()
        if name.startswith("confidence_head") or name.endswith("markov_w2.weight"):
            return torch.zeros(shape)
        if name == "mask_embedding.weight":
            return scale * torch.randn(shape, generator=generator)
        if not name.startswith("slot_"):
            return None
        of_row = scale if name == "slot_embeddings.weight" else 1.0
        value = SLOT_SHARE * of_row * torch.randn(shape, generator=generator)
        value[0] = 0  # it begins as the context's last row
        return value
