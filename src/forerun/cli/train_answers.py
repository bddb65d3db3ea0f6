"""`forerun train answers`: prompts and a target's answers to them, which drafters are trained on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED, open_llm
from forerun.cli.memory_line import memory_told, note
from forerun.cli.options import LLMOptions
from forerun.config import NO_DRAFTER
from forerun.train.defaults import AnswerMaking

if TYPE_CHECKING:
    from forerun.engine import LLM

Out = Annotated[
    Path, typer.Argument(help="File of answers to write: .jsonl, or .jsonl.gz to have it gzipped.", metavar="OUT")
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSON lines with `prompt`, `messages` or `turns`, to be answered; any other file, and folders, are text "
        "or source of which prompts are made. Repeatable.",
        metavar="PATH",
        show_default="the target writes prompts, or they are cut from the standard library",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="The target model: 'smollm2' once it is fetched, 'bundled', a folder, a GGUF file, or a hub id.",
        metavar="MODEL",
        show_default="smollm2 if it is fetched, else bundled",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Begin anew, and replace OUT.")]


@with_flags
def answers(
    *,
    out: Out,
    target: Target = None,
    data: Data = None,
    making: Annotated[AnswerMaking, Flags()],
    settings: Annotated[LLMOptions, Flags(leave_out=("num_draft_tokens", "acceptance", "tensor_parallel_size"))],
    force: Force = False,
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
        with memory_told(note):
            return open_llm(target, NO_DRAFTER, chat=False, **llm)

    try:
        make_answers(opened, out, data or [], making, Console(stderr=True), force=force)
    except KeyboardInterrupt:
        typer.echo(f"\nforerun: stopped. What was done is in {out}.run; the same command goes on.", err=True)
        raise typer.Exit(INTERRUPTED) from None
