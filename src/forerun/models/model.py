"""A language model as the engine uses it: one packed forward for rows of any sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import UnsupportedModelError
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kv_cache import PagePool, SequenceCache
from forerun.models.attention.base import Layout, PackedRows, Planner, cache_of
from forerun.models.base import (
    Exactness,
    Forward,
    HiddenStateOutputs,
    LanguageModel,
    LayerRangeDecoder,
    Rows,
    StandIn,
    check_layers,
)
from forerun.models.draft_session import DeviceDraftSession, DraftSession, Pick
from forerun.types import Cache
from forerun.utils.tree import Tree

if TYPE_CHECKING:
    from forerun.models.loading.gguf.file import GgufTensor

# Packs the rows of sequences into the arrays of one forward.


def lay_out(batch: Sequence[Rows], planner: Planner) -> Layout:
    """Pack the rows of several sequences, and add them to their caches' scratch."""
    packed: list[PackedRows] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    hidden_output_rows: list[int] = []
    for rows in batch:
        packed.append(packed_rows(rows, len(positions)))
        positions += packed[-1].positions
        end = len(positions)
        logit_rows += range(end - rows.num_wanted, end)
        hidden_output_rows += range(end - rows.num_hidden_rows, end)
    num_new = len(positions)
    padding = max(0, planner.min_rows - num_new)
    positions += positions[-1:] * padding
    num_logits = len(logit_rows)
    logits_selected = None
    hidden_selected = None
    if len(hidden_output_rows) != num_new:
        hidden_selected = torch.tensor(hidden_output_rows, dtype=torch.int64).to(planner.device, non_blocking=True)
    if num_logits != num_new:
        logit_rows += [num_new + padding - 1] * (planner.min_rows - num_logits)
        logits_selected = torch.tensor(logit_rows).to(planner.device, non_blocking=True)
    return Layout(
        num_rows=num_new + padding,
        num_new=num_new,
        num_positions=max(positions) + 1,
        token_ids=_token_ids(batch, padding, planner.device),
        positions=torch.tensor(positions).to(planner.device, non_blocking=True),
        logit_rows=logits_selected,
        num_logits=num_logits,
        plan=planner.plan(packed, padding),
        packed=packed,
        hidden_output_rows=hidden_selected,
        states=None if all(rows.states is None for rows in batch) else _states(batch, padding, planner.device),
    )


def packed_rows(rows: Rows, start: int) -> PackedRows:
    """Add the rows to their cache's scratch, and return them as packed from row `start` on."""
    cache = cache_of(SequenceCache, rows.cache)  # type: ignore[type-abstract]  # nothing is made of it
    n = len(rows.token_ids)
    first = len(cache.scratch_parents)
    if rows.hidden is not None:  # they go on from a middle layer, and have been fed
        first -= n
    else:
        cache.feed(range(first - 1, first - 1 + n) if rows.parents is None else rows.parents)
        if cache.state is not None:
            cache.state.prepare(cache.scratch_parents, n, rows.num_wanted)
    parents = cache.scratch_parents
    length = cache.length
    is_chain = parents == list(range(-1, len(parents) - 1))
    positions: Sequence[int] = range(length + first, length + first + n)
    if not is_chain:
        positions = [length + depth - 1 for depth in Tree(parents=parents).depths[first:]]
    return PackedRows(cache, start, start + n, first, positions, is_chain, rows.is_block)


def _token_ids(batch: Sequence[Rows], padding: int, device: torch.device) -> Tensor:
    """Return the token ids, [num_rows] int64, with the last one repeated. Tokens that lie on a device stay there,
    unread."""
    if not any(isinstance(rows.token_ids, Tensor) for rows in batch):
        tokens = [token_id for rows in batch for token_id in rows.token_ids]
        return torch.tensor(tokens + tokens[-1:] * padding).to(device, non_blocking=True)
    there = (rows.token_ids.device for rows in batch if isinstance(rows.token_ids, Tensor))
    device = next((each for each in there if each.type != "cpu"), device)
    parts = [torch.as_tensor(rows.token_ids, dtype=torch.int64).to(device, non_blocking=True) for rows in batch]
    return torch.cat([*parts, parts[-1][-1:].expand(padding)])


