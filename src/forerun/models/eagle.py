"""An EAGLE head as it drafts: one decoder layer over pages, for rows of any sequences in one forward.

`heads/eagle_config.py` says what it computes. The linear layers are the target's kind: codes of 8 bits where the
target's weights are in codes, else its number format, native where it is. Attention is that of any other model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.cache import PagePool, SequenceCache
from forerun.errors import IncompatibleDrafterError
from forerun.heads.eagle_config import EagleConfig
from forerun.heads.stored import StoredHead
from forerun.kernels.partition import Form
from forerun.kernels.rms_norm import rms_norm
from forerun.models.attention.base import LayerAttention, Layout
from forerun.models.base import Forward, LanguageModel, Rows
from forerun.models.eagle_parts import LayerParts
from forerun.models.heads import HeadModel
from forerun.models.rotation import Rotation, rotate
from forerun.models.runner import lay_out


class EagleModel(HeadModel):
    """A head over its target, as a language model whose rows need a state beside the token (`Rows.states`).

    Row i holds token i + 1 and `fuse` of the target's states of token i, or what the row before gave as its state
    (`Forward.taps`, [T, 1, hidden]); its logits are of token i + 2. They have the target's width, and are -inf where
    the head has no row.

    Args:
        head: its tensors, in any number format or codes.
        target: whose embeddings, and perhaps output layer, it reads.
        name: for messages and stored costs.

    Raises:
        IncompatibleDrafterError: the target is of another size.
    """

    def __init__(self, head: StoredHead[EagleConfig], target: LanguageModel, name: str = "a head") -> None:
        config = head.config
        super().__init__(head, target, name)
        if not config.own_output_rows and config.hidden_size != config.target_hidden_size:
            raise IncompatibleDrafterError(
                f"{name} has {config.hidden_size} numbers a state and reads the target's output layer, which has "
                f"{config.target_hidden_size}. A head of another width needs output rows of its own."
            )
        self.config = config
        self._parts = parts = LayerParts.of(head, target, self.token_ids)
        self.compute_dtype = parts.compute_dtype
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        self._rotation = Rotation(frequencies, 1.0, self.compute_dtype, target.device)
        heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self._form = Form(config.head_dim**-0.5, config.sliding_window)
        layer = LayerAttention(heads, group, config.head_dim, config.head_dim, self._form)
        self._planner = parts.attention.planner([layer], target.device)

    @property
    def pool(self) -> PagePool:
        """Where the pages of its caches come from."""
        return self._planner.pool

    def new_cache(self) -> SequenceCache:
        """An empty cache for one sequence."""
        return self._planner.new_cache()

    @torch.inference_mode()
    def fuse(self, taps: Tensor) -> Tensor:
        """What rows read of the target's states.

        Args:
            taps: [n, layers, target_hidden_size], of the layers of the configuration.

        Returns:
            [n, hidden_size] in `compute_dtype`.
        """
        states = taps.to(self.device, self.compute_dtype)
        if self.config.version == 1:
            return states[:, 0]
        parts = self._parts
        if parts.state_norms is not None:
            each = [self._normed(states[:, i], norm) for i, norm in enumerate(parts.state_norms)]
            return parts.product(parts.fuse, torch.cat(each, 1))
        return parts.product(parts.fuse, states.flatten(1))

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """As `LanguageModel.forward`; `Forward.taps` are always the states for the rows that come next.

        Raises:
            ValueError: rows have no states, or layers are asked for.
        """
        if layers or any(rows.states is None for rows in batch):
            raise ValueError("a head reads a state beside every token, and has no layers to look into")
        layout = lay_out(batch, self._planner)
        output = self._layer(layout)
        norm, wanted = self._parts.norm, layout.wanted(output)[: layout.num_logits]
        logits = torch.full((len(wanted), self.vocab_size), -torch.inf, dtype=self.compute_dtype, device=self.device)
        if len(wanted):
            wanted = layout.wanted(output)
            rows = self._parts.product(self._parts.head, wanted if norm is None else self._normed(wanted, norm))
            logits[:, self.token_ids] = rows[: layout.num_logits]
        states = layout.tapped(output)
        if norm is not None and self.config.norm_output:
            states = self._normed(states, norm)
        return Forward(logits, states[:, None])

    def _layer(self, layout: Layout) -> Tensor:
        """What the layer gives for all rows, [T, hidden]."""
        parts, states = self._parts, layout.states
        assert states is not None
        states = states.to(self.compute_dtype)
        embedding = self.target.embedding_rows(layout.token_ids).to(self.compute_dtype)
        if parts.entry_norms is not None:
            assert parts.input_norm is not None
            pair = zip((embedding, states), parts.entry_norms, strict=True)
            x = parts.product(parts.fuse, torch.cat([self._normed(each, norm) for each, norm in pair], 1))
            read = self._normed(x, parts.input_norm)
        elif self.config.version == 1:
            x = read = parts.product(parts.fuse, torch.cat([embedding, states], 1))
        else:
            assert parts.input_norm is not None
            assert parts.hidden_norm is not None
            normed = self._normed(states, parts.hidden_norm)
            read = torch.cat([self._normed(embedding, parts.input_norm), normed], 1)
            x = normed if self.config.norm_before_residual else states
            if parts.embedding_residual is not None:
                x = x + parts.product(parts.embedding_residual, embedding)
        x = x + parts.product(parts.out, self._attended(parts.product(parts.qkv, read), layout))
        h = parts.product(parts.gate_up, self._normed(x, parts.mlp_norm))
        wide = self.config.intermediate_size
        return x + parts.product(parts.down, F.silu(h[:, :wide]).mul_(h[:, wide:]))

    def _attended(self, qkv: Tensor, layout: Layout) -> Tensor:
        """[T, heads * head_dim]."""
        config, rows = self.config, len(qkv)
        rotated = config.num_heads + config.num_kv_heads
        heads = qkv.view(rows, -1, config.head_dim)
        rotate(heads[:, :rotated], self._rotation.turns(layout))
        query, key, value = heads[:, : config.num_heads], heads[:, config.num_heads : rotated], heads[:, rotated:]
        return self._parts.attention.forward(0, query, key, value, layout, self._form)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._parts.eps)
