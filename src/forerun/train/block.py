"""Block heads as a kind of head that is trained: their loss, and their first weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.block.config import BlockConfig
from forerun.drafters.block.drafter import Block
from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.heads.fingerprint import check_target
from forerun.drafters.heads.folder import load_head
from forerun.errors import ConfigError
from forerun.models import LanguageModel, Model
from forerun.train.accelerator import device_of
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads.loss import ChainTargets, Parts, chain_loss
from forerun.train.heads.module import Augmentation, DocumentRows, HeadLayer, HeadModule, HeadRows, predicted, rotated
from forerun.train.heads.options import DECAY, BlockTraining
from forerun.train.heads.run import COMPUTE, HeadLoss, Read, TrainingTarget
from forerun.train.heads.start import HeadKind, shape_for
from forerun.train.loop import Batch

# A block head as training computes it: blocks at many anchors of some documents at once.
#
# The tensors, their names and their meaning are those of `BlockConfig`. The rows are those of `heads/module.py`:
# row i
# reads the target's state of token i, and the block of an active row i is anchored at token i + 1. Its slots attend
# to
# the rows of the document up to i, and to each other: these are the rows that drafting would have there.

Keys = tuple[Tensor, Tensor]
"""Keys and values."""


def attended(config: BlockConfig, rows: HeadRows, query: Tensor, own: Keys, context: Keys) -> Tensor:
    """[A, slots, heads * head_dim].

    Args:
        query: [A, slots, heads, head_dim].
        own: [A, slots, kv heads, head_dim] each. context: [R, kv heads, head_dim] each.
    """
    return torch.cat([_of_document(config, rows, query, own, context, segment) for segment in rows.segments])


def _of_document(
    config: BlockConfig, rows: HeadRows, query: Tensor, own: Keys, context: Keys, segment: DocumentRows
) -> Tensor:
    """Of one document's blocks, [a, slots, heads * head_dim]."""
    here = slice(segment.first_active, segment.last_active)
    key, value = (part[here] for part in own)
    group, width = config.num_heads // config.num_kv_heads, config.head_dim
    count, slots = key.shape[:2]
    # [kv heads, group, a, slots, head_dim]
    q = query[here].view(count, slots, config.num_kv_heads, group, width).permute(2, 3, 0, 1, 4)
    before, after = (part[segment.first : segment.last].transpose(0, 1) for part in context)
    scores = torch.einsum("hgasd,hrd->hgasr", q, before) * width**-0.5
    scores = scores + hidden_rows(config, rows, segment, slots, query)
    inside = torch.einsum("hgasd,athd->hgast", q, key) * width**-0.5
    weights = torch.softmax(torch.cat([scores, inside], -1), -1)
    mixed = torch.einsum("hgasr,hrd->hgasd", weights[..., : before.shape[1]], after)
    mixed = mixed + torch.einsum("hgast,athd->hgasd", weights[..., before.shape[1] :], value)
    return mixed.permute(2, 3, 0, 1, 4).reshape(count, slots, -1)


def hidden_rows(config: BlockConfig, rows: HeadRows, segment: DocumentRows, slots: int, like: Tensor) -> Tensor:
    """[a, 1, r], 0 where the slots of a block attend to a row of the context, and minus infinity elsewhere."""
    last = rows.active[segment.first_active : segment.last_active, None] - segment.first
    columns = torch.arange(segment.last - segment.first, device=last.device)
    hidden = columns > last
    if config.sliding_window is not None:  # counted from the last slot
        hidden |= last + slots - columns >= config.sliding_window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=last.device).masked_fill_(hidden, -torch.inf)[:, None]


