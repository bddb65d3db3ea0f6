"""`forerun train answers`, `lm`, `draft`, `other-vocab`, `eval`: data, a model, its draft, and measurements of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.flags import Flags, given, with_flags
from forerun.cli.options import Json
from forerun.cli.output import print_json
from forerun.cli.train_answers import answers
from forerun.cli.train_heads import block, eagle, medusa, mtp
from forerun.config import ASSETS, BUNDLED_MODELS, BUNDLED_TARGET
from forerun.errors import ConfigError
from forerun.train.defaults import (
    DRAFT_ARCHITECTURE,
    DRAFT_TEXT,
    OTHER_VOCAB_ARCHITECTURE,
    OTHER_VOCAB_SAMPLING,
    OTHER_VOCAB_TEXT,
    Architecture,
    DraftTraining,
    LmTraining,
    Optimisation,
    OtherVocabTraining,
    Pruning,
)

if TYPE_CHECKING:
    from forerun.train.commands import Evaluation

app = typer.Typer(help="Train a language model and a draft for it, and measure them.", no_args_is_help=True)

app.command()(answers)
app.command()(eagle)
app.command()(block)
app.command()(medusa)
app.command()(mtp)

Out = Annotated[Path, typer.Argument(help="Model folder to write.", metavar="OUT")]
Work = Annotated[
    Path | None,
    typer.Option(help="Folder for checkpoints and samples.", metavar="FOLDER", show_default="OUT.run", hidden=True),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of Python files.", metavar="FOLDER", show_default="the interpreter's standard library"),
]
DraftData = Annotated[
    Path | None,
    typer.Option(
        help="Folder of Python files, or of packed rows.",
        metavar="FOLDER",
        show_default="the interpreter's standard library",
    ),
]
Target = Annotated[
    Path,
    typer.Option(
        help="The target model: 'bundled', one that `forerun fetch` brings, a local folder or a GGUF file.",
        metavar="MODEL",
        parser=lambda name: BUNDLED_MODELS.get(str(name), Path(name)),
        show_default="bundled",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
Force = Annotated[bool, typer.Option("--force", help="Begin anew, and replace the model in OUT.")]

MACHINE = ("seed", "threads", "device")
"""What every command takes: they say where and how a run goes, not what it learns."""
TEXT = ("tokens_per_step", "copy_share", "rename_share")
SAMPLING = ("sample_tokens", "sample_batch", "own_prompt_share")
SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
PANEL = "Architecture"
START = "A pruned copy of the target as the start"


@app.command()
@with_flags
def lm(
    *,
    out: Out,
    options: Annotated[
        LmTraining, Flags("tokens", *TEXT, "short_window", "long_share", "checkpoint_seconds", *MACHINE)
    ],
    optimisation: Annotated[Optimisation, Flags("weight_decay")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of a tokenizer to use.", metavar="FOLDER", show_default="one is learnt"),
    ] = None,
    data: Data = None,
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
    sizes: Annotated[Architecture, Flags(*SIZES, panel=PANEL)],
) -> None:
    """Train a language model of Python source from nothing."""
    from forerun.train.commands import train_lm

    options = replace(options, architecture=sizes, optimisation=optimisation)
    train_lm(out, work or _beside(out), data, options, resume=resume, force=force, tokenizer_folder=tokenizer)


@app.command()
@with_flags
def draft(
    *,
    out: Out,
    target: Target = BUNDLED_MODELS[BUNDLED_TARGET],
    text: Annotated[LmTraining, Flags(*TEXT, "seed", base=DRAFT_TEXT, text_tokens="tokens", typed=())],
    options: Annotated[
        DraftTraining,
        Flags(
            *("tokens", "tokens_per_step", *SAMPLING, "text_law_tokens", "new_tokens"),
            *("loss", "output_tokens", "checkpoint_seconds", *MACHINE),
            typed=("tokens", "device"),
        ),
    ],
    start: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a model of the target's tokens to go on from, instead of a first stage on text.",
            metavar="FOLDER",
        ),
    ] = None,
    pruning: Annotated[Pruning, Flags("layers", "width", "by", typed=("layers",), panel=START)],
    data: DraftData = None,
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
    sizes: Annotated[Architecture, Flags(*SIZES, base=DRAFT_ARCHITECTURE, typed=())],
) -> None:
    """Train a draft for a target: on text first, then on the target's own samples."""
    from forerun.train.commands import train_draft

    options = replace(options, text=replace(text, architecture=sizes), pruning=pruning)
    train_draft(out, work or _beside(out), target, data, options, resume=resume, force=force, start=start)


