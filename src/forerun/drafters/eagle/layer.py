"""The layer of an EAGLE head: the interface, and its computation in PyTorch and by the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.heads.layers import HeadLayers, NativeHead, head_attention, state_norms
from forerun.kernels.cpu.library import EagleStruct, Library, LinearStruct, RowsStruct
from forerun.kernels.torch.elementwise import rms_norm, sigmoid
from forerun.models.attention.base import Layout, Planner
from forerun.models.attention.native import PathPlanner, rows_struct
from forerun.models.base import Rows
from forerun.models.draft_session import DraftSession, Pick
from forerun.models.draft_session_native import NativeDraftSession
from forerun.models.linear import Linear
from forerun.models.model import lay_out
from forerun.models.rotation import HalfRotation, Rotation, inverse_frequencies, pair_halves, rotate
from forerun.types import Cache


def head_order(config: EagleConfig, *, in_pairs: bool) -> Tensor:
    """Return the order of a head's numbers, [head_dim] int64.

    in_pairs: those that are rotated together side by side; else as they are stored.
    """
    places, count = torch.arange(config.head_dim), config.num_rotated
    return torch.cat([pair_halves(places[:count], count), places[count:]]) if in_pairs else places


def attention_rows(config: EagleConfig, *, in_pairs: bool) -> dict[str, Tensor]:
    """Return the rows of q_proj, k_proj and v_proj by their letter, and those of q_proj that are the gate's.

    in_pairs: as of `head_order`.
    """
    width, order = config.head_dim, head_order(config, in_pairs=in_pairs)
    apart = width * (2 if config.attention_gate else 1)
    queries, keys = (torch.arange(count)[:, None] for count in (config.num_heads, config.num_kv_heads))
    found = {"q": queries * apart + order, "k": keys * width + order, "v": keys * width + torch.arange(width)}
    found["gate"] = queries * apart + width + torch.arange(width)
    return {name: rows.reshape(-1) for name, rows in found.items()}


class ReferenceEagleLayer:
    """Computes the rows of an EAGLE head in PyTorch, with linear layers of the target's kind.

    Attributes:
        planner: of its attention.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: EagleConfig, output: Linear) -> None:
        self._config, self._made, self._output = config, made, output
        layer = config.layer_name
        self._fuse = made.linear("fc")
        rows = attention_rows(config, in_pairs=True)
        self._qkv = made.product([made.rows(f"{layer}.self_attn.{name}_proj", rows[name]) for name in "qkv"])
        gate = made.rows(f"{layer}.self_attn.q_proj", rows["gate"]) if config.attention_gate else None
        self._gate = None if gate is None else made.product([gate])
        order = head_order(config, in_pairs=True)
        norms = (f"{layer}.self_attn.{name}_norm.weight" for name in "qk") if config.head_norms else ()
        self._head_norms = [made.vector(name)[order] for name in norms]
        self._out = made.linear(f"{layer}.self_attn.o_proj")
        self._gate_up = made.linear(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        self._down = made.linear(f"{layer}.mlp.down_proj")
        self._embedding_residual = made.linear("embedding_residual") if config.embedding_residual else None
        self._mlp_norm = made.vector(f"{layer}.post_attention_layernorm.weight")
        self._input_norm, self._hidden_norm = made.norm(f"{layer}.input_layernorm"), made.norm(f"{layer}.hidden_norm")
        self._norm = made.norm("norm")
        self._state_norms = [made.vector(f"{name}.weight") for name in state_norms(config)]
        self._entry_norms = [made.vector(f"{name}.weight") for name in config.entry_norms]
        self._eps = torch.tensor(config.rms_norm_eps, dtype=made.compute, device=made.device)
        self._rotation = Rotation(
            inverse_frequencies(config.rope_theta, config.num_rotated), 1.0, made.compute, made.device
        )
        self._form, attention = head_attention(config)
        self._attention = made.attention()
        self.planner: Planner = self._attention.planner([attention], made.device)

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's states, for version 3. states: [n, layers, target_hidden_size] in float32 or float64."""
        if self._state_norms:
            each = [self._normed(states[:, i], norm) for i, norm in enumerate(self._state_norms)]
            return self._made.multiply(self._fuse, torch.cat(each, 1))
        return self._made.multiply(self._fuse, states.flatten(1))

    def forward(self, layout: Layout, embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rows, which join what their caches hold.

        Args:
            embedding: [T, target_hidden_size] of the rows' tokens. states: [T, S]. Both as those of `fuse`.

        Returns:
            [R, draft_vocab_size] logits of the wanted rows, perhaps padded; [T, hidden_size] the rows' states for those
            that follow them.
        """
        output = self._layer(layout, embedding, states)
        wanted, norm = layout.select_logit_rows(output), self._norm
        logits = self._made.multiply(self._output, wanted if norm is None else self._normed(wanted, norm))
        if norm is not None and self._config.norm_output:
            output = self._normed(output, norm)
        return logits, output

    def draft_session(
        self, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> DraftSession | None:
        """Return a session that drafts chains row by row, or None. embed: [n] token ids -> [n, target_hidden_size]."""
        return None

    def keys(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> None:
        """Compute the keys and values of rows alone, which join their caches' scratch. embedding, states: as those of
        `forward`, without padding."""
        layout = lay_out(batch, self.planner)
        self._layer(layout, *(_padded(x, layout.num_rows) for x in (embedding, states)))

    def blocks(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the rows of blocks (`Rows.is_block`), which join their caches' scratch. The rest as `forward`, of all
        rows, without padding."""
        layout = lay_out(batch, self.planner)
        logits, outputs = self.forward(layout, *(_padded(x, layout.num_rows) for x in (embedding, states)))
        return logits[: layout.num_new], outputs[: layout.num_new]

    def _layer(self, layout: Layout, embedding: Tensor, states: Tensor) -> Tensor:
        """Compute the layer for all rows, [T, hidden]."""
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
        attended = self._attended(multiply(self._qkv, read), layout)
        if self._gate is not None:
            attended = attended * sigmoid(multiply(self._gate, read))
        x = x + multiply(self._out, attended)
        h = multiply(self._gate_up, self._normed(x, self._mlp_norm))
        wide = self._config.intermediate_size
        return x + multiply(self._down, F.silu(h[:, :wide]).mul_(h[:, wide:]))

    def _attended(self, qkv: Tensor, layout: Layout) -> Tensor:
        """Return [T, heads * head_dim] the output of the attention."""
        config, rows = self._config, len(qkv)
        rotated = config.num_heads + config.num_kv_heads
        heads = qkv.view(rows, -1, config.head_dim)
        for norm, part in zip(
            self._head_norms, (slice(config.num_heads), slice(config.num_heads, rotated)), strict=False
        ):
            heads[:, part] = F.rms_norm(heads[:, part], norm.shape, None, config.rms_norm_eps).mul_(norm)
        rotate(heads[:, :rotated, : config.num_rotated], self._rotation.turns(layout))
        query, key, value = heads[:, : config.num_heads], heads[:, config.num_heads : rotated], heads[:, rotated:]
        return self._attention.forward(0, query, key, value, layout, self._form)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)


def _padded(x: Tensor, num_rows: int) -> Tensor:
    """Return [num_rows, ...], the last row repeated."""
    return torch.cat([x, x[-1:].expand(num_rows - len(x), -1)])


class NativeEagleLayer(NativeHead[EagleConfig]):
    """`ReferenceEagleLayer` by the native library; every call reads the head's weights once.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: EagleConfig, output: Linear, library: Library) -> None:
        super().__init__(made, config, library)
        self._layer = self._layer_struct(config.layer_name, **self._queries())
        self._rotation = HalfRotation(inverse_frequencies(config.rope_theta, config.num_rotated), 1.0)
        form, shape = head_attention(config)
        self._path_planner = PathPlanner([shape], made.dtype)
        self.planner: Planner = self._path_planner
        self._eagle = self._eagle_struct(output, form.scale)

    def forward(self, layout: Layout, embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        wanted = torch.arange(layout.num_rows) if layout.logit_rows is None else layout.logit_rows
        rows = rows_struct(layout.plan, *self._rotation.reaching(layout.num_positions))
        return self._computed(rows, embedding, states, wanted[: layout.num_logits])

    def draft_session(
        self, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> DraftSession | None:
        return NativeEagleChains(self, caches, pick, embed)

    def keys(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> None:
        embedding, states = embedding.contiguous(), states.contiguous()
        plan, tables = self._planned(batch)
        rows, read = rows_struct(plan, *tables), (embedding.data_ptr(), states.data_ptr())
        threads = torch.get_num_threads()
        self._library.eagle(ctypes.byref(self._eagle), ctypes.byref(rows), *read, None, 0, None, None, threads)

    def blocks(self, batch: Sequence[Rows], embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        plan, tables = self._planned(batch)
        rows = rows_struct(plan, *tables, are_blocks=True)
        return self._computed(rows, embedding, states, torch.arange(len(embedding)))

    def _computed(self, rows: RowsStruct, embedding: Tensor, states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the wanted rows, and the states of all rows for those that follow."""
        embedding, states = embedding.contiguous(), states.contiguous()
        x = torch.empty(len(embedding), self._config.hidden_size)
        logits = torch.empty(len(wanted), self._config.draft_vocab_size)
        self._library.eagle(
            ctypes.byref(self._eagle),
            ctypes.byref(rows),
            embedding.data_ptr(),
            states.data_ptr(),
            wanted.data_ptr(),
            len(wanted),
            x.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        return logits, x

    def _queries(self) -> dict[str, Any]:
        """Return the fields of the layer that not every head has: norms, and queries beside a gate."""
        config, layer = self._config, self._config.layer_name
        query = f"{layer}.self_attn.q_proj"
        found = {
            "query_norm": self._norm(f"{layer}.self_attn.q_norm"),
            "key_norm": self._norm(f"{layer}.self_attn.k_norm"),
        }
        if config.version == 1:  # that of a version 3 is of the embedding alone
            found["input_norm"] = self._norm(f"{layer}.input_layernorm")
        if not config.attention_gate:
            return found
        rows = attention_rows(config, in_pairs=False)
        parts = (self._struct(self._made.product([self._made.rows(query, rows[name])])) for name in ("q", "gate"))
        return {**found, **dict(zip(("query", "attention_gate"), parts, strict=True))}

    def _eagle_struct(self, output: Linear, scale: float) -> EagleStruct:
        config = self._config
        reads_pair = config.version == 3
        layer_norms = (f"{config.layer_name}.input_layernorm", f"{config.layer_name}.hidden_norm")
        norms = layer_norms if reads_pair else config.entry_norms or (None, None)
        model = self._model_struct(ctypes.pointer(self._layer), 1, output, scale)
        model.rotated = config.num_rotated
        return EagleStruct(
            model=model,
            embedding_norm=self._norm(norms[0]),
            state_norm=self._norm(norms[1]),
            entry=LinearStruct() if reads_pair else self._fuse,
            residual=self._linear("embedding_residual") if config.embedding_residual else LinearStruct(),
            embedding_width=config.target_hidden_size,
            state_width=config.hidden_size,
            keeps_norm=config.norm_before_residual,
            gives_norm=config.norm_output,
        )


class NativeEagleChains(NativeDraftSession):
    """Chains of an EAGLE head.

    Args:
        caches, pick, embed: as of `ReferenceEagleLayer.draft_session`.
    """

    def __init__(
        self, layer: NativeEagleLayer, caches: Sequence[Cache], pick: Pick, embed: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(layer._library, caches, layer._rotation, layer._config.draft_vocab_size, pick)
        self._layer, self._embed = layer, embed
        self._given = torch.empty(0, layer._config.hidden_size)
        self._each = torch.arange(len(caches))

    def keep(self, places: Sequence[int]) -> None:
        super().keep(places)
        self._given = self._given[list(places)]

    def _compute(self, num_rows: int, num_chains: int, wanted: Tensor | None, states: Tensor | None) -> None:
        embedding = self._embed(torch.from_numpy(self._token_ids[:num_rows])).contiguous()
        read = self._given if states is None else states.contiguous()
        x = torch.empty(num_rows, self._layer._config.hidden_size)
        self._library.eagle(
            ctypes.byref(self._layer._eagle),
            ctypes.byref(self._rows),
            embedding.data_ptr(),
            read.data_ptr(),
            (self._each if wanted is None else wanted).data_ptr(),
            num_chains,
            x.data_ptr(),
            self._logits.data_ptr(),
            self._threads,
        )
        self._given = x if wanted is None else x[wanted]


EagleLayer = ReferenceEagleLayer | NativeEagleLayer
