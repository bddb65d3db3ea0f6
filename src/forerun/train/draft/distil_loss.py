"""The loss of a step of distillation: the draft's logits where they count, a part of the positions at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from forerun.models.llama import llama_refusal
from forerun.train.accelerator import device_of, to_device
from forerun.train.attention import document_mask
from forerun.train.defaults import LossName
from forerun.train.losses import distillation_loss
from forerun.train.token_ids import columns_of
from forerun.train.workers import Batch

LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 29, "mps": 1 << 25}
"""Logits that are there together, with their gradients; those of more positions are computed again backwards."""


@dataclass(slots=True)
class DistillationLoss:
    """The loss of a draft on rows of samples.

    Attributes:
        name: of the loss (`losses.divergence`).
        output_tokens: int64, those that the draft proposes; None for all.
        columns: int64 [V], each token's place among these, -1 for the others.
    """

    name: LossName
    output_tokens: Tensor | None = None
    columns: Tensor | None = None

    @classmethod
    def of(cls, name: LossName, output_tokens: Tensor | None, vocab_size: int) -> DistillationLoss:
        """For a draft that proposes these tokens of its vocabulary."""
        return cls(name, output_tokens, None if output_tokens is None else columns_of(output_tokens, vocab_size))

    def mean(self, draft: nn.Module, rows: Batch, variation_share: float) -> Tensor:
        """Over the positions of the rows whose next token is wanted, all of them unless rows are packed.

        rows: as `ShardBatches.batch` gives them.
        """
        assert isinstance(draft, PreTrainedModel)
        where = device_of(draft)
        tokens, ids, probs, *packed = (to_device(tensor, where) for tensor in rows)
        ids, probs = ids.long(), probs.float()
        if self.columns is not None:
            ids = self.columns.to(where)[ids]
        inputs = {"input_ids": tokens[:, :-1].long()}
        counted = None
        if packed:
            documents, wanted = packed
            inputs["attention_mask"] = document_mask(documents[:, :-1])
            counted = wanted[:, 1:]
            ids, probs = ids[counted], probs[counted]
        with torch.autocast(where.type, dtype=torch.bfloat16):
            if llama_refusal(draft.config) is not None:  # it may do more to its logits than one product
                logits = draft(**inputs, use_cache=False).logits
                logits = logits if counted is None else logits[counted]
                return distillation_loss(logits, ids, probs, self.name, variation_share=variation_share)
            hidden = draft.base_model(**inputs, use_cache=False).last_hidden_state
            hidden = hidden.flatten(0, 1) if counted is None else hidden[counted]
            return self._of_states(draft, hidden, ids.flatten(0, -2), probs.flatten(0, -2), variation_share)

    def _of_states(
        self, draft: PreTrainedModel, hidden: Tensor, ids: Tensor, probs: Tensor, variation_share: float
    ) -> Tensor:
        """hidden: [N, H] after the final norm; ids, probs: [N, k]."""
        head = draft.get_output_embeddings()
        weight, bias = head.weight, head.bias
        if self.output_tokens is not None:
            chosen = self.output_tokens.to(hidden.device)
            weight, bias = weight[chosen], None if bias is None else bias[chosen]

        def total(part: Tensor, part_ids: Tensor, part_probs: Tensor) -> Tensor:
            logits = F.linear(part, weight, bias)
            mean = distillation_loss(logits, part_ids, part_probs, self.name, variation_share=variation_share)
            return mean * len(part)

        if not len(hidden):  # none of these rows' tokens are wanted
            return hidden.sum() * 0.0
        size = max(1, LOGITS_AT_ONCE[hidden.device.type] // len(weight))
        parts = list(zip(*(torch.split(each, size) for each in (hidden, ids, probs)), strict=True))
        if len(parts) == 1:
            return total(*parts[0]) / len(hidden)
        sums = [checkpoint(total, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.stack(sums).sum() / len(hidden)