@app.command(name="other-vocab")
@with_flags
def other_vocab(
    *,
    ctx: typer.Context,
    out: Out,
    target: Target = BUNDLED_MODELS[BUNDLED_TARGET],
    samples: Annotated[
        Path | None,
        typer.Option(help="Folder of samples of a `train draft` run.", metavar="FOLDER", show_default="drawn first"),
    ] = None,
    options: Annotated[OtherVocabTraining, Flags("read_tokens")],
    text: Annotated[LmTraining, Flags("tokens", *TEXT, "checkpoint_seconds", *MACHINE, base=OTHER_VOCAB_TEXT)],
    sampling: Annotated[DraftTraining, Flags(*SAMPLING, *MACHINE, base=OTHER_VOCAB_SAMPLING)],
    data: Data = None,
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
    sizes: Annotated[Architecture, Flags("vocab_size", *SIZES, base=OTHER_VOCAB_ARCHITECTURE, panel=PANEL)],
) -> None:
    """Train a draft with a tokenizer of its own, on text and on the target's samples."""
    from forerun.train.commands import train_other_vocab

    drawn = given(ctx, *SAMPLING)
    if samples is not None and drawn:
        raise ConfigError(f"--samples are drawn already, so {drawn[0]} has no effect. Leave one of the two out.")
    options = replace(options, text=replace(text, architecture=sizes), sampling=sampling)
    train_other_vocab(out, work or _beside(out), target, data, options, resume=resume, force=force, samples=samples)


@app.command(name="eval")
@with_flags
def evaluate(
    *,
    target: Target = BUNDLED_MODELS[BUNDLED_TARGET],
    draft: Annotated[
        Path | None, typer.Option(help="Draft's model folder.", metavar="FOLDER", show_default="the bundled one")
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
    new_tokens: Annotated[
        int, typer.Option(min=8, help="Tokens the target continues each prompt by.", metavar="INT", hidden=True)
    ] = 128,
    machine: Annotated[LmTraining, Flags("threads", "device", typed=("device",))],
    json: Json = False,
) -> None:
    """Report a draft's bits per byte, perplexity and acceptance on the held-out files that ship with forerun, or a
    head's acceptance and the speed-up that follows from it on this machine."""
    sizes = {"num_draft_tokens": num_draft_tokens, "new_tokens": new_tokens}
    if head is not None:
        if draft is not None:
            raise ConfigError("--draft and --head are both given. Give the one that is to be measured.")
        _evaluate_head(target, head, data, machine, sizes, json)
        return
    if data is not None:
        raise ConfigError("--data is for a --head: a draft is measured on the files that ship with forerun.")
    from forerun.train.commands import evaluate_pair

    result = evaluate_pair(
        target,
        draft or ASSETS / "draft",
        **sizes,
        threads=machine.threads,
        device=machine.device,
    )
    if json:
        print_json(result)
    else:
        _show(result)


def _evaluate_head(
    target: Path, head: Path, data: Path | None, machine: LmTraining, sizes: dict[str, int], json: bool
) -> None:
    from forerun.train.evaluate_head import evaluate_head

    report = evaluate_head(
        str(target),
        head,
        data,
        num_draft_tokens=sizes["num_draft_tokens"],
        new_tokens=sizes["new_tokens"],
        threads=machine.threads,
        device=machine.device,
    )
    if json:
        print_json(report.record())
    else:
        for line in report.lines():
            typer.echo(line.removeprefix("- "))


def _beside(out: Path) -> Path:
    return out.with_name(out.name + ".run")


def _show(result: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    scores = Table("model", "bits per byte", "perplexity", "tokens")
    for name, score in (("target", result.target), ("draft", result.draft)):
        scores.add_row(name, f"{score.bits_per_byte:.4f}", f"{score.perplexity:.3f}", f"{score.tokens:,}")
    rates = Table("temperature", "K", "acceptance rate", "per token", "per position, if reached", "mean length")
    for row in result.acceptance:
        positions = " ".join(f"{value:.3f}" for value in row.per_position)
        rates.add_row(
            f"{row.temperature:g}",
            str(row.num_draft_tokens),
            f"{row.rate:.3f}",
            f"{row.per_token:.3f}",
            positions,
            f"{row.mean_acceptance_length:.2f}",
        )
    console = Console()
    console.print(scores)
    console.print(rates)
