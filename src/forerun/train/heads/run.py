"""The training of a head on its target's states: batches, the loss of a batch, and the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from forerun.drafters.models.heads.config import HeadConfig
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.train.accelerator import copy_to_device, device_of, dtype_name
from forerun.train.checkpoint import DTYPE, TARGET, LoopState, load_checkpoint, pin, pinned_weights
from forerun.train.data.packed import NO_DOCUMENT, PackedShard
from forerun.train.defaults import WARMUP_STEPS, rate_for_width
from forerun.train.heads.module import Augmentation, HeadModule, head_rows
from forerun.train.heads.options import HEAD_OPTIMISATION, BlockTraining, HeadTraining, MedusaTraining
from forerun.train.heads.start import HeadKind
from forerun.train.heads.target_states import HeadInputs, PackedStates, TrainingTarget
from forerun.train.loop import Batch, Evaluations, Loop, Workers
from forerun.train.optim import Optimisers

FREE = (
    *("threads", "device", "minutes", "checkpoint_seconds"),
    *("evaluate_every", "held_out_rows", "num_draft_tokens", "patience"),
)
"""Options in which a resumed run may differ from the one that it goes on from."""
STATES = "states"
"""Folder of the target's states that a run keeps for later epochs."""
RATE = "learning_rate"
"""Key of the peak learning rate, which a run keeps."""
DROPOUT = 0.1
"""Share of the target's states' elements that are dropped."""
NOISE = 0.1
"""Uniform noise on the target's normalised states, up to this size."""
_FORMER = {
    "warmup_steps": WARMUP_STEPS,
    "weight_decay": HEAD_OPTIMISATION.weight_decay,
    "dropout": DROPOUT,
    "noise": NOISE,
}
_FORMER_SIZES = {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0}
"""What were options once, which runs that were begun then have written down: a run with other values is refused."""


def run_training(
    head: HeadModule,
    target: TrainingTarget,
    rows: PackedShard,
    folder: Path,
    kind: HeadKind[Any],
    console: Console,
    evaluate: Callable[[Any], float] | None,
) -> LoopState:
    """Train a head in place, going on from the checkpoint in `folder` if there is one."""
    options = kind.options
    per_step = max(1, options.tokens_per_step // rows.window)
    total = max(1, round(options.epochs * len(rows) / per_step))
    if options.max_steps:
        total = min(total, options.max_steps)
    rate = learning_rate(options, head.config)
    optimisers = Optimisers(head, replace(options.optimisation, adam_lr=rate, warmup=0.0), target.dtype)
    facts = {DTYPE: dtype_name(target.dtype), "data": dict(rows.made_from), "steps": total, RATE: rate}
    found = target_fingerprint(target.inference_target)
    facts[TARGET] = pinned_weights(
        folder, TARGET, found, f"{folder} is the run of a head for another target's weights."
    )
    pin(folder, {**pinned_options(options), **facts, "head": asdict(head.config)}, later=[TARGET])
    state = load_checkpoint(folder, head, optimisers)
    workers = Workers(head, options.threads)
    kept_in = folder / STATES if options.cached_states else None
    states = PackedStates(target.states, kept_in, round(options.cached_states * 1e9))
    evaluations = None
    if evaluate is not None and options.evaluate_every:
        evaluations = Evaluations(lambda _: evaluate(head), options.evaluate_every, options.patience)
    loop = Loop(
        folder=folder,
        model=head,
        optimisers=optimisers,
        total_steps=total,
        batch=partial(numbered_batch, rows, states, per_step, options.seed),
        loss=HeadLoss(kind, target),
        checkpoint_seconds=options.checkpoint_seconds,
        workers=workers,
        evaluations=evaluations,
        end=options.end(),
        warmup_steps=WARMUP_STEPS,
        logits=head.config.draft_vocab_size * kind.steps,
    )
    return loop.run(state, console, "training the head")


def learning_rate(options: HeadTraining, config: HeadConfig) -> float:
    """Return the peak learning rate: the options' own, or the default one for the target's width."""
    return options.learning_rate or rate_for_width(config.target_hidden_size, options.optimisation.adam_lr)


def pinned_options(options: HeadTraining) -> dict[str, Any]:
    """Return the options in which a resumed run must not differ, with those that there were once."""
    found = {key: value for key, value in asdict(options).items() if key not in FREE} | _FORMER
    if isinstance(options, BlockTraining):
        found["confidence_weight"] = 1.0
    if not isinstance(options, MedusaTraining):
        found["shape"] = _FORMER_SIZES | found["shape"]
    return found


def numbered_batch(rows: PackedShard, states: PackedStates, per_step: int, seed: int, step: int) -> Batch:
    """Return the batch of step `step`. The states are computed here, by all threads, before each takes its rows.

    Returns:
        Tokens, wanted and documents, [rows, window + 1]; of each row the factor that makes a sum over the wanted
        tokens the batch's mean; the number that seeds its noise; and the target's states of its tokens.
    """
    batch = rows.batch(step, per_step, seed)
    count = len(batch.tokens)
    shares = torch.full((count,), count / max(1, int(batch.wanted.sum())), dtype=torch.float64)
    numbers = (seed << 32) + step * per_step + torch.arange(count)
    found = states.of(batch.tokens, batch.documents)
    return batch.tokens, batch.wanted, batch.documents, shares, numbers, found


class HeadLoss:
    """Computes the mean loss of some rows of a batch, for any replica of a head."""

    def __init__(self, kind: HeadKind[Any], target: TrainingTarget) -> None:
        self._kind = kind
        self._target = target

    def __call__(self, model: nn.Module, piece: Batch, progress: float) -> Tensor:
        """Return the loss. piece: rows of a `numbered_batch`."""
        where = device_of(model)
        *numbered, states = piece
        tokens, wanted, documents, shares, numbers = numbered
        rows = head_rows(tokens, wanted, documents, self._kind.steps)
        if not len(rows.active):
            return sum((parameter * 0).sum() for parameter in model.parameters())  # type: ignore[return-value]
        used = copy_to_device((documents != NO_DOCUMENT).flatten().nonzero()[:, 0], where)
        augment = Augmentation(DROPOUT, NOISE, int(numbers[0]))
        embeddings = self._target.embeddings(copy_to_device(rows.token_ids, where))
        inputs = HeadInputs(self._target, rows, states.flatten(0, 1)[used], embeddings, augment)
        return self._kind.summed_loss(model, inputs, tuple(numbered)) * (float(shares[0]) / len(tokens))
