"""A Llama language model of Python source, from nothing, with a tokenizer that is learnt or given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from forerun.train.accelerator import copy_to_device, device_of, dtype_name, end_of_text, products_in, training_device
from forerun.train.card import load_saved_tokenizer
from forerun.train.checkpoint import DTYPE, LoopState, load_checkpoint, pin, run_type
from forerun.train.corpus import SourceFile
from forerun.train.defaults import Optimisation, RunOptions
from forerun.train.loop import Loop, Workers
from forerun.train.optim import Optimisers
from forerun.utils.fields import Checked, option
from forerun.utils.files import digest
from tools.text import EpochTexts, TwoStageStream

END_OF_TEXT = "<|endoftext|>"
"""The one special token: begins, ends and pads."""
PYTHON_PIECES = (
    r"\n(?:[ \t]*\n)*[ \t]*"  # line ends, blank lines and the next line's indent stay together
    r"| ?[^\W\d_]+"  # a word with the space before it
    r"| ?_+"  # underscores, apart from the words they join
    r"|\d"  # digits, one by one
    r"| ?[^\s\w]+"  # a run of punctuation with the space before it
    r"|[^\S\n]+"  # other white space
)
"""Where BPE may not merge across: this regular expression cuts the text into pieces first."""


@dataclass(frozen=True, slots=True)
class Architecture(Checked):
    """A Llama of these sizes; embeddings are tied."""

    vocab_size: int = option(4096, "Tokens of its tokenizer.", low=257)
    hidden_size: int = option(256, "Width of the states between layers.", low=1)
    num_layers: int = option(16, "Decoder layers.", low=1)
    num_heads: int = option(4, "Attention heads of a layer.", low=1)
    num_kv_heads: int = option(2, "Heads of keys and values of a layer.", low=1)
    head_dim: int = option(64, "Width of a head.", low=1)
    intermediate_size: int = option(704, "Width of the feed-forward part.", low=1)
    context: int = 2048


@dataclass(frozen=True, slots=True)
class LmTraining(RunOptions):
    """A causal language model on the text of files."""

    architecture: Architecture = field(default_factory=Architecture)
    optimisation: Optimisation = field(default_factory=Optimisation)
    tokens: int = option(6_000_000, "Tokens of text to train on.", low=1)
    tokens_per_step: int = option(8_192, "Tokens of one step.", low=1)
    short_window: int = option(512, "Tokens of a window at first.", low=8)
    long_window: int = 2_048
    long_share: float = option(0.15, "Last part of the run, in long windows.", low=0, high=1)
    copy_share: float = option(0.1, "Share of the files with repeated and edited spans.", low=0, high=1)
    rename_share: float = option(0.0, "Share of the files in which names are replaced.", low=0, high=1)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of `vocab_size` tokens; every text round-trips, whatever its bytes."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(  # type: ignore[no-untyped-call, unused-ignore]
        [Split(Regex(PYTHON_PIECES), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def build_model(sizes: Architecture, end_token: int, seed: int) -> LlamaForCausalLM:
    """Build a Llama with random float32 weights; output projections start small, by depth, as in GPT-2."""
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate_size,
        max_position_embeddings=sizes.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
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


@torch.no_grad()
def inherit_embeddings(draft: LlamaForCausalLM, target: PreTrainedModel) -> None:
    """Start the draft's (tied) embeddings as the target's, on their principal axes.

    Two thirds of so small a draft are embeddings, which are learnt slowest from little data. They are scaled to the
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


def next_token_loss(model: nn.Module, batch: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the mean cross-entropy in nats of each token after its prefix by products of `dtype`.

    batch: int64 [B, T + 1].
    """
    where = device_of(model)
    batch = copy_to_device(batch, where)
    with products_in(dtype, where):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(
    files: list[SourceFile],
    run_folder: Path,
    options: LmTraining,
    console: Console,
    prepare: Callable[[LlamaForCausalLM], None] = lambda model: None,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase, LoopState]:
    """Train for all of `options.tokens`, going on from `run_folder`'s checkpoint if it has one.

    The tokenizer is that of `run_folder`; where there is none, it is learnt and saved there. `prepare` may change the
    random weights before the first step.
    """
    if not (run_folder / "tokenizer.json").exists():
        learnt = train_tokenizer((file.text for file in files), options.architecture.vocab_size)
        learnt.save_pretrained(run_folder)
    tokenizer = load_saved_tokenizer(run_folder)
    where, end = training_device(options.device), options.end()
    dtype = run_type(run_folder, options.dtype, where, console)
    free = {"tokens", "threads", "checkpoint_seconds", "device", "minutes"}
    pinned = {key: value for key, value in asdict(options).items() if key not in free} | {DTYPE: dtype_name(dtype)}
    pin(run_folder, pinned | {"tokenizer": digest((run_folder / "tokenizer.json").read_bytes())})
    texts = EpochTexts.make(files, options.seed, options.copy_share, options.rename_share)
    windows = options.short_window, options.long_window
    stream = TwoStageStream(texts, tokenizer, windows, options.long_share, options.tokens_per_step)
    model = build_model(options.architecture, end_of_text(tokenizer), options.seed)
    prepare(model)
    model.to(where)
    optimisers = Optimisers(model, options.optimisation, dtype)
    state = load_checkpoint(run_folder, model, optimisers)
    console.print(f"{stream.tokens_per_epoch:,} tokens in {len(files)} files, {model.num_parameters():,} parameters")
    steps = max(1, options.tokens // options.tokens_per_step)
    loop = Loop(
        folder=run_folder,
        model=model,
        optimisers=optimisers,
        total_steps=steps,
        batch=lambda step: (stream.batch(step, steps),),
        loss=lambda replica, rows, _: next_token_loss(replica, rows[0], dtype),
        workers=Workers(model, options.threads),
        checkpoint_seconds=options.checkpoint_seconds,
        end=end,
    )
    return model, tokenizer, loop.run(state, console, "training")
