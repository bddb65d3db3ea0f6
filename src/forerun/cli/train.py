"""`forerun train lm|draft|eval`: train a model, train its draft, measure both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.train.commands import Evaluation
    from forerun.train.defaults import LmTraining

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
TokensPerStep = Annotated[int | None, typer.Option(min=1, help="Tokens of one step.", show_default="8192")]
CopyShare = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Share of the files with repeated and edited spans.", show_default="0.1"),
]
RenameShare = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Share of the files with other names.", show_default="0")
]
ShortWindow = Annotated[int | None, typer.Option(min=8, help="Tokens of a window at first.", show_default="512")]
LongShare = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Last part of the run, in long windows.", show_default="0.15")
]
WeightDecay = Annotated[float | None, typer.Option(min=0.0, help="Of the hidden matrices.", show_default="0.01")]
SampleTokens = Annotated[int | None, typer.Option(min=1, help="Tokens the target writes.", show_default="400000")]
SampleBatch = Annotated[int | None, typer.Option(min=1, help="Prompts continued together.", show_default="128")]
OwnPromptShare = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Share of the prompts that the target wrote itself.", show_default="0"),
]
Target = Annotated[Path | None, typer.Option(help="Target's model folder.", show_default="the bundled one")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint of a run that was killed.")]


@app.command()
def lm(
    out: Out,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to train on.", show_default="6000000")] = None,
    tokens_per_step: TokensPerStep = None,
    copy_share: CopyShare = None,
    rename_share: RenameShare = None,
    short_window: ShortWindow = None,
    long_share: LongShare = None,
    weight_decay: WeightDecay = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer to use.", show_default="one is learnt")
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
    given = _given(
        tokens=tokens,
        tokens_per_step=tokens_per_step,
        copy_share=copy_share,
        rename_share=rename_share,
        short_window=short_window,
        long_share=long_share,
    )
    options = _text_options(replace(LmTraining(), seed=seed, threads=threads, **given), sizes, weight_decay)
    train_lm(out, work or _beside(out), data, options, resume=resume, tokenizer_folder=tokenizer)


@app.command()
def draft(
    out: Out,
    target: Target = None,
    text_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the first stage, on text.")] = None,
    sample_tokens: SampleTokens = None,
    text_law_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens of training text that the target only reads.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of distillation, with repetitions.")] = None,
    tokens_per_step: TokensPerStep = None,
    sample_batch: SampleBatch = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a prompt is continued by.")] = None,
    own_prompt_share: OwnPromptShare = None,
    copy_share: CopyShare = None,
    rename_share: RenameShare = None,
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
    of_text = _given(
        tokens=text_tokens, tokens_per_step=tokens_per_step, copy_share=copy_share, rename_share=rename_share
    )
    given = _given(
        sample_tokens=sample_tokens,
        text_law_tokens=text_law_tokens,
        tokens=tokens,
        tokens_per_step=tokens_per_step,
        sample_batch=sample_batch,
        new_tokens=new_tokens,
        own_prompt_share=own_prompt_share,
    )
    text = _text_options(replace(DraftTraining().text, seed=seed, **of_text), sizes)
    options = DraftTraining(seed=seed, threads=threads, text=text, **given)
    train_draft(out, work or _beside(out), target or ASSETS / "target", data, options, resume=resume, start=start)


@app.command(name="other-vocab")
def other_vocab(
    out: Out,
    target: Target = None,
    samples: Annotated[
        Path | None, typer.Option(help="Folder of samples of a `train draft` run.", show_default="drawn first")
    ] = None,
    read_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of samples read, at most.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to train on.")] = None,
    tokens_per_step: TokensPerStep = None,
    copy_share: CopyShare = None,
    rename_share: RenameShare = None,
    sample_tokens: SampleTokens = None,
    sample_batch: SampleBatch = None,
    own_prompt_share: OwnPromptShare = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=257, help="Tokens of its tokenizer.", show_default="3072")
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
    """Train a draft with a tokenizer of its own, on text and on the target's samples."""
    from forerun.config import ASSETS
    from forerun.train.commands import train_other_vocab
    from forerun.train.defaults import OtherVocabTraining

    given = _given(tokens=tokens, tokens_per_step=tokens_per_step, copy_share=copy_share, rename_share=rename_share)
    sizes = _given(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
    )
    drawn = _given(sample_tokens=sample_tokens, sample_batch=sample_batch, own_prompt_share=own_prompt_share)
    if samples is not None and drawn:
        raise ConfigError(f"--samples are drawn already, so --{next(iter(drawn)).replace('_', '-')} has no effect.")
    options = OtherVocabTraining()
    text = _text_options(replace(options.text, seed=seed, threads=threads, **given), sizes)
    sampling = replace(options.sampling, seed=seed, threads=threads, text_law_tokens=0, **drawn)
    options = replace(options, text=text, sampling=sampling, **_given(read_tokens=read_tokens))
    train_other_vocab(
        out, work or _beside(out), target or ASSETS / "target", data, options, resume=resume, samples=samples
    )


@app.command(name="eval")
def evaluate(
    target: Target = None,
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


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def _text_options(options: LmTraining, sizes: dict[str, int], weight_decay: float | None = None) -> LmTraining:
    """`options` with the sizes and the weight decay that were given."""
    optimisation = replace(options.optimisation, **_given(weight_decay=weight_decay))
    return replace(options, architecture=replace(options.architecture, **sizes), optimisation=optimisation)


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
