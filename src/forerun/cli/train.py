"""`forerun train lm|draft|eval`: train a model, train its draft, measure both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from forerun.train.commands import Evaluation

app = typer.Typer(help="Train a language model and a draft for it, and measure them.", no_args_is_help=True)

Out = Annotated[Path, typer.Argument(help="Model folder to write.")]
Work = Annotated[Path | None, typer.Option(help="Folder for checkpoints and samples.", show_default="OUT.run")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of Python files.", show_default="the interpreter's standard library"),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of weights, order and samples.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 = as many as PyTorch finds.")]
Size = typer.Option(min=1, rich_help_panel="Architecture", show_default="see the card of the bundled one")
HiddenSize = Annotated[int | None, Size]
NumLayers = Annotated[int | None, Size]
NumHeads = Annotated[int | None, Size]
NumKvHeads = Annotated[int | None, Size]
HeadDim = Annotated[int | None, Size]
IntermediateSize = Annotated[int | None, Size]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint of a run that was killed.")]


@app.command()
def lm(
    out: Out,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to train on.")] = None,
    data: Data = None,
    work: Work = None,
    seed: Seed = 0,
    threads: Threads = 0,
    resume: Resume = False,
    hidden_size: HiddenSize = None,
    num_layers: NumLayers = None,
    num_heads: NumHeads = None,
    num_kv_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    intermediate_size: IntermediateSize = None,
) -> None:
    """Train a language model of Python source from nothing."""
    from forerun.train.commands import train_lm
    from forerun.train.defaults import LmTraining

    sizes = _given(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
    )
    options = LmTraining(seed=seed, threads=threads)
    options = replace(options, architecture=replace(options.architecture, **sizes))
    if tokens is not None:
        options = replace(options, tokens=tokens)
    train_lm(out, work or _beside(out), data, options, resume=resume)


@app.command()
def draft(
    out: Out,
    target: Annotated[Path | None, typer.Option(help="Target's model folder.", show_default="the bundled one")] = None,
    text_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the first stage, on text.")] = None,
    sample_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens the target writes.")] = None,
    text_law_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens of training text that the target only reads.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of distillation, with repetitions.")] = None,
    start: Annotated[
        Path | None, typer.Option(help="Folder of a draft to go on from, instead of a first stage on text.")
    ] = None,
    data: Data = None,
    work: Work = None,
    seed: Seed = 0,
    threads: Threads = 0,
    resume: Resume = False,
    hidden_size: HiddenSize = None,
    num_layers: NumLayers = None,
    num_heads: NumHeads = None,
    num_kv_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    intermediate_size: IntermediateSize = None,
) -> None:
    """Train a draft for a target: on text first, then on the target's own samples."""
    from forerun.config import ASSETS
    from forerun.train.commands import train_draft
    from forerun.train.defaults import DraftTraining

    sizes = _given(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
    )
    options = DraftTraining(seed=seed, threads=threads)
    text = replace(options.text, seed=seed, architecture=replace(options.text.architecture, **sizes))
    if text_tokens is not None:
        text = replace(text, tokens=text_tokens)
    options = replace(options, text=text)
    if sample_tokens is not None:
        options = replace(options, sample_tokens=sample_tokens)
    if text_law_tokens is not None:
        options = replace(options, text_law_tokens=text_law_tokens)
    if tokens is not None:
        options = replace(options, tokens=tokens)
    train_draft(out, work or _beside(out), target or ASSETS / "target", data, options, resume=resume, start=start)


@app.command(name="eval")
def evaluate(
    target: Annotated[Path | None, typer.Option(help="Target's model folder.", show_default="the bundled one")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft's model folder.", show_default="the bundled one")] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k", min=1, help="K.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens the target continues each prompt by.")] = 128,
    threads: Threads = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Report bits per byte, perplexity and acceptance on the held-out files that ship with forerun."""
    from forerun.config import ASSETS
    from forerun.train.commands import evaluate_pair

    result = evaluate_pair(
        target or ASSETS / "target",
        draft or ASSETS / "draft",
        num_draft_tokens=num_draft_tokens,
        new_tokens=new_tokens,
        threads=threads,
    )
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    else:
        _show(result)


def _given(**sizes: int | None) -> dict[str, int]:
    """The sizes that were given on the command line."""
    return {name: size for name, size in sizes.items() if size is not None}


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
