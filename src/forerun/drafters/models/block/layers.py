"""The layers of a block head: the interface, and their computation in PyTorch and by the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.eagle.layer import EagleLayer, NativeEagleLayer, ReferenceEagleLayer
from forerun.drafters.models.heads.layers import HeadLayers, NativeHead, fused_states, head_modules
from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.torch.elementwise import rms_norm
from forerun.kv_cache import SequenceCache
from forerun.models.attention.base import Planner, cache_of
from forerun.models.attention.native import rows_struct
from forerun.models.base import HiddenStateOutputs, LanguageModel, Rows
from forerun.models.fused.decoder import FusedDecoder
from forerun.models.linear import Linear
from forerun.models.model import lay_out
from forerun.models.rope import apply_rotary, pair_halves


@dataclass(frozen=True, slots=True, eq=False)
class BlockEnds:
    """The mask that a block begins with, its Markov bias and its confidence.

    Attributes:
        mask: [hidden] the input of the slots after the first; None of a head with `context_tokens`.
        before: [vocab_size, rank] W1, and `after` W2, of the Markov bias; None without.
        confidence: weight [width] and bias of the estimate; None without.
    """

    mask: Tensor | None
    before: Tensor | None
    after: Linear | None
    confidence: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, made: HeadLayers, config: BlockConfig, target: LanguageModel, token_ids: Tensor) -> BlockEnds:
        """Build from a head's tensors. token_ids: [draft_vocab_size] the target's tokens that it can propose."""
        mask = None
        if config.mask_token_id is not None:
            mask = target.embedding_rows(torch.tensor([config.mask_token_id]))[0].to(target.device, made.compute)
        elif not config.context_tokens:
            mask = made.vector("mask_embedding.weight")
        before, after = _markov(made, config, target, token_ids) if config.markov_rank else (None, None)
        confidence_name = "confidence_head.proj" if config.confidence else None
        return cls(
            mask=mask,
            before=before,
            after=after,
            confidence=(made.vector(f"{confidence_name}.weight")[0], made.vector(f"{confidence_name}.bias")[0])
            if confidence_name
            else None,
        )


def _markov(made: HeadLayers, config: BlockConfig, target: LanguageModel, token_ids: Tensor) -> tuple[Tensor, Linear]:
    """Return [vocab_size, rank] W1, and W2, of the bias; those shared with the target are multiplied once."""
    first = "markov_head.markov_w1"
    second = "markov_head.markov_w2"
    if not config.markov_shared:
        return made.vector(f"{first}.weight").contiguous(), made.linear(second)
    embeddings = target.embedding_rows(torch.arange(config.vocab_size, device=target.device)).to(made.compute)
    rows = made.vector("lm_head.weight") if config.own_output_rows else target.output_rows(token_ids).to(made.compute)
    after = rows.to(made.device) @ made.vector(f"{second}.weight")
    return embeddings @ made.vector(f"{first}.weight").T, made.product([after])


class ReferenceBlockLayers:
    """Computes the rows of a block head in PyTorch, with linear layers of the target's kind.

    Attributes:
        planner: of its attention.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: BlockConfig, output: Linear) -> None:
        self._config = config
        self._made = made
        self._fuse = made.linear("fc")
        self._state_norms = [made.vector(f"{name}.weight") for name in config.state_norms]
        self._context_norm = made.vector("hidden_norm.weight")
        prefixes = [f"layers.{index}.self_attn" for index in range(config.num_layers)]
        keys, values = ([f"{prefix}.{name}_proj" for prefix in prefixes] for name in "kv")
        # to the keys of all layers, then the values of all layers
        self._context = made.linear(*keys, *values, rotated=len(keys), head_dim=config.head_dim)
        order = pair_halves(torch.arange(config.head_dim), config.head_dim)
        self._key_norms = [made.vector(f"{prefix}.k_norm.weight")[order] for prefix in prefixes]
        self._eps = torch.tensor(config.rms_norm_eps, dtype=made.compute, device=made.device)
        self._decoder = FusedDecoder(*head_modules(made, config, output))
        self.planner: Planner = self._decoder.planner

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's states, [n, layers, hidden_size] in float32 or float64, to [n, hidden_size]."""
        return fused_states(self._made, self._fuse, self._state_norms, states)

    def context(self, batch: Sequence[Rows]) -> None:
        """Compute context rows of fused states, which join their caches' scratch."""
        config = self._config
        caches = [cache_of(SequenceCache, rows.cache) for rows in batch]  # type: ignore[type-abstract]
        states = torch.cat([rows.states for rows in batch if rows.states is not None])
        firsts = [cache.num_scratch for cache in caches]
        positions: list[int] = []
        for cache, first, rows in zip(caches, firsts, batch, strict=True):
            count = len(rows.token_ids)
            cache.feed(range(first - 1, first + count - 1))
            positions += range(cache.length + first, cache.length + first + count)
        states = self._normed(states.to(self._made.device, self._made.compute), self._context_norm)
        heads = self._made.multiply(self._context, states)
        # [2, layers, heads, rows, head_dim]
        both = heads.view(len(states), 2, config.num_layers, config.num_kv_heads, config.head_dim).permute(
            1, 2, 3, 0, 4
        )
        cos_sin = self._decoder.ropes[0].at(torch.tensor(positions, device=self._made.device))
        for index, norm in enumerate(self._key_norms):
            keys = self._normed(both[0, index].transpose(0, 1).contiguous(), norm)
            apply_rotary(keys, cos_sin)
            keys = keys.transpose(0, 1)
            start = 0
            for cache, first, rows in zip(caches, firsts, batch, strict=True):
                part = slice(start, start + len(rows.token_ids))
                cache.write(index, first, keys[:, part], both[1, index][:, part])
                start = part.stop

    def forward(self, batch: Sequence[Rows], x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute blocks, whose slots join their caches' scratch.

        Args:
            batch: of which the tokens are not read.
            x: [T, hidden_size] the inputs of the slots; may be overwritten.

        Returns:
            Of the wanted rows, [R, hidden_size] what the output layer reads, and [R, draft_vocab_size] logits without
            the Markov bias.
        """
        layout = lay_out(batch, self.planner)
        x = torch.cat([x, x[-1:].expand(layout.num_rows - len(x), -1)])
        decoder = self._decoder
        made = self._made
        outputs = HiddenStateOutputs((decoder.num_layers,), layout)
        x = decoder.forward_layers(x.to(made.takes), layout, 0, decoder.num_layers, outputs)
        logits = decoder.head(x, layout, outputs)
        normed = outputs.stacked()
        assert normed is not None
        return normed[:, 0].to(made.compute), logits[: layout.num_logits].to(made.compute)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)


class NativeBlockLayers(NativeHead[BlockConfig]):
    """`ReferenceBlockLayers` by the native library: one call each for context rows, layers of a block, and logits.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: BlockConfig, output: Linear, library: Library) -> None:
        super().__init__(made, config, output, library)
        self._context_norm = made.vector("hidden_norm.weight").contiguous()
        self._model = self._decoder.struct

    def context(self, batch: Sequence[Rows]) -> None:
        parts = [rows.states for rows in batch if rows.states is not None]
        states = (parts[0] if len(parts) == 1 else torch.cat(parts)).float().contiguous()
        plan, tables = self._planned(batch)
        rows = rows_struct(plan, *tables)
        self._library.context(
            ctypes.byref(self._model),
            self._context_norm.data_ptr(),
            ctypes.byref(rows),
            states.data_ptr(),
            torch.get_num_threads(),
        )

    def forward(self, batch: Sequence[Rows], x: Tensor) -> tuple[Tensor, Tensor]:
        threads = torch.get_num_threads()
        model = ctypes.byref(self._model)
        x = x.contiguous()
        plan, tables = self._planned(batch)
        rows = rows_struct(plan, *tables, are_blocks=True)
        count = self._config.num_layers
        self._library.forward_layers(model, ctypes.byref(rows), 0, count, x.data_ptr(), None, 0, None, threads)
        parts = torch.split(x, [len(each.token_ids) for each in batch])
        wanted = [part[len(part) - each.num_wanted :] for part, each in zip(parts, batch, strict=True)]
        output = wanted[0] if len(wanted) == 1 else torch.cat(wanted)
        logits = torch.empty(len(output), self._config.draft_vocab_size)
        self._library.head(model, len(output), output.data_ptr(), logits.data_ptr(), threads)
        return output, logits


