"""The training of block heads: blocks at many anchors of some documents at once, their loss and first weights.

The tensors, their names and their meaning are those of `BlockConfig`, and the rows those of `heads/module.py`: row i
reads the target's state of token i, and the block of an active row i is anchored at token i + 1. Its slots attend to
the rows of the document up to i, and to each other, as in drafting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.block import Block
from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.folder import load_head
from forerun.drafters.models.heads.fingerprint import check_target
from forerun.errors import ConfigError
from forerun.models import LanguageModel, Model
from forerun.train.accelerator import device_of
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads.evaluate import LogitParts
from forerun.train.heads.loss import ChainTargets, Parts, chain_loss
from forerun.train.heads.module import (
    Augmentation,
    DocumentRows,
    HeadLayer,
    HeadModule,
    HeadRows,
    context_mask,
    predicted,
    rotated,
)
from forerun.train.heads.options import DECAY, BlockTraining
from forerun.train.heads.start import HeadKind, shape_for
from forerun.train.heads.target_states import HeadInputs, TrainingTarget
from forerun.train.loop import Batch

Keys = tuple[Tensor, Tensor]
"""Keys and values."""


class BlockHeadModule(HeadModule):
    """The trained tensors of a head, float32, under their names; NaN until they are set."""

    config: BlockConfig


def blocks(
    head: BlockHeadModule,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
    augment: Augmentation | None = None,
) -> Tensor:
    """Compute the output layer's inputs, [A, K, hidden], for the K tokens of each active row's block.

    Args:
        rows: unrolled as many steps as tokens are drafted.
        states: [N, layers, hidden] of the documents' tokens; there may be one more, which is not read.
        embeddings: [N, hidden] of the same, unscaled.
        mask: [hidden], the embedding of the slots after the first; None for a head with `context_tokens`.
        dtype: of products; sums, norms and the residual are in float32, or float64 for float64.

    Raises:
        ConfigError: a block has fewer tokens than there are steps.
    """
    config = head.config
    size = head.config.block_size
    if rows.steps > size:
        raise ConfigError(f"blocks of {size} tokens draft no {rows.steps} tokens. Ask for {size}.")
    if config.context_tokens:
        return blocks_of_pairs(head, config, rows, states, embeddings, dtype, augment)
    assert mask is not None
    layer = _Layers(head, config, dtype, rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    context = layer.fused(states[rows.states].to(wide), augment)
    slots = rows.steps + config.first_slot
    x = mask.to(wide).expand(len(rows.active), slots, -1)
    x = torch.cat([embeddings[rows.tokens[0]].to(wide)[:, None], x[:, 1:]], 1)
    for index in range(config.num_layers):
        x = layer.forward(f"layers.{index}.", context, x)
    return layer.norm("norm", x[:, config.first_slot :])


class _Layers(HeadLayer[BlockConfig]):
    """Computes the decoder layers."""

    def fused(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """Fuse states [R, layers, H] to the context [R, H]. There may be one layer more."""
        return self.norm("hidden_norm", self.linear("fc", self.joined(states, augment)))

    def forward(self, name: str, context: Tensor, x: Tensor) -> Tensor:
        """Compute the layer of this name. x: [A, slots, H]."""
        normed = self.norm(f"{name}input_layernorm", x)
        positions = self.rows.positions[self.rows.active, None] + 1 + torch.arange(x.shape[1], device=x.device)
        query = self.heads(name, "q", normed, positions)
        key = self.heads(name, "k", normed, positions)
        value = self.heads(name, "v", normed)
        keys = self.heads(name, "k", context, self.rows.positions)
        values = self.heads(name, "v", context)
        found = attended(self.config, self.rows, query, (key, value), (keys, values))
        return self.feed_forward(x + self.linear(f"{name}self_attn.o_proj", found), name)

    def heads(self, name: str, kind: str, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Project to [..., heads, head_dim], normalised and rotated where positions, [...], are given."""
        found = self.linear(f"{name}self_attn.{kind}_proj", x)
        found = found.view(*x.shape[:-1], -1, self.config.head_dim)
        if positions is None:
            return found
        return rotated(self.norm(f"{name}self_attn.{kind}_norm", found), positions, self.config.rope_theta)


