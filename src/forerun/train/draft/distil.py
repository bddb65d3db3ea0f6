"""The distillation of a draft from its target's soft labels of packed rows."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.models.decoders import llama_refusal
from forerun.models.loading.configuration import MASK_TOKEN
from forerun.train.accelerator import (
    columns_of,
    copy_to_device,
    device_of,
    model_vocabulary,
    products_in,
    training_device,
)
from forerun.train.checkpoint import LoopState, load_checkpoint, pin, pin_target, pinned
from forerun.train.data.packed import PackedShard
from forerun.train.defaults import DraftTraining, LossName
from forerun.train.draft.parallel import MaskLayout, mask_token_of, set_mask_token
from forerun.train.draft.prune import check_size, check_start, pruned_copy, step_parameters
from forerun.train.draft.samples import (
    ShardBatches,
    frequent_tokens,
    num_shards,
    output_tokens_of,
    restrict,
    sample_all,
)
from forerun.train.evaluate import document_mask
from forerun.train.loop import Batch, Loop, StageProgress, Workers
from forerun.train.losses import distillation_loss
from forerun.train.optim import Optimisers
from forerun.utils.files import digest

SHARDS = "shards"
"""Key of the number of shards of soft labels that a draft learns from."""
_CALIBRATION = (16, 256)
"""Rows and tokens of the text that ranks a pruned copy's channels."""
LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 29, "mps": 1 << 25}
"""Logits in memory at once, with their gradients; those of more positions are recomputed in the backward pass."""


@dataclass(slots=True)
class DistillationLoss:
    """The loss of a draft on rows of samples: logits at wanted positions, some positions at a time.

    Attributes:
        name: of the loss (`losses.divergence`).
        output_tokens: int64, those that the draft proposes; None for all.
        columns: int64 [V], each token's index among these, -1 for the others.
        dtype: of products.
        parallel: tokens of the chains that are learnt; None for one token at a time.
    """

    name: LossName
    output_tokens: Tensor | None = None
    columns: Tensor | None = None
    dtype: torch.dtype = torch.float32
    parallel: int | None = None

    @classmethod
    def of(
        cls,
        name: LossName,
        output_tokens: Tensor | None,
        vocab_size: int,
        dtype: torch.dtype = torch.float32,
        parallel: int | None = None,
    ) -> DistillationLoss:
        """Return the loss of a draft that proposes these tokens of its vocabulary."""
        columns = None if output_tokens is None else columns_of(output_tokens, vocab_size)
        return cls(name, output_tokens, columns, dtype, parallel)

    def mean(self, draft: nn.Module, rows: Batch, variation_share: float) -> Tensor:
        """Average over the positions of the rows whose next token is wanted, those of mask tokens included.

        rows: as `ShardBatches.batch` gives them.
        """
        assert isinstance(draft, PreTrainedModel)
        where = device_of(draft)
        tokens, ids, probs, documents, wanted, numbers = (copy_to_device(tensor, where) for tensor in rows)
        tokens = tokens[:, :-1].long()
        documents = documents[:, :-1]
        ids = ids.long()
        counted = wanted[:, 1:]
        inputs = {"input_ids": tokens, "attention_mask": document_mask(documents)}
        mask_token = mask_token_of(draft)
        if self.parallel is not None and mask_token is not None:
            layout = MaskLayout.drawn(counted, self.parallel, int(numbers[0]))
            inputs = layout.inputs(tokens, documents, mask_token)
            ids = layout.at(ids)
            probs = layout.at(probs)
            counted = layout.at(counted) & layout.is_within(documents)
        if self.columns is not None:
            ids = self.columns.to(where)[ids]
        ids = ids[counted]
        probs = probs.float()[counted]
        with products_in(self.dtype, where):
            if llama_refusal(draft.config) is not None:  # it may do more to its logits than one product
                logits = draft(**inputs, use_cache=False).logits[counted]
                return distillation_loss(logits, ids, probs, self.name, variation_share=variation_share)
            hidden = draft.base_model(**inputs, use_cache=False).last_hidden_state[counted]
            return self._of_states(draft, hidden, ids, probs, variation_share)

    def _of_states(
        self, draft: PreTrainedModel, hidden: Tensor, ids: Tensor, probs: Tensor, variation_share: float
    ) -> Tensor:
        """Average over hidden states. hidden: [N, H] after the final norm; ids, probs: [N, k]."""
        head = draft.get_output_embeddings()
        weight = head.weight
        bias = head.bias
        if self.output_tokens is not None:
            chosen = self.output_tokens.to(hidden.device)
            weight = weight[chosen]
            bias = None if bias is None else bias[chosen]

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


