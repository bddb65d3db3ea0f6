"""`forerun train`: make training data, train draft heads and draft models, and evaluate them."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED, open_llm
from forerun.cli.options import Json, LLMOptions, TargetName, chosen_model
from forerun.cli.output import log_memory_plan, note, print_json
from forerun.config import ASSETS, BUNDLED_MODELS, BUNDLED_TARGET, NO_DRAFTER
from forerun.errors import ConfigError
from forerun.train.defaults import AnswerMaking, DraftTraining, Pruning, RunOptions
from forerun.train.heads.options import (
    MTP_SHAPE,
    MTP_TRAINING,
    BlockShape,
    BlockTraining,
    EagleShape,
    EagleTraining,
    MedusaShape,
    MedusaTraining,
)

if TYPE_CHECKING:
    from forerun.engine import LLM
    from forerun.train.commands import Evaluation
    from forerun.train.heads.start import HeadKind


AnswersOut = Annotated[
    Path, typer.Argument(help="File of answers to write: .jsonl, or .jsonl.gz to have it gzipped.", metavar="OUT")
]
AnswersData = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSON lines with `prompt`, `messages` or `turns`, to be answered; any other file, and folders, are text "
        "or source of which prompts are made. Repeatable.",
        metavar="PATH",
        show_default="the target writes prompts, or they are cut from the standard library",
    ),
]
AnswersForce = Annotated[bool, typer.Option("--force", help="Begin anew, and replace OUT.")]


@with_flags
def answers(
    *,
    out: AnswersOut,
    target: TargetName = None,
    data: AnswersData = None,
    making: Annotated[AnswerMaking, Flags(typed=("answers", "max_tokens"))],
    settings: Annotated[LLMOptions, Flags("device", "quantize", typed=("device",))],
    force: AnswersForce = False,
) -> None:
    """Have a target answer prompts, which it writes itself where none are given; the same command goes on after a kill.

    A drafter that is trained on what its target writes proposes what its target writes.
    """
    from rich.console import Console

    from forerun.train.data.answers import make_answers

    target = chosen_model(target, "--target")
    llm = asdict(settings) | {"max_batch": making.max_batch, "num_draft_tokens": 0}

    def opened() -> LLM:
        note(f"loading {target}")
        with log_memory_plan(note):
            return open_llm(target, NO_DRAFTER, chat=False, **llm)

    try:
        make_answers(opened, out, data or [], making, Console(stderr=True), force=force)
    except KeyboardInterrupt:
        typer.echo(f"\nforerun: stopped. The progress is in {out}.run; the same command resumes.", err=True)
        raise typer.Exit(INTERRUPTED) from None


Out = Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")]
Data = Annotated[
    Path,
    typer.Option(
        help="What to learn from: a file of the target's answers (`forerun train answers`), text, a folder of either, "
        "or a folder of packed rows.",
        metavar="PATH",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
Force = Annotated[bool, typer.Option("--force", help="Begin anew, and replace what OUT holds.")]
TYPED = ("epochs", "minutes")
FIXED = ("seed", "checkpoint_seconds", "threads", "device", "dtype")
"""Options of runs that have no key."""
NO_DRAFTER_LEARNT = 1
"""Exit status after a head or a draft was trained that is no better than chance."""
FEW = (*FIXED, "position_weights", "cached_states")
"""Options of Medusa heads and MTP layers that have no key."""


@with_flags
def eagle(
    *,
    out: Out,
    data: Data,
    target: TargetName = None,
    options: Annotated[EagleTraining, Flags(leave_out=(*FIXED, "position_weights"), typed=TYPED)],
    shape: Annotated[EagleShape, Flags(typed=("version",), panel="Architecture")],
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a head that drafts from its target's hidden states (EAGLE-3, or EAGLE-1 by --version 1)."""
    from forerun.train.eagle import EagleKind

    _train(EagleKind(replace(options, shape=shape)), out, target, data, resume=resume, force=force)


