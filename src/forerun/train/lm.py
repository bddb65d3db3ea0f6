"""`forerun train lm`: a Llama language model of Python source, from nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from forerun.files.write import digest
from forerun.train.accelerator import EPOCH_PROCESSES, compile_layers, device_of, to_device, training_device
from forerun.train.checkpoint import LoopState, load_checkpoint
from forerun.train.corpus import SourceFile
from forerun.train.defaults import Architecture, LmTraining
from forerun.train.folder import load_tokenizer
from forerun.train.loop import Loop
from forerun.train.optim import Optimisers
from forerun.train.resumed_options import pin
from forerun.train.stream import Epochs, EpochTexts, TwoStageStream
from forerun.train.token_ids import end_of_text
from forerun.train.tokenizer import train_tokenizer
from forerun.train.workers import Workers


def build_model(sizes: Architecture, end_token: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random float32 weights; output projections start small, by depth, as in GPT-2."""
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate_size,
        max_position_embeddings=sizes.context,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=end_token,
        eos_token_id=end_token,
        pad_token_id=end_token,
        use_cache=True,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_(math.sqrt(2 * sizes.num_layers))
    return model


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each token after its prefix; `batch` int64 [B, T + 1]."""
    where = device_of(model)
    batch = to_device(batch, where)
    with torch.autocast(where.type, dtype=torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def prepare_tokenizer(
    folder: Path, files: list[SourceFile], vocab_size: int, console: Console
) -> PreTrainedTokenizerBase:
    """The tokenizer saved in `folder`, or a new one learnt from `files` and saved there."""
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder)
    console.print(f"learning a tokenizer of {vocab_size} tokens")
    tokenizer = train_tokenizer((file.text for file in files), vocab_size)
    tokenizer.save_pretrained(folder)
    return tokenizer


def train(
    files: list[SourceFile],
    run_folder: Path,
    options: LmTraining,
    console: Console,
    prepare: Callable[[LlamaForCausalLM], None] | None = None,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase, LoopState]:
    """Train to the end of the budget, going on from `run_folder`'s checkpoint if it has one.

    `prepare` may change the random weights before the first step.
    """
    tokenizer = prepare_tokenizer(run_folder, files, options.architecture.vocab_size, console)
    free = {"tokens", "threads", "checkpoint_seconds", "device"}
    pinned = {key: value for key, value in asdict(options).items() if key not in free}
    pin(run_folder, pinned | {"tokenizer": digest((run_folder / "tokenizer.json").read_bytes())})
    texts = EpochTexts.make(files, options.seed, options.copy_share, options.rename_share)
    where = training_device(options.device)
    epochs = Epochs(texts, tokenizer, EPOCH_PROCESSES[where.type])
    stream = TwoStageStream(
        epochs,
        seed=options.seed,
        short_window=options.short_window,
        long_window=options.long_window,
        long_share=options.long_share,
        tokens_per_step=options.tokens_per_step,
    )
    model = build_model(options.architecture, end_of_text(tokenizer), options.seed)
    if prepare is not None:
        prepare(model)
    model.to(where)
    compile_layers(model)
    optimisers = Optimisers(model, options.optimisation)
    state = load_checkpoint(run_folder, model, optimisers)
    read = len(epochs.tokens(0))
    console.print(f"{read:,} tokens in {len(files)} files, {model.num_parameters():,} parameters")
    steps = max(1, options.tokens // options.tokens_per_step)
    loop = Loop(
        folder=run_folder,
        model=model,
        optimisers=optimisers,
        total_steps=steps,
        batch=lambda step: (stream.batch(step, steps),),
        loss=lambda replica, rows, _: next_token_loss(replica, rows[0]),
        workers=Workers(model, options.threads),
        checkpoint_seconds=options.checkpoint_seconds,
    )
    try:
        return model, tokenizer, loop.run(state, console, "training")
    finally:
        epochs.close()