def variation_share(progress: float, start: float, ramp: float = 0.1) -> float:
    """Return the weight of total variation: 0 before `start`, rising over `ramp` of the run, then 1."""
    return min(1.0, max(0.0, (progress - start) / ramp))


def train_stages(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: PackedShard,
    run_folder: Path,
    options: DraftTraining,
    console: Console,
    start: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None,
) -> tuple[PreTrainedModel, LoopState]:
    """Run all stages, each continuing from `run_folder`; return the draft, and the state of its distillation.

    Of the options' minutes, half at most are for the target's soft labels: rows without any are left out then.

    Args:
        target: on the device, in the type of products.
        start: a compatible model in float32 with its tokenizer; None: the pruned copy that the options ask for.

    Raises:
        ConfigError: the draft is too large, the start does not fit, or `run_folder` is of another target.
        IncompatibleDrafterError: the start has other tokens.
    """
    if start is not None:
        check_start(*start, target, tokenizer)
    run_folder.mkdir(parents=True, exist_ok=True)
    pin_target(run_folder, target)
    if start is None:
        count, length = _CALIBRATION
        draft = pruned_copy(target, options.pruning, rows.batch(0, count, options.seed).tokens[:, :length])
    else:
        draft = start[0]
    kept = output_tokens_of(draft)
    outputs = options.output_tokens or (None if kept is None else len(kept))
    check_size(draft, step_parameters(target), outputs)
    end = options.end()
    now = time.monotonic()
    samples = run_folder / "samples"
    begun = pinned(run_folder / "distil").integer(SHARDS, 0)  # a run that goes on learns from the same rows
    shards = begun or num_shards(rows, options)
    half = math.inf if begun else now + (end - now) / 2
    with StageProgress(console, "soft labels", shards, end=half) as progress:
        shards = sample_all(target, rows, samples, options, progress.show, shards, half)
    if options.output_tokens is not None:
        ends = target.generation_config.eos_token_id
        ends = [] if ends is None else ends
        always = [ends] if isinstance(ends, int) else ends
        kept = frequent_tokens(samples, shards, options.output_tokens, model_vocabulary(target), always)
    if kept is not None:
        restrict(draft, kept)
    if options.parallel is not None:
        set_mask_token(draft, tokenizer, rows)
    elif mask_token_of(draft) is not None:
        delattr(draft.config, MASK_TOKEN)  # what it is not trained for any more
    return draft, distil(draft, run_folder, shards, options, console, target.dtype, end)


def distil(
    draft: PreTrainedModel,
    run_folder: Path,
    shards: int,
    options: DraftTraining,
    console: Console,
    dtype: torch.dtype,
    end: float,
) -> LoopState:
    """Train `draft` in place on the samples, over the tokens that it proposes.

    dtype: of products. end: see `Loop`.
    """
    draft.to(training_device(options.device))
    batches = ShardBatches(run_folder / "samples", shards, options.tokens_per_step, options.seed)
    optimisers = Optimisers(draft, options.distillation, dtype)
    folder = run_folder / "distil"
    tokens = output_tokens_of(draft)
    chosen = None if tokens is None else digest(tokens.numpy().tobytes())
    names = ("distillation", "tokens_per_step", "loss", "pruning", "parallel")
    pin(folder, {name: asdict(options)[name] for name in names} | {"output_tokens": chosen, SHARDS: shards})
    state = load_checkpoint(folder, draft, optimisers)
    losses = DistillationLoss.of(cast(LossName, options.loss), tokens, model_vocabulary(draft), dtype, options.parallel)

    def loss(model: nn.Module, rows: Batch, progress: float) -> Tensor:
        return losses.mean(model, rows, variation_share(progress, options.variation_from))

    loop = Loop(
        folder=folder,
        model=draft,
        optimisers=optimisers,
        total_steps=max(1, options.tokens // options.tokens_per_step),
        batch=batches.batch,
        loss=loss,
        checkpoint_seconds=options.checkpoint_seconds,
        workers=Workers(draft, options.threads),
        end=end,
    )
    return loop.run(state, console, "distilling")