@with_flags
def block(
    *,
    out: Out,
    data: Data,
    target: TargetName = None,
    options: Annotated[BlockTraining, Flags(leave_out=FIXED, typed=TYPED)],
    shape: Annotated[BlockShape, Flags(typed=("block_size",), panel="Architecture")],
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a head that drafts a whole block in one pass (DFlash), with a bias by the token before (DSpark)."""
    from forerun.train.block import BlockKind

    _train(BlockKind(replace(options, shape=shape)), out, target, data, resume=resume, force=force)


@with_flags
def medusa(
    *,
    out: Out,
    data: Data,
    target: TargetName = None,
    options: Annotated[MedusaTraining, Flags(leave_out=FEW, typed=TYPED)],
    shape: Annotated[MedusaShape, Flags(typed=("sequential",), panel="Architecture")],
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train heads that each predict one token further on from their target's last state (Medusa; Hydra by
    --sequential)."""
    from forerun.train.medusa import MedusaKind

    _train(MedusaKind(replace(options, shape=shape)), out, target, data, resume=resume, force=force)


@with_flags
def mtp(
    *,
    out: Out,
    data: Data,
    target: TargetName = None,
    options: Annotated[EagleTraining, Flags(base=MTP_TRAINING, leave_out=(*FEW, "unroll", "loss"), typed=TYPED)],
    shape: Annotated[EagleShape, Flags("draft_vocab", base=MTP_SHAPE, typed=())],
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a decoder layer that drafts from its target's last state, as the MTP layers of DeepSeek-V3 do."""
    from forerun.train.eagle import EagleKind

    _train(EagleKind(replace(options, shape=shape)), out, target, data, resume=resume, force=force)


def _train(kind: HeadKind[Any], out: Path, target: str | None, data: Path, *, resume: bool, force: bool) -> None:
    from forerun.train.heads.commands import train_head

    name = chosen_model(target, "--target")
    if train_head(out, _work(out), name, data, kind, this_command(), resume=resume, force=force):
        raise typer.Exit(NO_DRAFTER_LEARNT)


def _work(out: Path) -> Path:
    """Return the folder of a run's checkpoints and packed rows."""
    return out.with_name(out.name + ".run")


def _folder(name: str) -> Path:
    return BUNDLED_MODELS.get(name, Path(name))


def this_command() -> str:
    """Return the command line, with paths shortened to their last part."""
    parts = []
    for part in sys.argv[1:]:
        flag, equals, value = part.partition("=") if part.startswith("-") else ("", "", part)
        parts.append(flag + equals + (Path(value).name if "/" in value else value))
    return shlex.join(["forerun", *parts])


app = typer.Typer(help="Train drafters for a target, and measure them.", no_args_is_help=True)

for command in (answers, eagle, block, medusa, mtp):
    app.command()(command)


@app.command()
@with_flags
def draft(
    *,
    out: Out,
    data: Data,
    target: TargetName = None,
    options: Annotated[DraftTraining, Flags(leave_out=FIXED, typed=("tokens", "minutes", "parallel"))],
    start: Annotated[
        str | None,
        typer.Option(
            help="Model to start from, with the target's tokens: a smaller one of its family, or a trained draft.",
            metavar="MODEL",
            show_default="the target",
        ),
    ] = None,
    pruning: Annotated[Pruning, Flags(typed=("layers",), panel="What is kept of the start")],
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a small model to agree with a target, from some layers of a smaller one, of a draft, or of the target."""
    from forerun.train.commands import train_draft

    is_chance = train_draft(
        out,
        _work(out),
        chosen_model(target, "--target"),
        data,
        replace(options, pruning=pruning),
        this_command(),
        resume=resume,
        force=force,
        start=start,
    )
    if is_chance:
        raise typer.Exit(NO_DRAFTER_LEARNT)


@app.command(name="eval")
@with_flags
def evaluate(
    *,
    target: TargetName = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="Draft's model folder.", metavar="FOLDER", show_default="the bundled pair's, without --head"),
    ] = None,
    head: Annotated[
        Path | None, typer.Option(help="Head's folder, to be measured in place of a draft.", metavar="FOLDER")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Answers, text or packed rows, as for training; a head is measured on what is held out of them.",
            metavar="PATH",
            show_default="the target's greedy continuations of the bundled prompts",
        ),
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k", min=1, help="K.", metavar="INT")] = 4,
    machine: Annotated[RunOptions, Flags("device")],
    json: Json = False,
) -> None:
    """Report a draft's bits per byte, perplexity and acceptance on the held-out files that ship with forerun, or a
    head's acceptance and the speed-up that follows from it on this machine."""
    settings: Any = {"num_draft_tokens": num_draft_tokens, "device": machine.device}
    if head is not None:
        if draft is not None:
            raise ConfigError("--draft and --head are both given. Give the one that is to be measured.")
        from forerun.train.heads.commands import evaluate_head

        report = evaluate_head(chosen_model(target, "--target"), head, data, **settings)
        if json:
            print_json(report.record())
        else:
            typer.echo("\n".join(line.removeprefix("- ") for line in report.lines()))
        return
    if data is not None:
        raise ConfigError("--data is for a --head: a draft is measured on the files that ship with forerun.")
    from forerun.train.commands import evaluate_pair

    name = target or (BUNDLED_TARGET if draft is None else chosen_model(None, "--target"))
    result = evaluate_pair(_folder(name), draft or ASSETS / "draft", **settings)
    if json:
        print_json(result)
    else:
        _show(result)


def _show(result: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    from forerun.train.card import NOT_JUDGED

    scores = Table("model", "bits per byte", "perplexity", "tokens")
    for name, score in (("target", result.target), ("draft", result.draft)):
        scores.add_row(name, f"{score.bits_per_byte:.4f}", f"{score.perplexity:.3f}", f"{score.tokens:,}")
    rates = Table("temperature", "K", "acceptance rate", "per token", "per position, if reached", "mean length")
    for row in result.acceptance:
        rates.add_row(
            f"{row.temperature:g}",
            str(row.num_draft_tokens),
            f"{row.rate:.3f}",
            f"{row.per_token:.3f}",
            " ".join(f"{value:.3f}" for value in row.per_position),
            f"{row.mean_acceptance_length:.2f}",
        )
    console = Console()
    console.print(scores)
    console.print(rates if result.acceptance else NOT_JUDGED)
