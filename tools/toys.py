"""`python -m tools.toys`: make the bundled models, cost-padded ones, the bundled prompts and held-out files again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.cli.flags import Flags, with_flags
from forerun.cli.main import Commands
from forerun.config import ASSETS, DEFAULT_DTYPE, SamplingParams
from forerun.engine import LLM
from forerun.errors import ConfigError
from forerun.lab.bench.padded_model import make_wide
from forerun.models.loading.load import adopt
from forerun.train.accelerator import device_name, model_vocabulary, product_type, training_device
from forerun.train.card import (
    CARD,
    load_model_and_tokenizer,
    load_saved_tokenizer,
    model_record,
    save_model,
    write_model_card,
)
from forerun.train.checkpoint import LoopState, run_in
from forerun.train.commands import train_draft
from forerun.train.corpus import SourceFile, read_held_out, read_python_files, split, standard_library_root
from forerun.train.data.packed import PackedDocument, pack
from forerun.train.defaults import DraftTraining
from forerun.train.evaluate import text_score, write_on
from forerun.utils import workloads as prompts
from forerun.utils.files import refuse_to_overwrite, write_bytes
from forerun.utils.vocabulary import fingerprint
from tools import lm, prompts as cut
from tools.lm import Architecture, LmTraining
from tools.text import EpochTexts, Windows, tokenize, vocabulary_size

DRAFT = Architecture(hidden_size=160, num_layers=2, num_heads=5, num_kv_heads=5, head_dim=32, intermediate_size=256)
"""Two layers, because copying takes two: one attends to the token before, the other finds where it stood
earlier. With one layer of 192, slightly more parameters, and more steps, the acceptance rate at K=4 was
0.32 instead of 0.58 at temperature 0, and 0.28 instead of 0.36 at temperature 1."""
PROMPT, WRITTEN, TOGETHER = 256, 128, 64
"""Tokens of text that a target continues, those that it writes, and how many such texts are continued together."""
TRIED = 64
"""Tokens that a model in memory generates as a trial."""
ROWS_PER_DOCUMENT = 16
"""Samples begin and end anywhere; joined, they teach no end of text where there is none."""

Out = Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")]
Target = Annotated[Path, typer.Option(help="The target's folder.", show_default="the bundled one")]
Data = Annotated[
    Path | None, typer.Option(help="Folder of Python files.", show_default="the interpreter's standard library")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
Force = Annotated[bool, typer.Option("--force", help="Begin anew, and replace what OUT holds.")]
Samples = Annotated[int, typer.Option(help="Tokens that the target writes.", min=1)]

app = typer.Typer(help=__doc__, cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def read_corpus(data: Path | None) -> tuple[list[SourceFile], list[SourceFile]]:
    """Read the Python files of a folder, or of the standard library: to train on, and held out.

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
    return training, held_out


def samples(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: list[SourceFile], tokens: int, seed: int
) -> Iterator[list[int]]:
    """Continue pieces of the files by the target, half at temperature 0 and half at 1: [384] ids."""
    windows = Windows(tokenize(EpochTexts.make(files, seed, 0.0, 0.0).of(0), tokenizer), PROMPT, seed)
    for number in range(max(1, round(tokens / (WRITTEN * TOGETHER)))):
        texts = windows.batch(number * TOGETHER, TOGETHER)[:, :-1].to(target.device)
        yield from write_on(target, texts, WRITTEN, float(number % 2), seed + number).tolist()


def _write(
    out: Path,
    kind: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: LoopState,
    options: LmTraining,
    sides: tuple[list[SourceFile], list[SourceFile]],
) -> None:
    """Write the model's folder, with its measurement on the held-out files and its card."""
    save_model(model, tokenizer, out)
    stored, where = load_model_and_tokenizer(out)[0], training_device(options.device)
    stored.to(where, product_type(options.dtype, where))
    score = text_score(stored, tokenizer, [file.text for file in sides[1]])
    record: dict[str, Any] = model_record(
        kind=kind,
        command=" ".join(["python -m tools.toys", *(Path(part).name for part in sys.argv[1:])]),
        seed=options.seed,
        model=stored,
        data={
            "description": "Python source",
            "licence": "that of the files",
            "training_files": len(sides[0]),
            "held_out_files": len(sides[1]),
            "split": "by a hash of the name",
        },
        options=asdict(options),
        stages={"text": state},
        held_out=score,
        acceptance=[],
        device=device_name(where),
    )
    write_model_card(out, record)
    typer.echo(f"{out}: held-out bits per byte {score.bits_per_byte:.4f}, perplexity {score.perplexity:.3f}")


