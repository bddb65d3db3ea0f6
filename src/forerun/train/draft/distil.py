"""`forerun train draft`: a small model that agrees with a target, on text first, then on the target's samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.files.write import digest
from forerun.train import lm
from forerun.train.accelerator import training_device
from forerun.train.checkpoint import LoopState, load_checkpoint
from forerun.train.corpus import SourceFile
from forerun.train.data.packed import PackedRows
from forerun.train.defaults import DraftTraining, LossName
from forerun.train.draft.distil_loss import DistillationLoss
from forerun.train.draft.output_vocabulary import frequent_tokens, output_tokens_of, restrict
from forerun.train.draft.packed_samples import check_packed, packed_shards, sample_packed
from forerun.train.draft.prune import pruned_copy
from forerun.train.draft.samples import ShardBatches, sample_all, total_shards
from forerun.train.draft.starts import (
    MAX_SHARE,
    MAX_TRAINED_SHARE,
    check_size,
    check_start,
    inherit_embeddings,
    step_parameters,
)
from forerun.train.loop import Loop
from forerun.train.optim import Optimisers
from forerun.train.resumed_options import pin, pin_target
from forerun.train.stream import EpochTexts, Windows, tokenize
from forerun.train.token_ids import model_vocabulary
from forerun.train.workers import Batch, Workers

Data = list[SourceFile] | PackedRows
"""What a draft learns from: text that the target reads and continues, or packed rows that it reads."""
_CALIBRATION = (16, 256)
"""Rows and tokens of the text on which a pruned copy's channels are ranked."""


def fitted(options: DraftTraining, target: PreTrainedModel) -> DraftTraining:
    """The options with the target's vocabulary, which its draft must have."""
    sizes = replace(options.text.architecture, vocab_size=model_vocabulary(target))
    return replace(options, text=replace(options.text, architecture=sizes))


def variation_share(progress: float, start: float, ramp: float = 0.1) -> float:
    """Weight of total variation: 0 before `start`, rising over `ramp` of the run, then 1."""
    return min(1.0, max(0.0, (progress - start) / ramp))


def train(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    run_folder: Path,
    options: DraftTraining,
    console: Console,
    start: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None,
) -> tuple[PreTrainedModel, dict[str, LoopState]]:
    """All stages, each going on from what `run_folder` already holds.

    A draft with weights to start from leaves the text stage out: `start`, a compatible model in float32 with its
    tokenizer, or the pruned copy that the options ask for. Returns the draft and where each stage ended.

    Raises:
        ConfigError: the draft is too large, the data or the start do not fit, or `run_folder` is of another target.
        IncompatibleDrafterError: the start has other tokens.
    """
    if start is not None:
        check_start(*start, target, tokenizer)
    run_folder.mkdir(parents=True, exist_ok=True)
    pin_target(run_folder, target)
    if isinstance(data, PackedRows):
        check_packed(data, target, tokenizer)
    stages: dict[str, LoopState] = {}
    share = MAX_TRAINED_SHARE
    if options.pruning.layers is not None:
        target.to(training_device(options.device))
        draft = pruned_copy(target, options.pruning, _calibration(data, tokenizer, options))
    elif start is not None:
        draft = start[0]
    else:
        share = MAX_SHARE
        draft = lm.build_model(options.text.architecture, 0, 0)
    kept = output_tokens_of(draft)
    outputs = options.output_tokens or (None if kept is None else len(kept))
    check_size(step_parameters(draft, outputs), step_parameters(target), share)
    if share == MAX_SHARE:
        draft, stages["text"] = _text_stage(target, tokenizer, data, run_folder / "text", options, console)
    sample(target, tokenizer, data, run_folder / "samples", options, console)
    tokens = _proposed(draft, target, run_folder / "samples", data, options)
    if tokens is not None:
        restrict(draft, tokens)
    stages["distillation"] = distil(draft, run_folder, count_shards(data, options), options, console)
    return draft, stages


def _text_stage(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    folder: Path,
    options: DraftTraining,
    console: Console,
) -> tuple[PreTrainedModel, LoopState]:
    """A draft made from nothing, on text alone."""
    if isinstance(data, PackedRows):
        raise ConfigError(
            "A draft that is made from nothing begins with a stage on text, and packed rows are none. Start from a "
            "pruned copy of the target (--prune-layers) or a trained draft (--start), or give a folder of text."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        tokenizer.save_pretrained(folder)
    text = replace(
        options.text, threads=options.threads, device=options.device, checkpoint_seconds=options.checkpoint_seconds
    )
    draft, _, state = lm.train(data, folder, text, console, lambda model: inherit_embeddings(model, target))
    return draft, state


def _calibration(data: Data, tokenizer: PreTrainedTokenizerBase, options: DraftTraining) -> Tensor:
    """int64 [rows, T]: text of the training data."""
    rows, length = _CALIBRATION
    if isinstance(data, PackedRows):
        return data.batch(0, rows, options.seed).tokens[:, :length]
    tokens = tokenize(EpochTexts.make(data, options.text.seed, 0.0, 0.0).of(0), tokenizer)
    return Windows(tokens, min(length, options.text_window), options.seed).batch(0, rows)[:, :-1]


def _proposed(
    draft: PreTrainedModel, target: PreTrainedModel, samples: Path, data: Data, options: DraftTraining
) -> Tensor | None:
    """The tokens that the draft is to propose: those asked for, else those that its start proposes; None for all."""
    if options.output_tokens is None:
        return output_tokens_of(draft)
    ends = target.generation_config.eos_token_id
    always = [] if ends is None else [ends] if isinstance(ends, int) else ends
    count, shards = options.output_tokens, count_shards(data, options)
    return frequent_tokens(samples, shards, count, model_vocabulary(target), always)


def count_shards(data: Data, options: DraftTraining) -> int:
    """Shards of samples that the data give."""
    return packed_shards(data, options) if isinstance(data, PackedRows) else total_shards(options)


def sample(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    folder: Path,
    options: DraftTraining,
    console: Console,
) -> None:
    """Let the target read packed rows, or read and continue training text, until `folder` holds every shard."""
    target.to(training_device(options.device))
    with Progress(console=console) as progress:
        task = progress.add_task("sampling", total=count_shards(data, options))
        done: Callable[[int], None] = lambda _: progress.advance(task)  # noqa: E731
        if isinstance(data, PackedRows):
            sample_packed(target, data, folder, options, done)
            return
        texts = EpochTexts.make(data, options.text.seed, options.text.copy_share, options.text.rename_share)
        sample_all(target, tokenize(texts.of(0), tokenizer), folder, options, done)


def distil(
    draft: PreTrainedModel, run_folder: Path, num_shards: int, options: DraftTraining, console: Console
) -> LoopState:
    """Train `draft` in place on the samples, over the tokens that it proposes."""
    draft.to(training_device(options.device))
    batches = ShardBatches(run_folder / "samples", num_shards, options.tokens_per_step, options.seed)
    optimisers = Optimisers(draft, options.distillation)
    folder, tokens = run_folder / "distil", output_tokens_of(draft)
    chosen = None if tokens is None else digest(tokens.numpy().tobytes())
    pinned = {"loss": options.loss, "pruning": asdict(options.pruning), "output_tokens": chosen}
    pin(
        folder,
        {"distillation": asdict(options.distillation), "tokens_per_step": options.tokens_per_step, **pinned},
    )
    state = load_checkpoint(folder, draft, optimisers)
    losses = DistillationLoss.of(cast(LossName, options.loss), tokens, model_vocabulary(draft))

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
    )
    return loop.run(state, console, "distilling")
