"""The layer of an EAGLE head and what surrounds it: the contract, and the computation in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.heads.layers import HeadLayers, head_attention, state_norms
from forerun.kernels.torch.elementwise import rms_norm
from forerun.models.attention.base import Layout, Planner
from forerun.models.base import Rows
from forerun.models.draft_session import DraftSession, Pick
from forerun.models.linear import Linear
from forerun.models.rotation import Rotation, inverse_frequencies, rotate
from forerun.models.runner import lay_out
from forerun.types import Cache


class EagleLayer(Protocol):
    """What computes the rows of an EAGLE head.

    Attributes:
        planner: of its attention.
    """

    planner: Planner

    def fuse(self, states: Tensor) -> Tensor:
        """As `FusingHeadModel.fuse`, of version 3. states: [n, layers, target_hidden_size] in float32 or float64."""

    def forward(self, layout: Layout, embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rows, which join what their caches hold.

        Args:
            embedding: [T, target_hidden_size] of the rows' tokens. states: [T, S]. Both as those of `fuse`.

        Returns:
            [R, draft_vocab_size] logits of the wanted rows, perhaps padded; [T, hidden_size] the rows' states for those
            that follow them.
        """

    def draft_session(
        self, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> DraftSession | None:
        """As `LanguageModel.draft_session`. embed: [n] token ids -> [n, target_hidden_size], as those of `forward`."""

    def keys(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> None:
        """Compute the keys and values of rows alone, which join their caches' scratch. embedding, states: as those of
        `forward`, without padding."""

    def blocks(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the rows of blocks (`Rows.is_block`), which join their caches' scratch. The rest as `forward`, of all
        rows, without padding."""


class ReferenceEagleLayer:
    """`EagleLayer` in PyTorch, with linear layers of the target's kind.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: EagleConfig, output: Linear) -> None:
        self._config, self._made, self._output = config, made, output
        names = EagleNames(config)
        self._fuse = made.linear("fc")
        self._qkv = made.linear(*(names.attention(name) for name in "qkv"), rotated=2, head_dim=config.head_dim)
        self._out = made.linear(names.attention("o"))
        self._gate_up = made.linear(names.mlp("gate"), names.mlp("up"))
        self._down = made.linear(names.mlp("down"))
        self._embedding_residual = made.linear("embedding_residual") if config.embedding_residual else None
        self._mlp_norm = made.vector(f"{names.mlp_norm}.weight")
        self._input_norm, self._hidden_norm = made.norm(names.input_norm), made.norm(names.hidden_norm)
        self._norm = made.norm("norm")
        norms = [made.norm(name) for name in state_norms(config)]
        self._state_norms = [norm for norm in norms if norm is not None]
        entry = [made.norm(name) for name in names.entry_norms]
        self._entry_norms = [norm for norm in entry if norm is not None]
        self._eps = torch.tensor(config.rms_norm_eps, dtype=made.compute, device=made.device)
        self._rotation = Rotation(
            inverse_frequencies(config.rope_theta, config.head_dim), 1.0, made.compute, made.device
        )
        self._form, layer = head_attention(config)
        self._attention = made.attention()
        self.planner: Planner = self._attention.planner([layer], made.device)

    def fuse(self, states: Tensor) -> Tensor:
        """As `EagleLayer.fuse`."""
        if self._state_norms:
            each = [self._normed(states[:, i], norm) for i, norm in enumerate(self._state_norms)]
            return self._made.multiply(self._fuse, torch.cat(each, 1))
        return self._made.multiply(self._fuse, states.flatten(1))

    def forward(self, layout: Layout, embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """As `EagleLayer.forward`."""
        output = self._layer(layout, embedding, states)
        wanted, norm = layout.select_logit_rows(output), self._norm
        logits = self._made.multiply(self._output, wanted if norm is None else self._normed(wanted, norm))
        if norm is not None and self._config.norm_output:
            output = self._normed(output, norm)
        return logits, output

    def draft_session(
        self, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> DraftSession | None:
        """As `EagleLayer.chains`."""
        return None

    def keys(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> None:
        """As `EagleLayer.keys`."""
        layout = lay_out(batch, self.planner)
        self._layer(layout, *(_padded(x, layout.num_rows) for x in (embedding, states)))

    def blocks(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """As `EagleLayer.blocks`."""
        layout = lay_out(batch, self.planner)
        logits, outputs = self.forward(layout, *(_padded(x, layout.num_rows) for x in (embedding, states)))
        return logits[: layout.num_new], outputs[: layout.num_new]

    def _layer(self, layout: Layout, embedding: Tensor, states: Tensor) -> Tensor:
        """What the layer gives for all rows, [T, hidden]."""
        multiply = self._made.multiply
        if self._entry_norms:
            assert self._input_norm is not None
            pair = zip((embedding, states), self._entry_norms, strict=True)
            x = multiply(self._fuse, torch.cat([self._normed(part, norm) for part, norm in pair], 1))
            read = self._normed(x, self._input_norm)
        elif self._config.version == 1:
            x = read = multiply(self._fuse, torch.cat([embedding, states], 1))
        else:
            assert self._input_norm is not None
            assert self._hidden_norm is not None
            normed = self._normed(states, self._hidden_norm)
            read = torch.cat([self._normed(embedding, self._input_norm), normed], 1)
            x = normed if self._config.norm_before_residual else states
            if self._embedding_residual is not None:
                x = x + multiply(self._embedding_residual, embedding)
        x = x + multiply(self._out, self._attended(multiply(self._qkv, read), layout))
        h = multiply(self._gate_up, self._normed(x, self._mlp_norm))
        wide = self._config.intermediate_size
        return x + multiply(self._down, F.silu(h[:, :wide]).mul_(h[:, wide:]))

    def _attended(self, qkv: Tensor, layout: Layout) -> Tensor:
        """[T, heads * head_dim]."""
        config, rows = self._config, len(qkv)
        rotated = config.num_heads + config.num_kv_heads
        heads = qkv.view(rows, -1, config.head_dim)
        rotate(heads[:, :rotated], self._rotation.turns(layout))
        query, key, value = heads[:, : config.num_heads], heads[:, config.num_heads : rotated], heads[:, rotated:]
        return self._attention.forward(0, query, key, value, layout, self._form)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)


def _padded(x: Tensor, num_rows: int) -> Tensor:
    """[num_rows, ...], the last row repeated."""
    return torch.cat([x, x[-1:].expand(num_rows - len(x), -1)])


class EagleNames:
    """Of a head's tensors, without ".weight"."""

    def __init__(self, config: EagleConfig) -> None:
        self.layer = "layers.0" if config.version == 1 else "midlayer"
        self.input_norm = f"{self.layer}.input_layernorm"
        self.hidden_norm = f"{self.layer}.hidden_norm"
        self.mlp_norm = f"{self.layer}.post_attention_layernorm"
        self.entry_norms = ["enorm", "hnorm"] if config.is_mtp else []

    def attention(self, which: str) -> str:
        """which: "q", "k", "v" or "o"."""
        return f"{self.layer}.self_attn.{which}_proj"

    def mlp(self, which: str) -> str:
        """which: "gate", "up" or "down"."""
        return f"{self.layer}.mlp.{which}_proj"