@app.command("lm")
@with_flags
def train_lm(
    *,
    out: Out,
    options: Annotated[LmTraining, Flags()],
    sizes: Annotated[Architecture, Flags()],
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of a tokenizer to use.")] = None,
    data: Data = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a language model of Python source from nothing."""
    work, console = out.with_name(out.name + ".run"), Console()
    with run_in(work, out, console, resume=resume, force=force):
        sides = read_corpus(data)
        if tokenizer is not None:
            given = load_saved_tokenizer(tokenizer)
            given.save_pretrained(work)
            sizes = replace(sizes, vocab_size=vocabulary_size(given))
        options = replace(options, architecture=sizes)
        _write(out, "target", *lm.train(sides[0], work, options, console), options, sides)


@app.command()
@with_flags
def draft(
    *,
    out: Out,
    target: Target = ASSETS / "target",
    options: Annotated[LmTraining, Flags(base=LmTraining(tokens=2_000_000))],
    sizes: Annotated[Architecture, Flags(base=DRAFT)],
    sample_tokens: Samples = 400_000,
    distil_tokens: Annotated[int, typer.Option(help="Tokens of distillation.", min=1)] = 10_000_000,
    data: Data = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a draft from nothing: on text, and then by `forerun train draft` on what its target writes."""
    work, console = out.with_name(out.name + ".text"), Console()
    start, packed = work / "model", work / "packed"
    with run_in(work, out, console, resume=resume, force=force):
        training, _ = read_corpus(data)
        model, tokenizer = load_model_and_tokenizer(target)
        where = training_device(options.device)
        model.to(where, product_type(options.dtype, where))
        tokenizer.save_pretrained(work)
        options = replace(options, architecture=replace(sizes, vocab_size=model_vocabulary(model)))
        learnt, _, _ = lm.train(training, work, options, console, lambda each: lm.inherit_embeddings(each, model))
        save_model(learnt, tokenizer, start)
        rows = samples(model, tokenizer, training, sample_tokens, options.seed)
        documents = (PackedDocument(row, [True] * len(row), number % 50 == 0) for number, row in enumerate(rows))
        made_from = {"tokenizer": fingerprint(tokenizer)}
        vocab_size = model_vocabulary(model)
        pack(documents, packed, window=PROMPT + WRITTEN - 1, vocab_size=vocab_size, made_from=made_from)
    distilling = DraftTraining(
        tokens=distil_tokens,
        seed=options.seed,
        threads=options.threads,
        device=options.device,
        dtype=options.dtype,
        minutes=options.minutes,
    )
    command, run = "python -m tools.toys draft", out.with_name(out.name + ".run")
    train_draft(out, run, str(target), packed, distilling, command, resume=run.exists(), force=force, start=str(start))


@app.command()
@with_flags
def other_vocab(
    *,
    out: Out,
    target: Target = ASSETS / "target",
    options: Annotated[LmTraining, Flags(base=LmTraining(tokens=10_000_000))],
    sizes: Annotated[Architecture, Flags(base=replace(DRAFT, vocab_size=3_072))],
    sample_tokens: Samples = 400_000,
    data: Data = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a draft with a tokenizer of its own, on text and on its target's samples as text."""
    work, console = out.with_name(out.name + ".run"), Console()
    with run_in(work, out, console, resume=resume, force=force):
        sides = read_corpus(data)
        model, tokenizer = load_model_and_tokenizer(target)
        where = training_device(options.device)
        model.to(where, product_type(options.dtype, where))
        options = replace(options, architecture=sizes)
        if not (work / "tokenizer.json").exists():
            own = lm.train_tokenizer((file.text for file in sides[0]), sizes.vocab_size)
            own.save_pretrained(work)  # learnt of the files alone
        rows = list(samples(model, tokenizer, sides[0], sample_tokens, options.seed))
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        joined = ["\n".join(texts[start : start + ROWS_PER_DOCUMENT]) for start in range(0, len(texts), 16)]
        written = [SourceFile(f"samples/{number}", text) for number, text in enumerate(joined)]
        done = lm.train([*sides[0], *written], work, options, console)
        _write(out, "draft with a vocabulary of its own", *done, options, sides)


@app.command()
def padded(
    out: Out,
    parameters: Annotated[str, typer.Argument(help="Size to reach, such as 200M.", metavar="SIZE")],
    source: Annotated[Path, typer.Option(help="A Llama folder.", show_default="bundled")] = ASSETS / "target",
    force: Force = False,
) -> None:
    """Make a model that gives the same text at the cost of a larger one, to measure speed at that cost."""
    if not force:
        refuse_to_overwrite(out, ConfigError)
    model = make_wide(source, parameters, "bfloat16", "cpu")
    model.config.forerun_cost_padded = True
    save_model(model, load_saved_tokenizer(source), out)
    text = (
        f"# Cost-padded model: {model.num_parameters():,} parameters\n\n"
        f"It writes the text of the model `{source.name}`, with the same acceptance, at the cost of "
        f"{model.config.num_hidden_layers} layers of intermediate size {model.config.intermediate_size}: what was "
        "added is computed and adds nothing.\n\nIt is for measuring speed at a realistic ratio of costs. Say that it "
        "is cost-padded wherever a figure\nmeasured with it appears.\n"
    )
    write_bytes(out / CARD, text.encode(), error=ConfigError)
    typer.echo(text.splitlines()[0].removeprefix("# "))


@app.command()
def in_memory(
    parameters: Annotated[str, typer.Argument(help="Size to reach, such as 8B.", metavar="SIZE")],
    source: Annotated[Path, typer.Option(help="A Llama folder.", show_default="bundled")] = ASSETS / "target",
    device: str = "cuda",
) -> None:
    """Make such a model on a device, of any size; try whether it gives the source's text, and save nothing."""
    start = time.perf_counter()
    model = adopt(make_wide(source, parameters, DEFAULT_DTYPE, device), f"{source.name} at {parameters}")
    seconds = time.perf_counter() - start
    params = SamplingParams(temperature=0, max_tokens=TRIED, ignore_eos=True)
    small, wide = LLM(source, None), LLM(model, None)
    prompt = small.tokenizer(prompts.load_workload("code", 1)[0].prompt)["input_ids"][-200:]
    wide.generate(prompt, params)
    start = time.perf_counter()
    own = wide.generate(prompt, params).token_ids
    speed = TRIED / (time.perf_counter() - start)
    pairs = zip(own, small.generate(prompt, params).token_ids, strict=True)
    same = next((number for number, (one, other) in enumerate(pairs) if one != other), TRIED)
    typer.echo(
        f"{model.num_parameters:,} parameters in {DEFAULT_DTYPE}, cost-padded, on {model.device} by {model.kernels} "
        f"kernels, made and tried in {seconds:.1f} s, {model.exactness}; {same} of {TRIED} greedy tokens are the "
        f"source's, whose sums are added in another order; {speed:.1f} tokens/s plain"
    )


@app.command()
def workloads(out: Out, force: Force = False) -> None:
    """Cut the bundled workloads from the held-out files again: prose, copying, high temperature."""
    files = read_held_out()
    for name, cases in (
        ("prose", cut.prose_prompts(files)),
        ("copying", cut.copying_prompts(files)),
        ("high-temperature", cut.high_temperature_prompts(prompts.load_workload("code"))),
    ):
        if not force:
            refuse_to_overwrite(out / f"{name}.jsonl", ConfigError)
        prompts.save_workload(cases, out / f"{name}.jsonl")
        typer.echo(f"{out / name}.jsonl: {len(cases)} prompts")


@app.command()
def held_out(out: Out, data: Data = None) -> None:
    """Write the held-out files anew, and the bundled prompts of code cut from them."""
    count = cut.write_held_out(read_corpus(data)[1], out / "heldout.jsonl.xz")
    files, tokenizer = read_held_out(out / "heldout.jsonl.xz"), load_saved_tokenizer(ASSETS / "target")
    prompts.save_workload(cut.code_prompts(files, tokenizer), out / "code.jsonl")
    typer.echo(f"{out}: {count} files")


if __name__ == "__main__":
    app()
