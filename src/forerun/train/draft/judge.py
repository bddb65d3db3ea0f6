"""The judgement of a draft: its agreement with its target's labels of rows that it never learns from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from forerun.train.accelerator import copy_to_device, device_of, micro_tokens, products_in
from forerun.train.draft.parallel import mask_token_of
from forerun.train.draft.samples import Labels, ShardBatches, output_tokens_of
from forerun.train.evaluate import HeldOutAcceptance, acceptance_of, drafted_logits
from forerun.train.loop import Batch

HELD_OUT_ROWS = 64
"""Packed rows that are measured, at most."""


class HeldOutRows:
    """Rows with labels along whose wanted tokens drafts are measured.

    Args:
        labels: of these rows.
        num_draft_tokens: of the chains.
        dtype: of products of weights in float32.
    """

    def __init__(self, labels: Labels, num_draft_tokens: int, dtype: torch.dtype = torch.float32) -> None:
        self._labels = labels
        self._num_draft_tokens = num_draft_tokens
        self._dtype = dtype

    def __len__(self) -> int:
        """Return the number of rows."""
        return min(len(self._labels.rows), HELD_OUT_ROWS)

    @property
    def num_shards(self) -> int:
        """Return the number of shards of their labels."""
        return self._labels.shards_of(len(self))

    @cached_property
    def _batches(self) -> ShardBatches:
        """Read the labels, once they are all there."""
        return ShardBatches(self._labels, self.num_shards, 1, 0)

    def length(self, draft: torch.nn.Module) -> float:
        """Return the mean acceptance length of greedy chains, 1 without rows that are long enough."""
        assert isinstance(draft, PreTrainedModel)
        return next((each.mean_acceptance_length for each in self.acceptance(draft, (0.0,))), 1.0)

    @torch.inference_mode()
    def acceptance(
        self, draft: PreTrainedModel, temperatures: tuple[float, ...] = (0.0, 1.0)
    ) -> list[HeldOutAcceptance]:
        """Measure acceptance at temperatures 0 and 1; nothing where no draft fits the rows.

        At temperature 0 a token is accepted where it is the target's most probable one, whatever the text says next; at
        1, with the overlap over the tokens that the labels have, which is a little less than the whole.
        """
        if not len(self):
            return []
        found: dict[float, list[Tensor]] = {temperature: [] for temperature in temperatures}
        chains = 1 if mask_token_of(draft) is None else self._num_draft_tokens
        outputs = output_tokens_of(draft)
        at_once = micro_tokens(draft, None if outputs is None else len(outputs))
        size = max(1, at_once // (self._labels.rows.window * chains))
        chosen = self._batches.rows[:HELD_OUT_ROWS]
        for first in range(0, len(chosen), size):
            batch = self._batches.rows_of(chosen[first : first + size])
            with products_in(self._dtype, device_of(draft)):
                for temperature, agreed in self._agreements(draft, batch, outputs, temperatures):
                    found[temperature] += _runs(agreed.cpu(), batch, self._num_draft_tokens)
        return [
            each
            for temperature, runs in found.items()
            for each in acceptance_of(runs, temperature, self._num_draft_tokens)
        ]

    def _agreements(
        self, draft: PreTrainedModel, batch: Batch, outputs: Tensor | None, temperatures: tuple[float, ...]
    ) -> Iterator[tuple[float, Tensor]]:
        """Yield for each temperature how far chains agree with the labels, as `agreement_of` returns it."""
        where = device_of(draft)
        tokens, ids, probs, documents = (copy_to_device(each, where) for each in batch[:4])
        found: dict[float, list[Tensor]] = {temperature: [] for temperature in temperatures}
        inputs = tokens[:, :-1].long(), documents[:, :-1]
        for place, every in enumerate(drafted_logits(draft, *inputs, self._num_draft_tokens, outputs=outputs)):
            logits = every[:, : every.shape[1] - place]
            wanted = ids[:, place:].long()
            for temperature, agreed in found.items():
                if temperature == 0:
                    values = (logits.argmax(-1) == wanted[..., 0]).float()
                else:
                    own = torch.softmax(logits / temperature, -1).gather(-1, wanted.clamp(min=0))
                    values = torch.minimum(own, probs[:, place:].float()).masked_fill(wanted < 0, 0).sum(-1)
                agreed.append(F.pad(values, (place, 0)))
        yield from ((temperature, torch.stack(each, 1)) for temperature, each in found.items())


def _runs(values: Tensor, batch: Batch, longer_than: int) -> list[Tensor]:
    """Split values [rows, K, window] into runs of consecutive wanted tokens: answers with the end of
    their prompts."""
    runs = []
    for row, wanted, documents in zip(values, batch[4][:, 1:], batch[3][:, 1:], strict=True):
        breaks = (wanted[1:] != wanted[:-1]) | (documents[1:] != documents[:-1])
        bounds = [0, *(breaks.nonzero()[:, 0] + 1).tolist(), len(wanted)]
        spans = [span for span in pairwise(bounds) if wanted[span[0]] and span[1] - span[0] > longer_than]
        runs += [row[:, start:end] for start, end in spans]
    return runs
