"""`forerun make`: models made from other models, prompts cut from files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from forerun.config import DEFAULT_DTYPE, SamplingParams
from forerun.errors import ConfigError
from forerun.files.write import refuse_to_overwrite

Force = Annotated[bool, typer.Option("--force", help="Replace what OUT holds.")]

_TRIED, _PROMPT = 64, 200
"""Tokens that a model in memory generates to be tried, and those of the prompt."""

app = typer.Typer(help="Make models from models, and prompts from files.", no_args_is_help=True)


@app.callback()
def make() -> None:
    """Make models from models, and prompts from files."""


@app.command()
def padded(
    parameters: Annotated[str, typer.Option(help="Size to reach, such as 200M.", metavar="SIZE")],
    out: Annotated[
        Path | None, typer.Argument(help="Folder to write; none with --in-memory.", metavar="OUT", show_default=False)
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Layers of a model in a folder.", metavar="INT", show_default="1.5 times the source's"),
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="A Llama folder.", metavar="FOLDER", show_default="the bundled target")
    ] = None,
    in_memory: Annotated[
        bool,
        typer.Option(
            "--in-memory",
            help="Make it on --device, of any size, with wider states too; try whether it gives the source's text, and "
            "how fast; and save nothing.",
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Of a model in memory.", metavar="DEVICE", show_default="cuda")
    ] = None,
    force: Force = False,
) -> None:
    """Make a model that gives the same text at the cost of a larger one, to measure speed at that cost."""
    from forerun.config import ASSETS

    source = source or ASSETS / "target"
    if in_memory:
        if out is not None or layers is not None or force:
            raise ConfigError("--in-memory saves nothing and chooses the layers: leave OUT, --layers and --force out.")
        _try_in_memory(source, parameters, device or "cuda")
        return
    if out is None or device is not None:
        raise ConfigError("give the folder to write, OUT, without --device; or --in-memory, which saves nothing.")
    from forerun.train.padded import make_padded, parse_parameters

    sizes = make_padded(source, out, parse_parameters(parameters), layers, force=force)
    typer.echo(
        f"{out}: cost-padded to {sizes.parameters:,} parameters, {sizes.num_layers} layers, "
        f"intermediate size {sizes.intermediate_size}; same text as the original"
    )


def _try_in_memory(source: Path, parameters: str, device: str) -> None:
    from forerun.engine import LLM
    from forerun.models.loading import adopt
    from forerun.train.widened import make_wide
    from forerun.workloads import load

    start = time.perf_counter()
    model = adopt(make_wide(source, parameters, DEFAULT_DTYPE, device), f"{source.name} at {parameters}")
    seconds = time.perf_counter() - start
    params = SamplingParams(temperature=0, max_tokens=_TRIED, ignore_eos=True)
    small = LLM(source, None)
    prompt = small.tokenizer(load("code", 1)[0].prompt)["input_ids"][-_PROMPT:]
    wide = LLM(model, None)
    wide.generate(prompt, params)
    start = time.perf_counter()
    own = wide.generate(prompt, params).token_ids
    speed = _TRIED / (time.perf_counter() - start)
    pairs = zip(own, small.generate(prompt, params).token_ids, strict=True)
    same = next((number for number, (one, other) in enumerate(pairs) if one != other), _TRIED)
    exact = "exact" if model.exactness.exact else f"not exact: {model.exactness.reason}"
    typer.echo(
        f"{model.num_parameters:,} parameters in {DEFAULT_DTYPE}, cost-padded, on {model.device} by {model.kernels} "
        f"kernels, made and tried in {seconds:.1f} s, {exact}; {same} of {_TRIED} greedy tokens are the source's, "
        f"whose sums are added in another order; {speed:.1f} tokens/s plain"
    )


@app.command()
def workloads(
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")], force: Force = False
) -> None:
    """Cut the bundled workloads from the held-out files again: prose, copying, high temperature."""
    from forerun.train import workload_prompts as cut
    from forerun.train.heldout import read_held_out
    from forerun.workloads import load, save

    files = read_held_out()
    for name, prompts in (
        ("prose", cut.prose_prompts(files)),
        ("copying", cut.copying_prompts(files)),
        ("high-temperature", cut.high_temperature_prompts(load("code"))),
    ):
        if not force:
            refuse_to_overwrite(out / f"{name}.jsonl", ConfigError)
        save(prompts, out / f"{name}.jsonl")
        typer.echo(f"{out / name}.jsonl: {len(prompts)} prompts")
