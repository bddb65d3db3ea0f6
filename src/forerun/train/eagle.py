"""The training of EAGLE heads and MTP layers: their forward over documents, loss and configuration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.eagle import Eagle
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.errors import UnsupportedModelError
from forerun.models import LanguageModel
from forerun.train.accelerator import device_of
from forerun.train.heads.evaluate import LogitParts
from forerun.train.heads.loss import ChainTargets, Targets, chain_loss, step_weights, weighted_loss
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
from forerun.train.heads.options import DECAY, EagleTraining
from forerun.train.heads.start import HeadKind, hidden_size, shape_for
from forerun.train.heads.target_states import HeadInputs
from forerun.train.loop import Batch

Keys = tuple[Tensor, Tensor]
"""Keys and values: [R, kv heads, head_dim] of step 0, [A, kv heads, head_dim] of a later step."""


class EagleHeadModule(HeadModule):
    """The trained tensors of an EAGLE head.

    Raises:
        UnsupportedModelError: its attention is not a Llama's.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        if odd := [part for part, is_there in config.further_parts.items() if is_there]:
            raise UnsupportedModelError(f"A head with {', '.join(odd)} is neither trained nor measured.")
        super().__init__(config)


def unrolled(
    head: EagleHeadModule,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    augment: Augmentation | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the inputs of the output layer and of the next row, [J, A, hidden] each.

    Args:
        states: [N, layers, target hidden] of the documents' tokens; there may be one more, which is not read.
        embeddings: [N, target hidden] of the same, unscaled.
        dtype: of products; sums, norms and the residual are in float32, or float64 for float64.
    """
    layer = _EagleLayer(head, head.config, dtype, rows, prefix="layers.0." if head.config.version == 1 else "midlayer.")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    embeddings = embeddings.to(wide)
    state = layer.fused(states[rows.states].to(wide), augment)
    keys = [layer.keys(layer.read(embeddings[rows.states + 1], state), rows.positions)]
    state = state[rows.active]
    positions = rows.positions[rows.active]
    outputs = []
    fed_back = []
    for step in range(rows.steps):
        embedding = embeddings[rows.tokens[step]]
        read = layer.read(embedding, state)
        if step:
            keys.append(layer.keys(read, positions + step))
        output, state = layer.forward(embedding, state, read, keys, positions + step)
        outputs.append(output)
        fed_back.append(state)
    return torch.stack(outputs), torch.stack(fed_back)


class _EagleLayer(HeadLayer[EagleConfig]):
    """Computes the decoder layer."""

    def fused(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """Fuse states [R, layers, T] to [R, H]; version 1 reads its one state as it is. There may be one layer more."""
        joined = self.joined(states, augment)
        return joined if self.config.version == 1 else self.linear("fc", joined)

    def read(self, embedding: Tensor, state: Tensor) -> Tensor:
        """Return the input of queries, keys and values; of an MTP layer, the input of the whole layer."""
        if self.config.is_mtp:
            embedding = self.norm("enorm", embedding)
            state = self.norm("hnorm", state)
        if self.config.version == 1:
            return self.linear("fc", torch.cat([embedding, state], -1))
        return torch.cat([self.norm("input_layernorm", embedding), self.norm("hidden_norm", state)], -1)

    def normed(self, read: Tensor) -> Tensor:
        """Apply the norm with which an MTP layer begins."""
        return self.norm("input_layernorm", read) if self.config.is_mtp else read

    def keys(self, read: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values of rows at these positions."""
        read = self.normed(read)
        shape = (len(read), self.config.num_kv_heads, self.config.head_dim)
        key = rotated(self.linear("self_attn.k_proj", read).view(shape), positions, self.config.rope_theta)
        return key, self.linear("self_attn.v_proj", read).view(shape)

    def forward(
        self, embedding: Tensor, state: Tensor, read: Tensor, keys: list[Keys], positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the inputs of the output layer and of the next row, [A, H] each."""
        config = self.config
        if config.version == 1:
            residual = read
        else:
            residual = self.norm("hidden_norm", state) if config.norm_before_residual else state
            if config.embedding_residual:
                residual = residual + self.linear("embedding_residual", embedding)
        query = self.linear("self_attn.q_proj", self.normed(read)).view(len(read), config.num_heads, config.head_dim)
        query = rotated(query, positions, self.config.rope_theta)
        attended = torch.cat([self.attended(query, keys, segment) for segment in self.rows.segments])
        x = self.feed_forward(residual + self.linear("self_attn.o_proj", attended.flatten(1)))
        if config.version == 1 and not config.is_mtp:
            return x, x
        output = self.norm("norm", x)
        return output, output if config.norm_output else x

    def attended(self, query: Tensor, keys: list[Keys], segment: DocumentRows) -> Tensor:
        """Attend from one document's active rows: [a, heads, head_dim].

        Not in bfloat16: products so small and of so many shapes take longer to compile than to compute.
        """
        config = self.config
        (first, *later_keys) = keys
        group = config.num_heads // config.num_kv_heads
        width = config.head_dim
        own = slice(segment.first_active, segment.last_active)
        count = own.stop - own.start
        step = len(later_keys)
        key, value = (part[segment.first : segment.last].transpose(0, 1) for part in first)
        # [kv heads, group * a, head_dim]
        q = query[own].view(count, config.num_kv_heads, group * width).transpose(0, 1)
        q = q.reshape(config.num_kv_heads, count, group, width).transpose(1, 2).reshape(config.num_kv_heads, -1, width)
        scores = torch.bmm(q, key.transpose(1, 2)).view(config.num_kv_heads, group, count, -1)
        scores = scores * width**-0.5 + context_mask(self.rows, segment, step, config.sliding_window, scores)
        later = [
            (q.view(config.num_kv_heads, group, count, width) * k[own].transpose(0, 1)[:, None]).sum(-1, keepdim=True)
            for k, _ in later_keys
        ]
        whole = torch.cat([scores, *(part * width**-0.5 for part in later)], -1)
        weights = torch.softmax(whole, -1)
        result = torch.bmm(weights[..., : key.shape[1]].flatten(1, 2), value).view(-1, group, count, width)
        for index, (_, v) in enumerate(later_keys):
            result = result + weights[..., key.shape[1] + index, None] * v[own].transpose(0, 1)[:, None]
        return result.permute(2, 0, 1, 3).reshape(count, config.num_heads, width)


def feature_loss(fed_back: Tensor, states: Tensor, targets: Targets) -> Tensor:
    """Sum weight times the smooth L1 distance of the head's states to the target's next ones (EAGLE-1).

    Args:
        fed_back: [J, A, H].
        states: [W, H], the target's at the predicting positions, which the head's rows approximate.
    """
    total = torch.zeros((), dtype=fed_back.dtype, device=fed_back.device)
    for step in range(len(fed_back)):
        found = fed_back[step, targets.rows[step]]
        distance = F.smooth_l1_loss(found, states.to(found.dtype), reduction="none").mean(-1)
        total = total + (distance * targets.weights[step].to(found.dtype)).sum()
    return total


class EagleKind(HeadKind[EagleTraining]):
    """Trains EAGLE heads, and MTP layers, which are EAGLE-1 layers behind two norms."""

    module = EagleHeadModule
    drafter = Eagle

    def __init__(self, options: EagleTraining) -> None:
        super().__init__(options, options.unroll)

    def config(self, name: str, inference_target: LanguageModel, max_positions: int) -> EagleConfig:
        """Return the head's shape for a target."""
        shape = self.options.shape
        is_third = shape.version == 3
        return EagleConfig(
            **shape_for(name, inference_target, shape, max_positions, shape.version),
            version=shape.version,
            target_hidden_size=hidden_size(inference_target),
            norm_before_fc=is_third,
            norm_before_residual=is_third,
            norm_output=is_third,
            embedding_residual=is_third and not shape.plain_residual,
            own_output_rows=(is_third or shape.is_mtp) and shape.own_output_rows,
            is_mtp=shape.is_mtp,
        )

    def summed_loss(self, head: EagleHeadModule, inputs: HeadInputs, piece: Batch) -> Tensor:
        """Sum the loss over the unrolled steps."""
        options = self.options
        target = inputs.target
        where = device_of(head)
        rows = inputs.rows.to(where)
        outputs, fed_back = unrolled(head, rows, inputs.states, inputs.embeddings, inputs.target.dtype, inputs.augment)
        own = head.get_parameter("lm_head.weight") if head.config.own_output_rows else None
        weights = step_weights(options.step_weight, rows.steps).to(where)[:, None] * rows.valid
        last = inputs.states[rows.predictors, -1]
        targets = Targets(last, target.output_rows, rows.rows, weights, options.loss)  # type: ignore[arg-type]
        if options.position_weights == DECAY:
            total = weighted_loss(outputs, own, targets)
        else:
            chains = ChainTargets.of(inputs, rows, predicted(rows).float(), options)
            layer = target.output_rows if own is None else own
            total, _ = chain_loss([(outputs.transpose(0, 1).flatten(0, 1), layer)], chains)
        if options.feature_weight:
            total = total + options.feature_weight * feature_loss(fed_back, last, targets)
        return total

    def predict(self, head: EagleHeadModule, inputs: HeadInputs) -> LogitParts:
        """Predict by the unrolled steps, each on the text's token."""
        outputs, _ = unrolled(head, inputs.rows, inputs.states, inputs.embeddings, inputs.target.dtype)
        own = head.config.own_output_rows
        return [(outputs, head.get_parameter("lm_head.weight") if own else inputs.target.output_rows)]