def blocks_of_pairs(
    head: HeadModule,
    config: BlockConfig,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    dtype: torch.dtype,
    augment: Augmentation | None,
) -> Tensor:
    """As `blocks`, of a head with `context_tokens`."""
    layer = _PairLayer(head, config, dtype, rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    fused, following = layer.fused(states[rows.states].to(wide), augment), embeddings.to(wide)[rows.states + 1]
    keys, values = layer.keys(layer.read(following, fused), rows.positions)
    own_embeddings = following[rows.active][:, None] + layer.weights["slot_embeddings"][: rows.steps].to(wide)
    own_states = fused[rows.active][:, None] + layer.weights["slot_states"][: rows.steps].to(wide)
    return layer.forward(own_embeddings, own_states, keys, values)


class _PairLayer(HeadLayer[BlockConfig]):
    """The layer; the slots' vectors keep their type."""

    def __init__(self, head: HeadModule, config: BlockConfig, dtype: torch.dtype, rows: HeadRows) -> None:
        super().__init__(head, config, dtype, prefix="midlayer.", kept="slot_")
        self.rows = rows

    def fused(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """[R, layers, H] -> [R, H]. There may be one layer more."""
        return self.linear("fc", self.joined(states, augment))

    def read(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """[..., 2 H], what queries, keys and values are computed from."""
        return torch.cat([self.norm("input_layernorm", embeddings), self.norm("hidden_norm", states)], -1)

    def keys(self, read: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[..., kv heads, head_dim] keys and values of rows at these positions."""
        key, value = self.heads("k", read), self.heads("v", read)
        return rotated(key, positions, self.config.rope_theta), value

    def heads(self, kind: str, read: Tensor) -> Tensor:
        """[..., heads, head_dim]."""
        found = self.linear(f"self_attn.{kind}_proj", read)
        return found.view(*read.shape[:-1], -1, self.config.head_dim)

    def forward(self, embeddings: Tensor, states: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[A, slots, H], what the output layer reads. embeddings, states: [A, slots, H]. keys, values: of all rows."""
        rows = self.rows
        read = self.read(embeddings, states)
        positions = rows.positions[rows.active, None] + 1 + torch.arange(read.shape[1], device=read.device)
        query = rotated(self.heads("q", read), positions, self.config.rope_theta)
        own = self.keys(read, positions)
        x = self.norm("hidden_norm", states) + self.linear("embedding_residual", embeddings)
        x = x + self.linear("self_attn.o_proj", attended(self.config, rows, query, own, (keys, values)))
        return self.norm("norm", self.feed_forward(x))


class BlockHead(HeadModule):
    """The trained tensors of a head, float32, under their names; NaN until they are set."""

    config: BlockConfig


def blocks(
    head: BlockHead,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
    augment: Augmentation | None = None,
) -> Tensor:
    """[A, K, hidden], what the output layer reads for the K tokens of each active row's block.

    Args:
        rows: unrolled as many steps as tokens are drafted.
        states: [N, layers, hidden] of the documents' tokens; there may be one more, which is not read.
        embeddings: [N, hidden] of the same, unscaled.
        mask: [hidden], what stands in the slots after the first; None where they hold no mask.
        dtype: of products; sums, norms and the residual are in float32, or float64 for float64.

    Raises:
        ConfigError: a block has fewer tokens than there are steps.
    """
    if rows.steps > head.config.block_size:
        size = head.config.block_size
        raise ConfigError(f"blocks of {size} tokens draft no {rows.steps} tokens. Ask for {size}.")
    config = head.config
    if config.context_tokens:
        return blocks_of_pairs(head, config, rows, states, embeddings, dtype, augment)
    assert mask is not None
    layer = _Layers(head, dtype, rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    context = layer.fused(states[rows.states].to(wide), augment)
    slots = rows.steps + config.first_slot
    x = mask.to(wide).expand(len(rows.active), slots, -1)
    x = torch.cat([embeddings[rows.tokens[0]].to(wide)[:, None], x[:, 1:]], 1)
    for index in range(config.num_layers):
        x = layer.forward(f"layers.{index}.", context, x)
    return layer.norm("norm", x[:, config.first_slot :])


class _Layers(HeadLayer[BlockConfig]):
    """The decoder layers with their weights in `dtype`."""

    def __init__(self, head: BlockHead, dtype: torch.dtype, rows: HeadRows) -> None:
        super().__init__(head, head.config, dtype)
        self.rows = rows

    def fused(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """[R, layers, H] -> [R, H]: the context. There may be one layer more."""
        return self.norm("hidden_norm", self.linear("fc", self.joined(states, augment)))

    def forward(self, name: str, context: Tensor, x: Tensor) -> Tensor:
        """x: [A, slots, H]."""
        normed = self.norm(f"{name}input_layernorm", x)
        positions = self.rows.positions[self.rows.active, None] + 1 + torch.arange(x.shape[1], device=x.device)
        query = self.heads(name, "q", normed, positions)
        key, value = self.heads(name, "k", normed, positions), self.heads(name, "v", normed)
        keys, values = self.heads(name, "k", context, self.rows.positions), self.heads(name, "v", context)
        found = attended(self.config, self.rows, query, (key, value), (keys, values))
        return self.feed_forward(x + self.linear(f"{name}self_attn.o_proj", found), name)

    def heads(self, name: str, kind: str, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[..., heads, head_dim], normed and rotated where there are positions, [...]."""
        found = self.linear(f"{name}self_attn.{kind}_proj", x)
        found = found.view(*x.shape[:-1], -1, self.config.head_dim)
        if positions is None:
            return found
        return rotated(self.norm(f"{name}self_attn.{kind}_norm", found), positions, self.config.rope_theta)


def choose_anchors(
    rows: HeadRows, wanted: Tensor, documents: Tensor, numbers: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Active rows, at most `count` of each packed row, drawn without replacement.

    Args:
        wanted, documents: [packed rows, window + 1], that `rows` were made of.
        numbers: [packed rows], what each row's draws depend on.

    Returns:
        [a] their indices among the active rows, rising; [a] what each counts: of a packed row together as much as its
        wanted tokens.
    """
    used = documents != NO_DOCUMENT
    packed = torch.arange(len(documents))[:, None].expand_as(documents)[used]
    of_active = packed[rows.states[rows.active]]
    chosen, counts = [], []
    for row, number in enumerate(numbers.tolist()):
        members = (of_active == row).nonzero().flatten()
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(number))[:count]
        taken = members[order].sort().values
        chosen.append(taken)
        counts.append(torch.full((len(taken),), float(wanted[row].sum()) / max(1, len(taken))))
    return torch.cat(chosen), torch.cat(counts)


def restricted(rows: HeadRows, chosen: Tensor) -> HeadRows:
    """With these active rows alone. `predictors`, `rows` and `valid` stay those of all. chosen: [a], rising."""
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


class BlockLoss(HeadLoss[BlockTraining]):
    """Of a block head."""

    def steps(self, model: nn.Module) -> int:
        """The tokens of a block."""
        assert isinstance(model, BlockHead)
        return model.config.block_size

    def summed(self, model: nn.Module, read: Read, piece: Batch) -> Tensor:
        """As `HeadLoss.summed`, as if there were a block for each wanted token."""
        assert isinstance(model, BlockHead)
        options, where = self.options, device_of(model)
        _, wanted, documents, _, numbers = piece
        chosen, counts = choose_anchors(read.rows, wanted, documents, numbers, options.anchors)
        there = (predicted(read.rows)[chosen] * counts[:, None]).to(where)
        rows = restricted(read.rows, chosen).to(where)
        outputs, before = block_outputs(model, rows, read)
        decays = options.position_weights == DECAY
        weights = there * position_weights(options, rows.steps).to(where) if decays else there
        targets = ChainTargets.of(read, rows, weights, options)
        total, overlaps = chain_loss(logit_parts(model, read.target, outputs.flatten(0, 1), before.flatten()), targets)
        if model.config.confidence and options.confidence_weight:
            decayed = there * position_weights(options, rows.steps).to(where)
            total = total + options.confidence_weight * confidence_loss(
                model, read.target, outputs, before, overlaps, decayed
            )
        return total


def position_weights(options: BlockTraining, steps: int) -> Tensor:
    """[K] of the tokens of a block, exp(-(k - 1) / gamma), of sum 1."""
    weights = torch.exp(-torch.arange(steps, dtype=torch.float32) / options.gamma)
    return weights / weights.sum()


def block_outputs(head: BlockHead, rows: HeadRows, read: Read) -> tuple[Tensor, Tensor]:
    """[A, K, H] what the output layer reads of each block, and [A, K] the token before each."""
    mask = mask_of(head, read.target)
    outputs = blocks(head, rows, read.states, read.embeddings, mask, COMPUTE[read.states.device.type], read.augment)
    return outputs, rows.token_ids[rows.tokens.T]


def mask_of(head: BlockHead, target: TrainingTarget) -> Tensor | None:
    """[H] what stands in the slots after the first; None where they hold no mask."""
    if head.config.context_tokens:
        return None
    if head.config.mask_token_id is None:
        return head.get_parameter("mask_embedding.weight")
    return target.embeddings(torch.tensor([head.config.mask_token_id], device=device_of(head)))[0]


def logit_parts(head: BlockHead, target: TrainingTarget, outputs: Tensor, before: Tensor) -> Parts:
    """What the logits are made of: outputs by the output layer, and the tokens before by the Markov bias.

    outputs: [n, H]. before: [n].
    """
    own = head.config.own_output_rows
    parts = [(outputs, head.get_parameter("lm_head.weight") if own else target.output_rows)]
    if head.config.markov_rank:
        embedded, second = markov_before(head, target, before), head.get_parameter("markov_head.markov_w2.weight")
        if head.config.markov_shared:  # of the same output rows
            return [(outputs + F.linear(embedded, second).to(outputs.dtype), parts[0][1])]
        parts.append((embedded.to(outputs.dtype), second))
    return parts


def markov_before(head: BlockHead, target: TrainingTarget, before: Tensor) -> Tensor:
    """[..., rank], what the Markov bias is a map of. before: tokens."""
    first = head.get_parameter("markov_head.markov_w1.weight")
    if not head.config.markov_shared:
        return F.embedding(before, first)
    return F.linear(target.embeddings(before.flatten()).to(first.dtype), first).view(*before.shape, -1)


def confidence_loss(
    head: BlockHead, target: TrainingTarget, outputs: Tensor, before: Tensor, overlaps: Tensor, weights: Tensor
) -> Tensor:
    """Sum of weight times the cross-entropy of the confidence against the overlap, 1 - total variation. It does not
    alter what it is estimated from. All [A, K], outputs [A, K, H]."""
    features = outputs.detach()
    if head.config.markov_rank and head.config.confidence_with_markov:
        embedded = markov_before(head, target, before).detach()
        features = torch.cat([features, embedded.to(features.dtype)], -1)
    layer = head.get_parameter("confidence_head.proj.weight"), head.get_parameter("confidence_head.proj.bias")
    logits = F.linear(features, layer[0].to(features.dtype), layer[1].to(features.dtype))[..., 0]
    losses = F.binary_cross_entropy_with_logits(logits, overlaps.clamp(0, 1).to(logits.dtype), reduction="none")
    return (losses * weights.to(losses.dtype)).sum()


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
