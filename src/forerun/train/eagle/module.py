"""An EAGLE head as training computes it: all rows of some documents at once, unrolled over several steps
(training-time test: Zhang et al., 2503.01840).

The tensors, their names and their meaning are those of `EagleConfig`. Step 0 reads the target's states; step j reads
the head's own output of step j - 1 at the same row. A row of step j attends to the rows of step 0 up to itself, and to
itself at steps 1 to j: these are the rows that drafting would have there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.heads.eagle_config import EagleConfig
from forerun.train.heads.module import Augmentation, HeadLayer, HeadModule, rotated
from forerun.train.heads.rows import HeadRows, Segment


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
    layer = _Layer(head, dtype, rows)
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


class _Layer(HeadLayer[EagleConfig]):
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

    def attended(self, query: Tensor, keys: _Keys, segment: Segment) -> Tensor:
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

    def mask(self, segment: Segment, step: int, scores: Tensor) -> Tensor:
        """[a, r], 0 where a row attends to a row of step 0, and minus infinity elsewhere."""
        rows = self.local[0][segment.first_active : segment.last_active, None] - segment.first
        columns = torch.arange(segment.last - segment.first, device=rows.device)
        hidden = columns > rows
        if self.window is not None:
            hidden |= rows + step - columns >= self.window
        return torch.zeros(hidden.shape, dtype=scores.dtype, device=rows.device).masked_fill_(hidden, float("-inf"))