def _states(batch: Sequence[Rows], padding: int, device: torch.device) -> Tensor:
    """Return the states, [num_rows, S], with the last one repeated, if some rows have states.

    Raises:
        ValueError: others do not, or there is not one for each token.
    """
    parts = [rows.states for rows in batch if rows.states is not None]
    if [len(part) for part in parts] != [len(rows.token_ids) for rows in batch]:
        raise ValueError("each row of a head's forward needs a state beside its token")
    return torch.cat([*parts, parts[-1][-1:].expand(padding, -1)]).to(device, non_blocking=True)


class Decoder(Protocol):
    """The computing part of a model: arrays in, arrays out."""

    @property
    def num_layers(self) -> int: ...

    @property
    def planner(self) -> Planner:
        """Return what prepares its forwards and makes their caches; fixed when the decoder is made."""

    @property
    def num_experts_read(self) -> int:
        """Return the experts that all forwards together have read; 0: only the native decoder counts them."""

    def forward(self, layout: Layout, layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Return logits of the requested rows, [R, V] with R >= layout.num_logits, and the states that enter
        `layers`."""

    def draft_session(self, caches: Sequence[Cache], pick: Pick) -> DraftSession | None:
        """Return a session that computes chains row by row, with less preparation for each row than `forward`
        (`LanguageModel.draft_session`)."""

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, [n, hidden] float32. token_ids: [n] int64."""

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, [n, hidden] float32. token_ids: [n] int64."""


class Model(LanguageModel):
    """A target or draft model.

    Attributes:
        name: the name that it was loaded by.
        vocab_size: width of the logits.
        context_length: positions it can compute.
        eos_token_ids: tokens that end its output.
        dtype: of the weights.
        device: where they lie.
        kind: of decoder, "fused" or "general".
        packed_weights: tensors as they are packed in a GGUF file, by the names of Transformers' parameters; nothing for
            a model that comes from another kind of file.
        num_layers: layers, each with keys and values that belong to it alone.
        output_tokens: int64, the tokens whose logits `forward` computes; the others' are -inf. None: it is all.
        exactness: the self-test's verdict.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        name: str,
        vocab_size: int,
        context_length: int,
        eos_token_ids: frozenset[int],
        dtype: torch.dtype,
        device: torch.device,
        num_parameters: int,
        kind: str,
        output_tokens: Tensor | None = None,
    ) -> None:
        super().__init__(
            name,
            vocab_size,
            context_length,
            eos_token_ids,
            dtype,
            device,
            num_parameters,
            exactness=Exactness(False, "the self-test has not run"),
        )
        self.decoder = decoder
        self.kind = kind
        self.packed_weights: Mapping[str, GgufTensor] = {}
        self.num_layers = decoder.num_layers
        self.compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._planner = decoder.planner
        self.state_nbytes = 0 if self._planner.new_state is None else self._planner.new_state.layout.nbytes
        self.output_tokens = output_tokens
        self._widened = output_tokens  # what the decoder's columns are, if logits are widened to all tokens

    @property
    def can_exit_early(self) -> bool:
        """Return whether `forward_first` can be used."""
        return isinstance(self.decoder, LayerRangeDecoder)

    @property
    def pool(self) -> PagePool:
        """Return the pool of its caches' pages, unbounded until it is given a bound."""
        return self._planner.pool

    def new_cache(self) -> SequenceCache:
        """Return an empty cache for one sequence, as the decoder's attention reads it."""
        return self._planner.new_cache()

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """Compute the rows of several sequences (`LanguageModel.forward`).

        Raises:
            ConfigError: `layers` is out of range.
            ValueError: `layers` lie before the one that rows go on from.
        """
        if layers:
            check_layers(layers, self.num_layers)
        if any(rows.hidden is not None for rows in batch):
            return self._go_on(batch, layers)
        layout = lay_out(batch, self._planner)
        before = self.decoder.num_experts_read
        logits, hidden_outputs = self.decoder.forward(layout, layers)
        num_experts = self.decoder.num_experts_read - before
        return Forward(self._of_all_tokens(logits[: layout.num_logits]), hidden_outputs, num_experts)

    def experts_given(self) -> NDArray[np.int64] | None:
        """Return the rows that each expert was given so far (`LanguageModel.experts_given`)."""
        return self.decoder.experts_given() if isinstance(self.decoder, LayerRangeDecoder) else None

    def fingerprint(self) -> str | None:
        """Return a hash of all that decides the bits of keys, values and states (`LanguageModel.fingerprint`)."""
        return self.decoder.fingerprint() if isinstance(self.decoder, LayerRangeDecoder) else None

    def draft_session(self, caches: Sequence[Cache], pick: Pick) -> DraftSession | None:
        """Return a session that computes chains row by row, with less preparation for each row than `forward`
        (`LanguageModel.draft_session`)."""
        if self._widened is not None:  # columns of the decoder's logits are not tokens
            return None
        if self.device.type == "cpu":
            return self.decoder.draft_session(caches, pick)
        return DeviceDraftSession(self, caches, pick) if pick.num_ahead > 1 else None

    def of_outputs(self, blocks: NDArray[np.int32]) -> Model | None:
        """Return the same model whose logits are those of some tokens alone (`LanguageModel.of_outputs`)."""
        part = self.decoder.of_outputs(blocks) if isinstance(self.decoder, LayerRangeDecoder) else None
        if part is None:
            return None
        model = copy(self)
        model.decoder = part
        model._widened = None
        return model

    @torch.inference_mode()
    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, dequantized if necessary (`LanguageModel.embedding_rows`)."""
        return self.decoder.embedding_rows(token_ids.to(self.device))

    @torch.inference_mode()
    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, whose product with the state after the final norm gives the logits
        (`LanguageModel.output_rows`)."""
        if self.output_tokens is not None:
            raise UnsupportedModelError(
                f"{self.name} proposes {len(self.output_tokens):,} of its {self.vocab_size:,} tokens, and a head needs "
                "the rows of all. Take the model that it was made from."
            )
        return self.decoder.output_rows(token_ids.to(self.device))

    @property
    def output_layer(self) -> NativeLinear | None:
        """Return the output layer of a native decoder, if it is of all tokens and has no bias
        (`LanguageModel.output_layer`)."""
        layer = getattr(self.decoder, "lm_head", None) if self.output_tokens is None else None
        return layer if isinstance(layer, NativeLinear) and layer.bias is None else None

    @torch.inference_mode()
    def forward_first(self, batch: Sequence[Rows], num_layers: int) -> tuple[Tensor, Tensor]:
        """Compute the rows through the first layers only, and the logits as if the model had no more layers (early
        exit: Elhoushi et al., 2404.16710). Keys and values of those layers are written as scratch, and are final:
        `Rows.hidden` passes the remaining layers to a later `forward`.

        Args:
            batch: at least one Rows, nothing computed yet.
            num_layers: from 1 to all but one.

        Returns:
            [rows, hidden], what enters the next layer, in packed order, in the type that the decoder keeps them in; and
            [sum of num_logits, V] logits of the final norm and head, as `forward` returns them.

        Raises:
            UnsupportedModelError: the fused decoder does not compute the model.
            ValueError: num_layers is out of range, or rows have been computed in part.
        """
        decoder = self._by_layers("exit early")
        if not 1 <= num_layers < self.num_layers:
            raise ValueError(f"{num_layers} first layers requested, but must be from 1 to {self.num_layers - 1}")
        if any(rows.hidden is not None for rows in batch):
            raise ValueError("rows with hidden states have been through the first layers already")
        hidden, layout = self._through_first(decoder, batch, num_layers)
        logits = decoder.head(hidden, layout, HiddenStateOutputs((), layout))
        return hidden[: layout.num_new], self._of_all_tokens(logits[: layout.num_logits])

    def _through_first(
        self, decoder: LayerRangeDecoder, batch: Sequence[Rows], num_layers: int
    ) -> tuple[Tensor, Layout]:
        layout = lay_out(batch, self._planner)
        return decoder.forward_layers(
            decoder.embed(layout), layout, 0, num_layers, HiddenStateOutputs((), layout)
        ), layout

    def _go_on(self, batch: Sequence[Rows], layers: Sequence[int]) -> Forward:
        """Compute `forward` where some rows have been through the first layers. The other rows catch up in a forward of
        their own, then all continue together."""
        decoder = self._by_layers("go on from a middle layer")
        first = _common_layer(batch, self.num_layers)
        if layers:
            check_layers(layers, self.num_layers, first)
        fresh = [rows for rows in batch if rows.hidden is None]
        caught_up = self._through_first(decoder, fresh, first)[0] if fresh else None
        resumed = []
        done = 0
        for rows in batch:
            if rows.hidden is None and caught_up is not None:
                end = done + len(rows.token_ids)
                rows = replace(rows, parents=None, hidden=caught_up[done:end], first_layer=first)
                done = end
            resumed.append(rows)
        layout = lay_out(resumed, self._planner)
        parts = [rows.hidden for rows in resumed if rows.hidden is not None]
        parts.append(parts[-1][-1:].expand(layout.num_rows - layout.num_new, -1))
        hidden_outputs = HiddenStateOutputs(layers, layout)
        x = decoder.forward_layers(torch.cat(parts), layout, first, self.num_layers, hidden_outputs)
        logits = decoder.head(x, layout, hidden_outputs)
        return Forward(self._of_all_tokens(logits[: layout.num_logits]), hidden_outputs.stacked())

    def _of_all_tokens(self, logits: Tensor) -> Tensor:
        """Expand logits from the tokens that the decoder computes to the vocabulary: [R, tokens] -> [R, V]."""
        if self._widened is None:
            return logits.to(self.compute_dtype)
        wide = logits.new_full((len(logits), self.vocab_size), -torch.inf, dtype=self.compute_dtype)
        return wide.index_copy_(1, self._widened, logits.to(self.compute_dtype))

    def _by_layers(self, purpose: str) -> LayerRangeDecoder:
        if not isinstance(self.decoder, LayerRangeDecoder):
            raise UnsupportedModelError(
                f"{self.name} cannot {purpose}: it runs on the general path, whose modules compute all layers at once. "
                "Only the fused decoder computes a range of layers."
            )
        return self.decoder


