"""What the training commands do, from a folder of files to a model folder with its card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from forerun.errors import ConfigError
from forerun.train import card, card_command, folder, lm
from forerun.train.accelerator import device_name, training_device
from forerun.train.copying import copying
from forerun.train.corpus import (
    HELD_OUT_SHARE,
    LICENCE,
    SourceFile,
    describe_standard_library,
    read_python_files,
    split,
    standard_library_root,
)
from forerun.train.data.packed import PackedRows
from forerun.train.defaults import DraftTraining, LmTraining, OtherVocabTraining
from forerun.train.draft import distil
from forerun.train.draft.packed_samples import is_packed, packed_record
from forerun.train.draft.starts import check_size, step_parameters
from forerun.train.evaluate import Acceptance, TextScore, text_score
from forerun.train.heldout import HELD_OUT_CORPUS, holds_out_the_same, read_held_out
from forerun.train.measures import (
    DraftData,
    held_out_files,
    held_out_texts,
    on_target,
    pair_acceptance,
)
from forerun.train.other_vocab import sample_documents
from forerun.train.run_folder import run_in
from forerun.train.token_ids import vocabulary_size


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A pair on held-out code."""

    target: TextScore
    draft: TextScore
    acceptance: list[Acceptance]


@dataclass(frozen=True, slots=True)
class Corpus:
    """What to learn from and what to hold out, with words for the card."""

    description: str
    licence: str
    training: list[SourceFile]
    held_out: list[SourceFile]

    def record(self, more: str = "") -> dict[str, Any]:
        """The card's entry; `more` is added to the description."""
        return {
            "description": self.description + more,
            "licence": self.licence,
            "training_files": len(self.training),
            "held_out_files": len(self.held_out),
            "split": f"by file: held out if sha256 of its name, as a fraction, is below {HELD_OUT_SHARE}",
        }


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
    if data is not None and holds_out_the_same(held_out):
        return Corpus(HELD_OUT_CORPUS, LICENCE, training, held_out)
    if data is not None:
        return Corpus(f"Python source under {root.name}", "that of the files", training, held_out)
    return Corpus(describe_standard_library(), LICENCE, training, held_out)


def draft_data(data: Path | None) -> DraftData:
    """What a draft learns from, of a folder of files or of packed rows.

    Raises:
        ConfigError: as `read_corpus` and `PackedRows`.
    """
    if data is not None and is_packed(data):
        rows = PackedRows(data)
        return DraftData(rows, packed_record(rows), [])
    corpus = read_corpus(data)
    record = corpus.record(", and samples of the target")
    return DraftData(corpus.training, record, held_out_files(data, corpus.held_out))


def train_lm(
    out: Path,
    work: Path,
    data: Path | None,
    options: LmTraining,
    *,
    resume: bool = False,
    force: bool = False,
    tokenizer_folder: Path | None = None,
) -> None:
    """Train, save to `out`, measure on the held-out files, write the card.

    `tokenizer_folder` holds a tokenizer to use instead of learning one.
    """
    where = training_device(options.device)
    console = Console()
    with run_in(work, out, console, resume=resume, force=force):
        corpus = read_corpus(data)
        if tokenizer_folder is not None:
            given = folder.load_tokenizer(tokenizer_folder)
            given.save_pretrained(work)
            sizes = replace(options.architecture, vocab_size=vocabulary_size(given))
            options = replace(options, architecture=sizes)
        model, tokenizer, state = lm.train(corpus.training, work, options, console)
        folder.save(model, tokenizer, out)
        stored, _ = folder.load(out)
        stored.to(where)
        score = text_score(stored, tokenizer, held_out_texts(data, corpus.held_out))
        record = card.build_record(
            kind="target",
            command=card_command.lm_command(data, options, tokenizer_folder),
            seed=options.seed,
            model=stored,
            data=corpus.record(),
            options=asdict(options),
            stages={"text": state},
            held_out=score,
            acceptance=[],
            copying=copying(stored, tokenizer, held_out_files(data, corpus.held_out)),
            device=device_name(where),
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
    resume: bool = False,
    force: bool = False,
    start: Path | None = None,
) -> None:
    """Train a draft of `target_folder`, save to `out`, measure the pair, write the card.

    `data` is a folder of Python files or of packed rows; `start` that of a model to go on from, instead of training
    one on text. Raises ConfigError where two starts are given.
    """
    if start is not None and options.pruning.layers is not None:
        raise ConfigError("--start and --prune-layers are two starts of one draft. Leave one of the two out.")
    where = training_device(options.device)
    console = Console()
    with run_in(work, out, console, resume=resume, force=force):
        learnt = draft_data(data)
        target, tokenizer = folder.load(target_folder)
        target.to(where)
        options = distil.fitted(options, target)
        former = folder.load(start, torch.float32) if start is not None else None
        draft, stages = distil.train(target, tokenizer, learnt.training, work, options, console, former)
        folder.save(draft, tokenizer, out)
        stored, _ = folder.load(out)
        stored.to(where)
        rates = learnt.acceptance(target, stored, tokenizer)
        record = card.build_record(
            kind="draft",
            command=card_command.draft_command(data, options, start),
            seed=options.seed,
            model=stored,
            data=learnt.record,
            options=asdict(options),
            stages=stages,
            started_from=folder.read_record(start) if start is not None else None,
            held_out=text_score(stored, tokenizer, learnt.held_out_texts(tokenizer)),
            acceptance=rates,
            device=device_name(where),
        )
        card.write_card(out, record)
        for row in rates:
            console.print(
                f"{out}: acceptance rate {row.rate:.3f} at temperature {row.temperature:g}, K={row.num_draft_tokens}"
            )


