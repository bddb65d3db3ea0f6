"""What the training commands do, from a folder of files to a model folder with its card."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.train import card, distil, folder, lm
from forerun.train.corpus import (
    LICENCE,
    SourceFile,
    describe_standard_library,
    read_python_files,
    split,
    standard_library_root,
)
from forerun.train.defaults import DRAFT_ARCHITECTURE, Architecture, DraftTraining, LmTraining
from forerun.train.evaluate import Acceptance, TextScore, acceptance, text_score
from forerun.train.heldout import read_held_out, read_prompts
from forerun.train.loop import CHECKPOINT


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A pair on held-out code."""

    target: TextScore
    draft: TextScore
    acceptance: list[Acceptance]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Corpus:
    """What to learn from and what to hold out, with words for the card."""

    description: str
    licence: str
    training: list[SourceFile]
    held_out: list[SourceFile]

    def record(self, more: str = "") -> dict[str, Any]:
        """The card's entry; `more` is added to the description."""
        return card.data_record(self.description + more, self.licence, len(self.training), len(self.held_out))


def read_corpus(data: Path | None) -> Corpus:
    """The Python files of a folder, or of the standard library, split.

    Raises:
        ConfigError: the folder holds no usable Python file for one of the two sides.
    """
    root = data if data is not None else standard_library_root()
    training, held_out = split(read_python_files(root))
    if not training or not held_out:
        raise ConfigError(
            f"{root} gives {len(training)} files to train on and {len(held_out)} to hold out; both are needed. "
            "Give a folder with more Python files."
        )
    if data is not None:
        return Corpus(f"Python source under {root.name}", "that of the files", training, held_out)
    return Corpus(describe_standard_library(), LICENCE, training, held_out)


def check_resume(work: Path, pattern: str, resume: bool) -> None:
    """Refuse to overwrite a run that is there, and to resume one that is not.

    Raises:
        ConfigError: naming the folder and the remedy.
    """
    exists = any(work.glob(pattern))
    if exists and not resume:
        raise ConfigError(f"{work} holds the checkpoint of another run. Add --resume to go on, or remove the folder.")
    if resume and not exists:
        raise ConfigError(f"{work} holds no checkpoint to resume. Leave --resume out to start a run.")


def train_lm(out: Path, work: Path, data: Path | None, options: LmTraining, *, resume: bool) -> None:
    """Train, save to `out`, measure on the held-out files, write the card."""
    check_resume(work, CHECKPOINT, resume)
    console = Console()
    corpus = read_corpus(data)
    model, tokenizer, state = lm.train(corpus.training, work, options, console)
    folder.save(model, tokenizer, out)
    stored, _ = folder.load(out)
    score = text_score(stored, tokenizer, held_out_texts(data, corpus.held_out))
    record = card.build_record(
        kind="target",
        command=f"forerun train lm OUT --tokens {options.tokens} --seed {options.seed}"
        + _flags(data, options.architecture, Architecture()),
        seed=options.seed,
        model=stored,
        data=corpus.record(),
        options=asdict(options),
        stages={"text": state},
        held_out=score,
        acceptance=[],
    )
    card.write_card(out, record)
    console.print(f"{out}: held-out bits per byte {score.bits_per_byte:.4f}, perplexity {score.perplexity:.3f}")


def train_draft(
    out: Path,
    work: Path,
    target_folder: Path,
    data: Path | None,
    options: DraftTraining,
    *,
    resume: bool,
    start: Path | None = None,
) -> None:
    """Train a draft of `target_folder`, save to `out`, measure the pair, write the card.

    `start` is the folder of a draft to go on from, instead of training one on text.
    """
    check_resume(work, f"*/{CHECKPOINT}", resume)
    console = Console()
    corpus = read_corpus(data)
    target, tokenizer = folder.load(target_folder)
    former = folder.load(start, torch.float32)[0] if start is not None else None
    draft, stages = distil.train(target, tokenizer, corpus.training, work, options, console, former)
    folder.save(draft, tokenizer, out)
    stored, _ = folder.load(out)
    rates = pair_acceptance(target, stored, tokenizer)
    record = card.build_record(
        kind="draft",
        command=_draft_command(data, options, start),
        seed=options.seed,
        model=stored,
        data=corpus.record(", and samples of the target"),
        options=asdict(options),
        stages=stages,
        started_from=folder.read_record(start) if start is not None else None,
        held_out=text_score(stored, tokenizer, held_out_texts(data, corpus.held_out)),
        acceptance=rates,
    )
    card.write_card(out, record)
    for row in rates:
        console.print(
            f"{out}: acceptance rate {row.rate:.3f} at temperature {row.temperature:g}, K={row.num_draft_tokens}"
        )


def held_out_texts(data: Path | None, held_out: list[SourceFile]) -> list[str]:
    """What to measure on: the files that ship, so that figures compare, or those of the user's own folder."""
    return [file.text for file in (read_held_out() if data is None else held_out)]


def pair_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_draft_tokens: int = 4,
    new_tokens: int = 128,
) -> list[Acceptance]:
    """Acceptance on the bundled prompts at temperatures 0 and 1."""
    prompts = [tokenizer(prompt.prompt, verbose=False)["input_ids"] for prompt in read_prompts()]
    return [
        acceptance(
            target,
            draft,
            prompts,
            temperature=temperature,
            num_draft_tokens=num_draft_tokens,
            new_tokens=new_tokens,
        )
        for temperature in (0.0, 1.0)
    ]


def evaluate_pair(
    target_folder: Path, draft_folder: Path, *, num_draft_tokens: int, new_tokens: int, threads: int
) -> Evaluation:
    """Measure a pair on the bundled held-out files and prompts."""
    if threads:
        torch.set_num_threads(threads)
    target, tokenizer = folder.load(target_folder)
    draft, _ = folder.load(draft_folder)
    texts = [file.text for file in read_held_out()]
    return Evaluation(
        target=text_score(target, tokenizer, texts),
        draft=text_score(draft, tokenizer, texts),
        acceptance=pair_acceptance(target, draft, tokenizer, num_draft_tokens, new_tokens),
    )


def _draft_command(data: Path | None, options: DraftTraining, start: Path | None) -> str:
    first = "--start DRAFT" if start is not None else f"--text-tokens {options.text.tokens}"
    sizes = "" if start is not None else _flags(None, options.text.architecture, DRAFT_ARCHITECTURE)
    return (
        f"forerun train draft OUT --target TARGET {first} --sample-tokens {options.sample_tokens} "
        f"--text-law-tokens {options.text_law_tokens} --tokens {options.tokens} --seed {options.seed}"
        + _flags(data, Architecture(), Architecture())
        + sizes
    )


def _flags(data: Path | None, sizes: Architecture, default: Architecture) -> str:
    """The flags for a folder of files and for sizes that are not the default's."""
    flags = [f" --data {data.name}"] if data is not None else []
    for name, size in asdict(sizes).items():
        if size != getattr(default, name):
            flags.append(f" --{name.replace('_', '-')} {size}")
    return "".join(flags)