class PairLayers:
    """The layer of a head with `context_tokens`, an EAGLE-3 layer that computes all tokens of a block at once, and its
    slots' own vectors.

    Attributes:
        planner: of its attention.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
        target: whose embeddings the rows read.
    """

    def __init__(self, made: HeadLayers, config: BlockConfig, output: Linear, target: LanguageModel) -> None:
        of_pairs = config.layer_of_pairs
        self._layer: EagleLayer = (
            ReferenceEagleLayer(made, of_pairs, output)
            if made.library is None
            else NativeEagleLayer(made, of_pairs, output, made.library)
        )
        self.planner: Planner = self._layer.planner
        self._compute = made.compute
        self._target = target
        self._slot_embeddings = made.vector("slot_embeddings.weight")
        self._slot_states = made.vector("slot_states.weight")

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's states, [n, layers, hidden_size] in float32 or float64, to [n, hidden_size]."""
        return self._layer.fuse(states)

    def context(self, batch: Sequence[Rows]) -> None:
        """Compute context rows, each of a token and the fused state of the one before it. They join their caches'
        scratch."""
        tokens = torch.tensor([token for rows in batch for token in rows.token_ids])
        states = [rows.states for rows in batch if rows.states is not None]
        self._layer.keys(batch, self._embedded(tokens), _joined(states).to(self._compute))

    def forward(self, batch: Sequence[Rows], states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute blocks, whose slots join their caches' scratch.

        Args:
            batch: whose tokens are all the last committed one of their sequence.
            states: of each block, [hidden_size] the fused state of the token before this one.

        Returns:
            As of `ReferenceBlockLayers.forward`.
        """
        embedding = self._embedded(torch.tensor([rows.token_ids[0] for rows in batch]))
        counts = [len(rows.token_ids) for rows in batch]
        embeddings = [self._slot_embeddings[:count] + one for count, one in zip(counts, embedding, strict=True)]
        own = [self._slot_states[:count] + one for count, one in zip(counts, states, strict=True)]
        logits, outputs = self._layer.blocks(batch, _joined(embeddings), _joined(own))
        return outputs, logits

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return [n, hidden_size] the target's embeddings of tokens."""
        return self._target.embedding_rows(tokens.to(self._target.device)).to(self._compute)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def greedy_chains(
    library: Library,
    after: NativeLinear,
    before: Tensor,
    token_ids: Tensor,
    logits: Tensor,
    last: Sequence[int],
    lengths: Sequence[int],
) -> list[int]:
    """Return the most probable tokens of chains, each with the Markov bias of the one before it; -1 from the first row
    on whose logits are not finite.

    Args:
        after, before, token_ids: of the head (`BlockEnds`).
        logits: [sum of lengths, draft_vocab_size], those of one chain after another.
        last: [chains] the token before each chain. lengths: [chains], at least 1.
    """
    logits, picked = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64)
    firsts = torch.tensor(last)
    counts = torch.tensor(lengths)
    pointers = [each.data_ptr() for each in (before, token_ids, logits, firsts, counts)]
    library.greedy_chains(
        ctypes.byref(after.struct), *pointers, len(lengths), picked.data_ptr(), torch.get_num_threads()
    )
    tokens: list[int] = picked.tolist()
    return tokens


BlockLayers = ReferenceBlockLayers | NativeBlockLayers | PairLayers