def train_other_vocab(
    out: Path,
    work: Path,
    target_folder: Path,
    data: Path | None,
    options: OtherVocabTraining,
    *,
    resume: bool = False,
    force: bool = False,
    samples: Path | None = None,
) -> None:
    """Train a draft with a tokenizer of its own, save to `out`, measure, write the card.

    `samples` is the folder of samples of a run of `train_draft` with the same target; without it, samples
    are drawn first.
    """
    where = training_device(options.text.device)
    console = Console()
    with run_in(work, out, console, resume=resume, force=force):
        corpus = read_corpus(data)
        target, tokenizer = folder.load(target_folder)
        target.to(where)
        drawn = samples or work / "samples"
        if samples is None:
            distil.sample(target, tokenizer, corpus.training, drawn, options.sampling, console)
        read_by = lm.prepare_tokenizer(work, corpus.training, options.text.architecture.vocab_size, console)
        sizes = lm.build_model(options.text.architecture, 0, 0)
        check_size(step_parameters(sizes), step_parameters(target))
        written = sample_documents(drawn, tokenizer, options.read_tokens)
        draft, read_by, state = lm.train([*corpus.training, *written], work, options.text, console)
        folder.save(draft, read_by, out)
        stored, _ = folder.load(out)
        stored.to(where)
        record = card.build_record(
            kind="draft with a vocabulary of its read_by",
            command=card_command.other_vocab_command(data, options, samples),
            seed=options.text.seed,
            model=stored,
            data=corpus.record(", and the target's samples as text"),
            options=asdict(options),
            stages={"text and samples": state},
            held_out=text_score(stored, read_by, held_out_texts(data, corpus.held_out)),
            acceptance=[],
            on_target=on_target(target, tokenizer, stored, read_by),
            device=device_name(where),
        )
        card.write_card(out, record)
        console.print(f"{out}: held-out bits per byte {record['held_out']['bits_per_byte']:.4f}")


def evaluate_pair(
    target_folder: Path,
    draft_folder: Path,
    *,
    num_draft_tokens: int,
    new_tokens: int,
    threads: int,
    device: str | None = None,
) -> Evaluation:
    """Measure a pair on the bundled held-out files and prompts."""
    where = training_device(device)
    if threads:
        torch.set_num_threads(threads)
    target, tokenizer = folder.load(target_folder)
    draft, _ = folder.load(draft_folder)
    target.to(where)
    draft.to(where)
    texts = [file.text for file in read_held_out()]
    return Evaluation(
        target=text_score(target, tokenizer, texts),
        draft=text_score(draft, tokenizer, texts),
        acceptance=pair_acceptance(target, draft, tokenizer, num_draft_tokens, new_tokens),
    )
