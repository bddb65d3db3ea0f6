"""EAGLE heads as a kind of head that is trained: their tensors, loss and first weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.eagle.drafter import Eagle
from forerun.models import LanguageModel
from forerun.train.accelerator import device_of
from forerun.train.heads.loss import ChainTargets, Targets, chain_loss, step_weights, weighted_loss
from forerun.train.heads.module import Augmentation, DocumentRows, HeadLayer, HeadModule, HeadRows, predicted, rotated
from forerun.train.heads.options import DECAY, EagleTraining
from forerun.train.heads.run import COMPUTE, HeadLoss, Read
from forerun.train.heads.start import HeadKind, hidden_size, shape_for
from forerun.train.loop import Batch


class EagleHead(HeadModule):
    """The trained tensors of an EAGLE head."""

    config: EagleConfig


@dataclass(slots=True)
class _Keys:
    """Keys and values, [R, kv heads, head_dim] of step 0, and [A, kv heads, head_dim] of each later step."""

    first: tuple[Tensor, Tensor]
    later: list[tuple[Tensor, Tensor]]


def unrolled(
    head: EagleHead,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    augment: Augmentation | None = None,
) -> tuple[Tensor, Tensor]:
    """What the output layer reads, and what the next row reads: [J, A, hidden] each.

    Args:
        states: [N, layers, target hidden] of the documents' tokens; there may be one more, which is not read.
        embeddings: [N, target hidden] of the same, unscaled.
        dtype: of products; sums, norms and the residual are in float32, or float64 for float64.
    """
    layer = _EagleLayer(head, dtype, rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    embeddings = embeddings.to(wide)
    state = layer.fused(states[rows.states].to(wide), augment)
    keys = _Keys(layer.keys(layer.read(embeddings[rows.states + 1], state), rows.positions), [])
    state = state[rows.active]
    positions = rows.positions[rows.active]
    outputs, fed_back = [], []
    for step in range(rows.steps):
        embedding = embeddings[rows.tokens[step]]
        read = layer.read(embedding, state)
        if step:
            keys.later.append(layer.keys(read, positions + step))
        output, state = layer.forward(embedding, state, read, keys, positions + step)
        outputs.append(output)
        fed_back.append(state)
    return torch.stack(outputs), torch.stack(fed_back)


class _EagleLayer(HeadLayer[EagleConfig]):
    """The decoder layer with its weights in `dtype`."""

    def __init__(self, head: EagleHead, dtype: torch.dtype, rows: HeadRows) -> None:
        config = head.config
        self.is_first_version = config.version == 1
        super().__init__(head, config, dtype, prefix="layers.0." if self.is_first_version else "midlayer.")
        self.segments = rows.segments
        self.window = config.sliding_window
        self.local = (rows.active, rows.positions)

    def fused(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """[R, layers, T] -> [R, H]; version 1 reads its one state as it is. There may be one layer more."""
        joined = self.joined(states, augment)
        return joined if self.is_first_version else self.linear("fc", joined)

    def read(self, embedding: Tensor, state: Tensor) -> Tensor:
        """What queries, keys and values are computed from; of an MTP layer, what enters it."""
        if self.config.is_mtp:
            embedding, state = self.norm("enorm", embedding), self.norm("hnorm", state)
        if self.is_first_version:
            return self.linear("fc", torch.cat([embedding, state], -1))
        return torch.cat([self.norm("input_layernorm", embedding), self.norm("hidden_norm", state)], -1)

    def normed(self, read: Tensor) -> Tensor:
        """The same behind the norm with which an MTP layer begins."""
        return self.norm("input_layernorm", read) if self.config.is_mtp else read

    def keys(self, read: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of rows at these positions."""
        read = self.normed(read)
        shape = (len(read), self.config.num_kv_heads, self.config.head_dim)
        key = rotated(self.linear("self_attn.k_proj", read).view(shape), positions, self.config.rope_theta)
        return key, self.linear("self_attn.v_proj", read).view(shape)

    def forward(
        self, embedding: Tensor, state: Tensor, read: Tensor, keys: _Keys, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[A, H] what the output layer reads, and what goes to the next row."""
        config = self.config
        if self.is_first_version:
            residual = read
        else:
            residual = self.norm("hidden_norm", state) if config.norm_before_residual else state
            if config.embedding_residual:
                residual = residual + self.linear("embedding_residual", embedding)
        query = self.linear("self_attn.q_proj", self.normed(read)).view(len(read), config.num_heads, config.head_dim)
        query = rotated(query, positions, self.config.rope_theta)
        attended = torch.cat([self.attended(query, keys, segment) for segment in self.segments])
        x = self.feed_forward(residual + self.linear("self_attn.o_proj", attended.flatten(1)))
        if self.is_first_version and not config.is_mtp:
            return x, x
        output = self.norm("norm", x)
        return output, output if config.norm_output else x

    def attended(self, query: Tensor, keys: _Keys, segment: DocumentRows) -> Tensor:
        """Of one document's active rows: [a, heads, head_dim]. Not in bfloat16: so small and so many different products
        take longer to compile for each shape than to compute."""
        config = self.config
        group, width = config.num_heads // config.num_kv_heads, config.head_dim
        own = slice(segment.first_active, segment.last_active)
        count, step = own.stop - own.start, len(keys.later)
        key, value = (part[segment.first : segment.last].transpose(0, 1) for part in keys.first)
        # [kv heads, group * a, head_dim]
        q = query[own].view(count, config.num_kv_heads, group * width).transpose(0, 1)
        q = q.reshape(config.num_kv_heads, count, group, width).transpose(1, 2).reshape(config.num_kv_heads, -1, width)
        scores = torch.bmm(q, key.transpose(1, 2)).view(config.num_kv_heads, group, count, -1)
        scores = scores * width**-0.5 + self.mask(segment, step, scores)
        later = [
            (q.view(config.num_kv_heads, group, count, width) * k[own].transpose(0, 1)[:, None]).sum(-1, keepdim=True)
            for k, _ in keys.later
        ]
        whole = torch.cat([scores, *(part * width**-0.5 for part in later)], -1)
        weights = torch.softmax(whole, -1)
        result = torch.bmm(weights[..., : key.shape[1]].flatten(1, 2), value).view(-1, group, count, width)
        for index, (_, v) in enumerate(keys.later):
            result = result + weights[..., key.shape[1] + index, None] * v[own].transpose(0, 1)[:, None]
        return result.permute(2, 0, 1, 3).reshape(count, config.num_heads, width)

    def mask(self, segment: DocumentRows, step: int, scores: Tensor) -> Tensor:
        """[a, r], 0 where a row attends to a row of step 0, and minus infinity elsewhere."""
        rows = self.local[0][segment.first_active : segment.last_active, None] - segment.first
        columns = torch.arange(segment.last - segment.first, device=rows.device)
        hidden = columns > rows
        if self.window is not None:
            hidden |= rows + step - columns >= self.window
        return torch.zeros(hidden.shape, dtype=scores.dtype, device=rows.device).masked_fill_(hidden, float("-inf"))


class EagleLoss(HeadLoss[EagleTraining]):
    """Of an EAGLE head."""

    def steps(self, model: nn.Module) -> int:
        """The unrolled ones."""
        return self.options.unroll

    def summed(self, model: nn.Module, read: Read, piece: Batch) -> Tensor:
        """As `HeadLoss.summed`."""
        assert isinstance(model, EagleHead)
        options, target, states, where = self.options, read.target, read.states, device_of(model)
        rows = read.rows.to(where)
        outputs, fed_back = unrolled(model, rows, states, read.embeddings, COMPUTE[where.type], read.augment)
        own = model.get_parameter("lm_head.weight") if model.config.own_output_rows else None
        weights = step_weights(options.step_weight, rows.steps).to(where)
        last = states[rows.predictors, -1]
        targets = Targets(last, target.output_rows, rows.rows, weights[:, None] * rows.valid, options.loss)  # type: ignore[arg-type]
        if options.position_weights != DECAY:
            total = self._by_chains(outputs, target.output_rows if own is None else own, read, rows)
        else:
            total = weighted_loss(outputs, own, targets)
        if options.feature_weight:
            total = total + options.feature_weight * feature_loss(fed_back, last, targets)
        return total

    def _by_chains(self, outputs: Tensor, layer: Tensor, read: Read, rows: HeadRows) -> Tensor:
        """The sum with weights that follow acceptance, chain by chain. outputs: [J, A, H]."""
        targets = ChainTargets.of(read, rows, predicted(rows).float(), self.options)
        return chain_loss([(outputs.transpose(0, 1).flatten(0, 1), layer)], targets)[0]


def feature_loss(fed_back: Tensor, states: Tensor, targets: Targets) -> Tensor:
    """Sum of weight times the smooth L1 distance of the head's states to the target's next ones (EAGLE-1).

    Args:
        fed_back: [J, A, H].
        states: [W, H], the target's, of the places that predict: what the head's row stands for.
    """
    total = torch.zeros((), dtype=fed_back.dtype, device=fed_back.device)
    for step in range(len(fed_back)):
        found = fed_back[step, targets.rows[step]]
        distance = F.smooth_l1_loss(found, states.to(found.dtype), reduction="none").mean(-1)
        total = total + (distance * targets.weights[step].to(found.dtype)).sum()
    return total


def unrolled_guess(head: HeadModule, read: Read) -> list[tuple[Tensor, Tensor]]:
    """As `evaluate.Guess`, of an EAGLE head."""
    assert isinstance(head, EagleHead)
    outputs, _ = unrolled(head, read.rows, read.states, read.embeddings, COMPUTE[read.states.device.type])
    own = head.config.own_output_rows
    return [(outputs, head.get_parameter("lm_head.weight") if own else read.target.output_rows)]


class EagleKind(HeadKind[EagleTraining]):
    """EAGLE heads."""

    loss = EagleLoss
    guess = staticmethod(unrolled_guess)
    module, drafter = EagleHead, Eagle

    def config(self, name: str, served: LanguageModel, max_positions: int) -> EagleConfig:
        """As `HeadKind.config`."""
        shape = self.options.shape
        is_third = shape.version == 3
        return EagleConfig(
            **shape_for(name, served, shape, max_positions, shape.version),
            version=shape.version,
            target_hidden_size=hidden_size(served),
            norm_before_fc=is_third,
            norm_before_residual=is_third,
            norm_output=is_third,
            embedding_residual=is_third and not shape.plain_residual,
            own_output_rows=(is_third or shape.is_mtp) and shape.own_output_rows,
            is_mtp=shape.is_mtp,
        )