def blocks_of_pairs(
    head: HeadModule,
    config: BlockConfig,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    dtype: torch.dtype,
    augment: Augmentation | None,
) -> Tensor:
    """Compute `blocks` of a head with `context_tokens`."""
    layer = _PairLayer(head, config, dtype, rows, prefix="midlayer.", kept="slot_")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    fused = layer.fused(states[rows.states].to(wide), augment)
    following = embeddings.to(wide)[rows.states + 1]
    keys, values = layer.keys(layer.read(following, fused), rows.positions)
    own_embeddings = following[rows.active][:, None] + layer.weights["slot_embeddings"][: rows.steps].to(wide)
    own_states = fused[rows.active][:, None] + layer.weights["slot_states"][: rows.steps].to(wide)
    return layer.forward(own_embeddings, own_states, keys, values)


class _PairLayer(HeadLayer[BlockConfig]):
    """Computes the one layer of a head with `context_tokens`; the slots' vectors keep their type."""

    def fused(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """Fuse states [R, layers, H] to [R, H]. There may be one layer more."""
        return self.linear("fc", self.joined(states, augment))

    def read(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Return [..., 2 H], the input of queries, keys and values."""
        return torch.cat([self.norm("input_layernorm", embeddings), self.norm("hidden_norm", states)], -1)

    def keys(self, read: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values, [..., kv heads, head_dim], of rows at these positions."""
        key = self.heads("k", read)
        value = self.heads("v", read)
        return rotated(key, positions, self.config.rope_theta), value

    def heads(self, kind: str, read: Tensor) -> Tensor:
        """Project to [..., heads, head_dim]."""
        found = self.linear(f"self_attn.{kind}_proj", read)
        return found.view(*read.shape[:-1], -1, self.config.head_dim)

    def forward(self, embeddings: Tensor, states: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute the output layer's inputs, [A, slots, H].

        Args:
            embeddings, states: [A, slots, H].
            keys, values: of all rows.
        """
        rows = self.rows
        read = self.read(embeddings, states)
        positions = rows.positions[rows.active, None] + 1 + torch.arange(read.shape[1], device=read.device)
        query = rotated(self.heads("q", read), positions, self.config.rope_theta)
        own = self.keys(read, positions)
        x = self.norm("hidden_norm", states) + self.linear("embedding_residual", embeddings)
        x = x + self.linear("self_attn.o_proj", attended(self.config, rows, query, own, (keys, values)))
        return self.norm("norm", self.feed_forward(x))


def attended(config: BlockConfig, rows: HeadRows, query: Tensor, own: Keys, context: Keys) -> Tensor:
    """Attend from all blocks: [A, slots, heads * head_dim].

    Args:
        query: [A, slots, heads, head_dim].
        own: [A, slots, kv heads, head_dim] each. context: [R, kv heads, head_dim] each.
    """
    return torch.cat([_attend_in_document(config, rows, query, own, context, segment) for segment in rows.segments])


def _attend_in_document(
    config: BlockConfig, rows: HeadRows, query: Tensor, own: Keys, context: Keys, segment: DocumentRows
) -> Tensor:
    """Attend from one document's blocks: [a, slots, heads * head_dim]."""
    here = slice(segment.first_active, segment.last_active)
    key, value = (part[here] for part in own)
    group = config.num_heads // config.num_kv_heads
    width = config.head_dim
    count, slots = key.shape[:2]
    # [kv heads, group, a, slots, head_dim]
    q = query[here].view(count, slots, config.num_kv_heads, group, width).permute(2, 3, 0, 1, 4)
    before, after = (part[segment.first : segment.last].transpose(0, 1) for part in context)
    scores = torch.einsum("hgasd,hrd->hgasr", q, before) * width**-0.5
    scores = scores + context_mask(rows, segment, slots, config.sliding_window, query)[:, None]
    inside = torch.einsum("hgasd,athd->hgast", q, key) * width**-0.5
    weights = torch.softmax(torch.cat([scores, inside], -1), -1)
    attended = torch.einsum("hgasr,hrd->hgasd", weights[..., : before.shape[1]], after)
    attended = attended + torch.einsum("hgast,athd->hgasd", weights[..., before.shape[1] :], value)
    return attended.permute(2, 3, 0, 1, 4).reshape(count, slots, -1)


def choose_anchors(
    rows: HeadRows, wanted: Tensor, documents: Tensor, numbers: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Draw active rows, at most `count` of each packed row, without replacement.

    Args:
        wanted, documents: [packed rows, window + 1], that `rows` were made of.
        numbers: [packed rows], the seeds of each row's draws.

    Returns:
        [a] their indices among the active rows, rising; [a] the weight of each: those of a packed row add up to its
        wanted tokens.
    """
    used = documents != NO_DOCUMENT
    packed = torch.arange(len(documents))[:, None].expand_as(documents)[used]
    of_active = packed[rows.states[rows.active]]
    chosen = []
    counts = []
    for row, number in enumerate(numbers.tolist()):
        members = (of_active == row).nonzero().flatten()
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(number))[:count]
        taken = members[order].sort().values
        chosen.append(taken)
        counts.append(torch.full((len(taken),), float(wanted[row].sum()) / max(1, len(taken))))
    return torch.cat(chosen), torch.cat(counts)


def keep_active(rows: HeadRows, chosen: Tensor) -> HeadRows:
    """Keep only these active rows. `predictors`, `rows` and `valid` stay those of all. chosen: [a], rising."""
    ends = torch.searchsorted(chosen, torch.tensor([segment.last_active for segment in rows.segments])).tolist()
    segments = [
        replace(segment, first_active=first, last_active=last)
        for segment, first, last in zip(rows.segments, [0, *ends], ends, strict=False)
    ]
    return replace(
        rows,
        active=rows.active[chosen],
        tokens=rows.tokens[:, chosen],
        segments=[segment for segment in segments if segment.last_active > segment.first_active],
    )


def position_weights(options: BlockTraining, steps: int) -> Tensor:
    """Return [K] weights of the tokens of a block, exp(-(k - 1) / gamma), of sum 1."""
    weights = torch.exp(-torch.arange(steps, dtype=torch.float32) / options.gamma)
    return weights / weights.sum()


def block_outputs(head: BlockHeadModule, rows: HeadRows, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
    """Compute the output layer's inputs of each block, [A, K, H], and the token before each, [A, K]."""
    mask = mask_of(head, inputs.target)
    dtype = inputs.target.dtype
    outputs = blocks(head, rows, inputs.states, inputs.embeddings, mask, dtype, inputs.augment)
    return outputs, rows.token_ids[rows.tokens.T]


def mask_of(head: BlockHeadModule, target: TrainingTarget) -> Tensor | None:
    """Return [H], the embedding of the slots after the first; None for a head with `context_tokens`."""
    if head.config.context_tokens:
        return None
    if head.config.mask_token_id is None:
        return head.get_parameter("mask_embedding.weight")
    return target.embeddings(torch.tensor([head.config.mask_token_id], device=device_of(head)))[0]


def logit_parts(head: BlockHeadModule, target: TrainingTarget, outputs: Tensor, before: Tensor) -> Parts:
    """Return the summands of the logits: outputs by the output layer, and the tokens before by the Markov bias.

    outputs: [n, H]. before: [n].
    """
    own = head.config.own_output_rows
    parts = [(outputs, head.get_parameter("lm_head.weight") if own else target.output_rows)]
    if head.config.markov_rank:
        embedded = markov_before(head, target, before)
        second = head.get_parameter("markov_head.markov_w2.weight")
        if head.config.markov_shared:  # of the same output rows
            return [(outputs + F.linear(embedded, second).to(outputs.dtype), parts[0][1])]
        parts.append((embedded.to(outputs.dtype), second))
    return parts


def markov_before(head: BlockHeadModule, target: TrainingTarget, before: Tensor) -> Tensor:
    """Return the input of the Markov bias, [..., rank]. before: tokens."""
    first = head.get_parameter("markov_head.markov_w1.weight")
    if not head.config.markov_shared:
        return F.embedding(before, first)
    return F.linear(target.embeddings(before.flatten()).to(first.dtype), first).view(*before.shape, -1)


def confidence_loss(
    head: BlockHeadModule, target: TrainingTarget, outputs: Tensor, before: Tensor, overlaps: Tensor, weights: Tensor
) -> Tensor:
    """Sum weight times the cross-entropy of the confidence against the overlap, 1 - total variation.

    No gradient reaches the features that it is estimated from. All [A, K], outputs [A, K, H].
    """
    features = outputs.detach()
    if head.config.markov_rank and head.config.confidence_with_markov:
        embedded = markov_before(head, target, before).detach()
        features = torch.cat([features, embedded.to(features.dtype)], -1)
    layer = head.get_parameter("confidence_head.proj.weight"), head.get_parameter("confidence_head.proj.bias")
    logits = F.linear(features, layer[0].to(features.dtype), layer[1].to(features.dtype))[..., 0]
    losses = F.binary_cross_entropy_with_logits(logits, overlaps.clamp(0, 1).to(logits.dtype), reduction="none")
    return (losses * weights.to(losses.dtype)).sum()


_OUTPUT = "lm_head.weight"
_OUTWARD = "down_proj.weight"
SLOT_SHARE = 0.3
"""Size of the slots' own vectors before training, over that of the vectors that they are added to."""


def load_start(folder: Path, config: BlockConfig, inference_target: LanguageModel) -> dict[str, Tensor]:
    """Load the tensors that a head with `context_tokens` takes over from a trained EAGLE head: all but the output rows.

    Of a wider feed-forward part, the channels of the largest weights are kept.

    Raises:
        ModelLoadError: there is no head, or it is damaged.
        IncompatibleDrafterError: it is one for another target.
        ConfigError: it is of another kind or other sizes.
    """
    stored = load_head(folder, inference_target.num_layers if isinstance(inference_target, Model) else None)
    check_target(stored.fingerprint, inference_target, str(folder))
    wanted = config.layer_of_pairs
    found = stored.config
    if not isinstance(found, EagleConfig):
        raise ConfigError(
            f"{folder} holds a head of the kind {found.kind}, but an EAGLE-3 head is needed to start from."
        )
    free = {"draft_vocab_size", "own_output_rows", "rms_norm_eps", "max_positions", "norm_output", "sliding_window"}
    for name, value in asdict(wanted).items():
        given = getattr(found, name)
        if name not in free and (given < value if name == "intermediate_size" else given != value):
            raise ConfigError(
                f"the head in {folder} has {name} {given}, but the one to be trained {value}: their layers are not "
                "alike. Train both with the same sizes and states (the EAGLE head may have a wider feed-forward part)."
            )
    return _narrow_feed_forward(
        {name: each for name, each in stored.tensors.items() if name != _OUTPUT}, config.intermediate_size
    )


def _narrow_feed_forward(tensors: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """Keep so many channels of the feed-forward part: those whose weights, in and out, have the largest product."""
    parts = {name: each for name, each in tensors.items() if ".mlp." in name}
    inward = [each.norm(dim=1) for name, each in parts.items() if not name.endswith(_OUTWARD)]
    outward = [each.norm(dim=0) for name, each in parts.items() if name.endswith(_OUTWARD)]
    kept = torch.stack(inward + outward).log().sum(0).topk(width).indices.sort().values
    return tensors | {name: each[:, kept] if name.endswith(_OUTWARD) else each[kept] for name, each in parts.items()}


class BlockKind(HeadKind[BlockTraining]):
    """Trains block heads."""

    module = BlockHeadModule
    drafter = Block

    def __init__(self, options: BlockTraining) -> None:
        super().__init__(options, options.shape.block_size, options.shape.block_size)
        if options.start and not options.shape.context_tokens:
            raise ConfigError("start is given, but only a head with context_tokens has the layer of an EAGLE head.")
        self._start: Mapping[str, Tensor] = {}

    def config(self, name: str, inference_target: LanguageModel, max_positions: int) -> BlockConfig:
        """Return the head's shape for a target, and load the head to start from.

        Raises:
            ConfigError: the shape or the head to start from does not fit.
            ModelLoadError, IncompatibleDrafterError: there is no head to start from, or it is another target's.
        """
        shape = self.options.shape
        config = BlockConfig(
            **shape_for(name, inference_target, shape, max_positions),
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
            self._start = load_start(Path(self.options.start), config, inference_target)
        return config

    def first_value(self, name: str, shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor | None:
        """Return zeros for bias and confidence, and small vectors that distinguish the slots."""
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

    def summed_loss(self, head: BlockHeadModule, inputs: HeadInputs, piece: Batch) -> Tensor:
        """Sum the loss as if there were a block for each wanted token."""
        options = self.options
        where = device_of(head)
        _, wanted, documents, _, numbers = piece
        chosen, counts = choose_anchors(inputs.rows, wanted, documents, numbers, options.anchors)
        weights = (predicted(inputs.rows)[chosen] * counts[:, None]).to(where)
        rows = keep_active(inputs.rows, chosen).to(where)
        decayed = weights * position_weights(options, rows.steps).to(where)
        outputs, before = block_outputs(head, rows, inputs)
        targets = ChainTargets.of(inputs, rows, decayed if options.position_weights == DECAY else weights, options)
        parts = logit_parts(head, inputs.target, outputs.flatten(0, 1), before.flatten())
        total, overlaps = chain_loss(parts, targets)
        if head.config.confidence:
            confidence = confidence_loss(head, inputs.target, outputs, before, overlaps, decayed)
            total = total + confidence
        return total

    def predict(self, head: BlockHeadModule, inputs: HeadInputs) -> LogitParts:
        """Predict a block at every active row, each token after the text's token before it."""
        outputs, before = block_outputs(head, inputs.rows, inputs)
        parts = logit_parts(head, inputs.target, outputs.flatten(0, 1), before.flatten())
        return [(features.view(*before.shape, -1).transpose(0, 1), layer) for features, layer in parts]
