"""`forerun train draft`: a small model that agrees with a target, on text first, then on its samples."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.train import lm
from forerun.train.accelerator import device_of, to_device, training_device
from forerun.train.checkpoint import LoopState, load_checkpoint
from forerun.train.corpus import SourceFile
from forerun.train.defaults import DraftTraining
from forerun.train.loop import Loop
from forerun.train.losses import distillation_loss
from forerun.train.optim import Optimisers
from forerun.train.resumed_options import pin
from forerun.train.samples import ShardBatches, sample_all, total_shards
from forerun.train.stream import EpochTexts, tokenize
from forerun.train.token_ids import model_vocabulary
from forerun.train.workers import Batch, Workers

MAX_SHARE = 0.1
"""A draft with more than a tenth of its target's parameters costs more than it saves."""


def check_size(draft_parameters: int, target_parameters: int) -> None:
    """Refuse a draft of more than a tenth of its target.

    Raises:
        ConfigError: with both sizes.
    """
    if draft_parameters > MAX_SHARE * target_parameters:
        raise ConfigError(
            f"a draft of {draft_parameters:,} parameters is more than a tenth of its target's {target_parameters:,}. "
            "Take fewer layers or a smaller hidden size."
        )


@torch.no_grad()
def inherit_embeddings(draft: LlamaForCausalLM, target: PreTrainedModel) -> None:
    """Start the draft's (tied) embeddings as the target's, on their principal axes.

    Two thirds of so small a draft are embeddings, and they are what little data teaches slowest. They are scaled to the
    standard deviation of random ones, so that the first loss is near ln V whatever the target's scale is.
    Nothing happens if the draft is wider than the target.
    """
    source = target.get_input_embeddings().weight.float().cpu()
    width = draft.config.hidden_size
    if width > source.shape[1] or len(source) != draft.config.vocab_size:
        return
    _, vectors = torch.linalg.eigh(source.T @ source)
    inherited = source @ vectors[:, -width:]
    scale = draft.config.initializer_range / inherited.std().clamp(min=1e-12)
    draft.model.embed_tokens.weight.copy_(inherited * scale)


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
    files: list[SourceFile],
    run_folder: Path,
    options: DraftTraining,
    console: Console,
    start: LlamaForCausalLM | None = None,
) -> tuple[LlamaForCausalLM, dict[str, LoopState]]:
    """All three stages, each going on from what `run_folder` already holds.

    With `start`, a draft trained before (float32), the text stage is left out. Returns the draft and
    where each stage ended.
    """
    if start is not None:
        check_size(start.num_parameters(), target.num_parameters())
        if model_vocabulary(start) != model_vocabulary(target):
            raise ConfigError(
                f"The draft to start from has {model_vocabulary(start):,} tokens and its target "
                f"{model_vocabulary(target):,}. Start from a draft of this target, or leave --start out."
            )
        sample(target, tokenizer, files, run_folder / "samples", options, console)
        return start, {"distillation": distil(start, run_folder, options, console)}
    text_folder = run_folder / "text"
    text_folder.mkdir(parents=True, exist_ok=True)
    if not (text_folder / "tokenizer.json").exists():
        tokenizer.save_pretrained(text_folder)
    text_options = replace(
        options.text, threads=options.threads, device=options.device, checkpoint_seconds=options.checkpoint_seconds
    )
    sizes = lm.build_model(text_options.architecture, 0, 0)
    check_size(sizes.num_parameters(), target.num_parameters())
    draft, _, text_state = lm.train(
        files, text_folder, text_options, console, lambda model: inherit_embeddings(model, target)
    )
    sample(target, tokenizer, files, run_folder / "samples", options, console)
    return draft, {"text": text_state, "distillation": distil(draft, run_folder, options, console)}


def sample(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    files: list[SourceFile],
    folder: Path,
    options: DraftTraining,
    console: Console,
) -> None:
    """Let the target continue prompts from the training text until `folder` holds every shard."""
    texts = EpochTexts.make(files, options.text.seed, options.text.copy_share, options.text.rename_share)
    tokens = tokenize(texts.of(0), tokenizer)
    target.to(training_device(options.device))
    with Progress(console=console) as progress:
        task = progress.add_task("sampling", total=total_shards(options))
        sample_all(target, tokens, folder, options, lambda _: progress.advance(task))


def distil(draft: LlamaForCausalLM, run_folder: Path, options: DraftTraining, console: Console) -> LoopState:
    """Train `draft` in place on the samples: forward KL, then total variation."""
    draft.to(training_device(options.device))
    batches = ShardBatches(run_folder / "samples", total_shards(options), options.tokens_per_step, options.seed)
    optimisers = Optimisers(draft, options.distillation)
    folder = run_folder / "distil"
    pin(folder, {"distillation": asdict(options.distillation), "tokens_per_step": options.tokens_per_step})
    state = load_checkpoint(folder, draft, optimisers)

    def loss(model: nn.Module, rows: Batch, progress: float) -> Tensor:
        where = device_of(model)
        tokens, ids, probabilities = (to_device(tensor, where) for tensor in rows)
        with torch.autocast(where.type, dtype=torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1].long(), use_cache=False).logits
        share = variation_share(progress, options.variation_from)
        return distillation_loss(logits, ids.long(), probabilities.float(), variation_share=share)

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