def _common_layer(batch: Sequence[Rows], num_layers: int) -> int:
    """Return the layer that all rows with hidden states continue from, after checking those rows."""
    layers = {rows.first_layer for rows in batch if rows.hidden is not None}
    if len(layers) > 1:
        raise ValueError(f"rows of one forward go on from layers {sorted(layers)}, but must go on from the same")
    (first,) = layers
    if not 1 <= first < num_layers:
        raise ValueError(f"rows go on from layer {first}, but must from 1 to {num_layers - 1}")
    for rows in batch:
        if rows.hidden is None:
            continue
        if rows.parents is not None:
            raise ValueError("rows of a branching tree have hidden states, but only chains can go on from a layer")
        if rows.cache.num_scratch < len(rows.token_ids):
            raise ValueError(f"{len(rows.token_ids)} rows are to go on, but {rows.cache.num_scratch} have been fed")
        if len(rows.hidden) != len(rows.token_ids):
            raise ValueError(f"{len(rows.hidden)} hidden states given for {len(rows.token_ids)} rows")
    return first


@runtime_checkable
class NamedTensors(Protocol):
    """A decoder that lists the numbers it has packed."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by the names of Transformers' parameters, or by several of them that are packed as one."""


def first_non_finite_tensor(model: LanguageModel) -> str | None:
    """Return the name, as in the checkpoint, of the first weight tensor with an entry that is NaN or infinite.

    None: every entry is finite, or the model is of a kind whose weights cannot be looked at. The fused decoder
    keeps some tensors side by side; they are named together. All weights are read: a second for a model of a few
    gigabytes.
    """
    if isinstance(model, StandIn):
        return first_non_finite_tensor(model.model)
    if not isinstance(model, Model):
        return None
    if not isinstance(model.decoder, NamedTensors):
        return None
    return next((name for name, tensor in model.decoder.named_tensors() if not _is_finite(tensor)), None)


def has_finite_rows(logits: Tensor) -> bool:
    """Return whether every row, [R, V], has a largest entry that is finite: -inf beside it is how tokens are masked."""
    return bool(torch.isfinite(logits.amax(-1)).all())


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # both ends are NaN where one entry is: a tenth of the time of a flag for each entry
    return bool(torch.isfinite(torch.stack(tensor.aminmax())).all())
