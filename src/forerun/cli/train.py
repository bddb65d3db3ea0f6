"""`forerun train`: answers, heads, `draft` and `eval`: data, drafters for a target, and measurements of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import Json
from forerun.cli.output import print_json
from forerun.cli.train_answers import answers
from forerun.cli.train_heads import Data, Force, Out, Resume, Work, block, eagle, medusa, mtp, this_command
from forerun.config import ASSETS, BUNDLED_MODELS, BUNDLED_TARGET
from forerun.errors import ConfigError
from forerun.train.defaults import DraftTraining, Pruning, RunOptions

if TYPE_CHECKING:
    from forerun.train.commands import Evaluation

app = typer.Typer(help="Train drafters for a target, and measure them.", no_args_is_help=True)

for command in (answers, eagle, block, medusa, mtp):
    app.command()(command)

Target = Annotated[
    Path,
    typer.Option(
        help="The target model: 'bundled', one that `forerun fetch` brings, a local folder or a GGUF file.",
        metavar="MODEL",
        parser=lambda name: BUNDLED_MODELS.get(str(name), Path(name)),
        show_default="bundled",
    ),
]


@app.command()
@with_flags
def draft(
    *,
    out: Out,
    data: Data,
    target: Target = BUNDLED_MODELS[BUNDLED_TARGET],
    options: Annotated[DraftTraining, Flags()],
    start: Annotated[
        Path | None,
        typer.Option(help="Folder of a model of the target's tokens to go on from.", metavar="FOLDER"),
    ] = None,
    pruning: Annotated[Pruning, Flags(panel="A pruned copy of the target as the start")],
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a small model to agree with a target, from a pruned copy of it or from a trained draft."""
    from forerun.train.commands import train_draft

    options, work = replace(options, pruning=pruning), work or out.with_name(out.name + ".run")
    train_draft(out, work, target, data, options, this_command(), resume=resume, force=force, start=start)


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
        int, typer.Option(min=8, help="Tokens the target continues each prompt by.", metavar="INT")
    ] = 128,
    machine: Annotated[RunOptions, Flags("threads", "device")],
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
    target: Path, head: Path, data: Path | None, machine: RunOptions, sizes: dict[str, int], json: bool
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
