"""`forerun export`: models in the formats of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.flags import with_flags
from forerun.cli.output import print_json, show_written
from forerun.config import DTYPES, HEAD_FORMS
from forerun.errors import ConfigError

app = typer.Typer(help="Write models and draft heads in the formats of other programs.", no_args_is_help=True)


@app.callback()
def export() -> None:
    """Write models and draft heads in the formats of other programs."""


@app.command()
def hf(
    model: Annotated[str, options.model_argument(options.A_MODEL, None)],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
    dtype: Annotated[
        str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.", metavar="TEXT")
    ] = "auto",
    adapter: Annotated[
        str | None, typer.Option(help="The folder of a PEFT LoRA adapter of the model, to merge.", metavar="FOLDER")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the model that OUT holds; other files there stay.")
    ] = False,
) -> None:
    """Write a Transformers folder: safetensors, configuration, tokenizer with chat template, end tokens."""
    from forerun.export.transformers import export_hf

    typer.echo(f"forerun: loading {model}", err=True)
    exported = export_hf(model, out, dtype, adapter=adapter, force=force)
    show_written(out, exported)


@app.command()
def head(
    head: Annotated[
        Path,
        typer.Argument(
            help="Folder of a head that forerun trained, or the pickled file of a public one.", metavar="HEAD"
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
) -> None:
    """Write a head with its matrices at 8 bits: a quarter of the bytes.

    Of a pickled file, such as pytorch_model.bin, write the tensors as safetensors, with the config.json beside it: the
    file is read in a process of its own, which makes nothing but tensors of it.
    """
    from forerun.export.quantized import export_head

    exported = export_head(head, out)
    show_written(out, exported)


@app.command()
@with_flags
def vllm(
    *,
    draft: Annotated[
        str, typer.Argument(help="Folder of a trained head, or a draft model: a folder, a hub id.", metavar="DRAFT")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
    target: Annotated[str, typer.Option(help="The model that it drafts for.", metavar="MODEL")],
    form: Annotated[
        str, typer.Option(help=f"What is written of a head: {' or '.join(HEAD_FORMS)}.", metavar="FORM", hidden=True)
    ] = HEAD_FORMS[0],
    dtype: Annotated[
        str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.", metavar="TEXT")
    ] = "auto",
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "-k",
            min=1,
            help="Tokens that vLLM is to draft a step.",
            metavar="INT",
            show_default="3; as many as there are Medusa heads",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what OUT holds of a model; other files there stay.")
    ] = False,
) -> None:
    """Write a draft head or a draft model as a folder that vLLM loads, and the speculative configuration for it.

    The configuration is printed, and lies in OUT as speculative_config.json. Drafters without a model run inside vLLM
    as they are: docs/vllm.md.
    """
    from forerun.drafters.models.head_files.folder import is_head
    from forerun.export.vllm import export_vllm, export_vllm_draft

    typer.echo(f"forerun: loading {target}", err=True)
    rest: Any = {"dtype": dtype, "num_draft_tokens": num_draft_tokens, "force": force}
    if is_head(Path(draft)):
        exported = export_vllm(Path(draft), out, target, form=form, **rest)
    else:
        if form != HEAD_FORMS[0]:
            raise ConfigError(
                f"The key form is {form!r}, but {draft} is no head, and a model has one form. Leave it out."
            )
        exported = export_vllm_draft(draft, out, target, **rest)
    show_written(out, exported.files, err=True)
    print_json(exported.speculative)


@app.command("llama.cpp")
@with_flags
def llama_cpp(
    *,
    model: Annotated[str, options.model_argument("A draft model, or a target: a folder, a hub id.", None)],
    out: Annotated[Path, typer.Argument(help="File to write, OUT.gguf.", metavar="OUT")],
    target: Annotated[
        str | None,
        typer.Option(
            help="The GGUF file of the target that MODEL drafts for: its tokenizer's metadata is copied.",
            metavar="FILE",
            show_default="MODEL is a target, and its own tokenizer is written",
        ),
    ] = None,
    tensor_type: Annotated[
        str, typer.Option("--tensor-type", help="Type of the matrices: F16, Q8_0 or F32.", metavar="TYPE")
    ] = "F16",
    pre: Annotated[
        str | None,
        typer.Option(
            help="llama.cpp's rule for cutting texts, where MODEL's own is none of its rules. Without --target.",
            metavar="NAME",
            hidden=True,
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "-k",
            min=1,
            help="Tokens that llama.cpp is to draft a step.",
            metavar="INT",
            show_default="3",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.")] = False,
) -> None:
    """Write a model of the Llama family as a GGUF file, and print the command that serves it."""
    from forerun.export.gguf import export_llama_cpp

    typer.echo(f"forerun: loading {model}", err=True)
    options: Any = {"type_name": tensor_type, "pre": pre, "num_draft_tokens": num_draft_tokens, "force": force}
    exported = export_llama_cpp(model, out, target, **options)
    file = exported.file
    typer.echo(f"{out}: {file.num_parameters:,} parameters in {file.dtype}, {file.nbytes:,} bytes", err=True)
    typer.echo(exported.command)
