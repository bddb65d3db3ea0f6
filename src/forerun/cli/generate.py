"""`forerun generate`: one prompt, streamed, and a line of statistics."""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.answers import Output, Times, as_object, summary
from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import LLMOptions
from forerun.cli.output import print_json
from forerun.config import BUNDLED_TARGET, DEFAULT_DRAFTER, LOSSY_RULES, NO_DRAFTER, SamplingParams
from forerun.errors import PromptError

if TYPE_CHECKING:
    from forerun.engine import LLM

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


@with_flags
def generate(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, or with -, standard input.")] = None,
    model: options.ModelName = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="A drafter (`forerun drafters` lists them), the folder or id of a draft model, or 'none'.",
            metavar="DRAFTER",
            show_default="prediction, if one is given; the bundled draft for the bundled target, else "
            + DEFAULT_DRAFTER,
        ),
    ] = None,
    settings: Annotated[LLMOptions, Flags()],
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Put the prompt through the model's chat template: as the user's message, or, if it is a JSON list of "
            'messages ({"role": ..., "content": ...}), as that chat.',
        ),
    ] = False,
    json: options.Json = False,
    params: Annotated[SamplingParams, Flags(leave_out=("prompt_logprobs", "tenant"), panel="Sampling")],
) -> None:
    """Generate text from a prompt, streaming it to standard output."""
    params = replace(params, prediction=read_prediction(params.prediction))
    text = read_prompt(prompt)
    request = read_chat(text) if chat else text
    model = chosen_model(model)
    chosen = choose_drafter(model, drafter, params.prediction is not None)
    if not json:
        typer.echo(f"forerun: loading {model}", err=True)
    llm = open_llm(model, chosen, **asdict(settings))
    for note in notes(llm, model, chat, params, settings.acceptance):
        typer.echo(f"forerun: {note}", err=True)
    outputs, times, interrupted = run(llm, request, params, echo=not json)
    if json:
        facts = {"model": model, "drafter": chosen, "num_draft_tokens": llm.num_draft_tokens if chosen else 0}
        print_json({**facts, "exact": llm.exact, **as_object(outputs, times)})
    else:
        typer.echo(summary(outputs, times, chosen, interrupted), err=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def notes(llm: LLM, model: str, chat: bool, params: SamplingParams, acceptance: str | None) -> list[str]:
    """What somebody may have overlooked."""
    found = []
    if not chat and getattr(llm.tokenizer, "chat_template", None):
        found.append(f"{model} has a chat template, which the prompt is not put through. Add --chat to use it.")
    if acceptance in LOSSY_RULES and (params.greedy or params.seed is not None):
        reason = "at temperature 0" if params.greedy else "with a seed"
        found.append(f"--acceptance {acceptance} changes nothing {reason}: such requests are verified exactly.")
    return found


def read_prompt(prompt: str | None) -> str:
    """The argument, or all of standard input.

    Raises:
        PromptError: no argument and nobody typing into a pipe; or the input is not UTF-8.
    """
    if prompt is not None and prompt != "-":
        return _unicode(prompt, "The prompt")
    if prompt is None and sys.stdin.isatty():
        raise PromptError("There is no prompt. Give one as the argument, or pipe it in: forerun generate < file.txt")
    try:  # the bytes themselves: what sys.stdin makes of them depends on the locale
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"Standard input is not UTF-8 text: {error.reason}. Convert it first.") from None


def read_chat(text: str) -> list[Any]:
    """The chat that the text is as JSON, else the text as the user's message."""
    try:
        chat = json_text.loads(text)
    except (ValueError, RecursionError):
        chat = None
    if isinstance(chat, list) and chat and all(isinstance(entry, dict) and "role" in entry for entry in chat):
        return chat
    return [{"role": "user", "content": text}]


def read_prediction(prediction: str | Sequence[int] | None) -> str | Sequence[int] | None:
    """The flag's text, or that of the file it names.

    Raises:
        PromptError: the file cannot be read, or is not UTF-8.
    """
    if not isinstance(prediction, str):
        return prediction
    if not _unicode(prediction, "--prediction").startswith("@"):
        return prediction
    try:
        return Path(prediction[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"--prediction is {prediction!r}, but that file cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"--prediction is {prediction!r}, but that file is not UTF-8 text: {error}.") from None


def _unicode(text: str, what: str) -> str:
    """The text of an argument. Python reads bytes that are not UTF-8 as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError(f"{what} is not UTF-8 text. Convert it first, or put it into a UTF-8 file.") from None
    return text


def choose_drafter(model: str, drafter: str | None, predicted: bool = False) -> str | None:
    """The drafter asked for, or the default: for a prediction the one that reads it, else that of this target.

    None is plain decoding.
    """
    if drafter == NO_DRAFTER:
        return None
    if drafter is not None:
        return drafter
    if predicted:
        return "prediction"
    return "draft-model" if model == BUNDLED_TARGET else DEFAULT_DRAFTER


def open_llm(model: str, drafter: str | None, **settings: Any) -> LLM:
    """The seam that tests replace."""
    from forerun.engine import LLM

    return LLM(model, drafter=drafter, **settings)


def run(llm: LLM, prompt: Any, params: SamplingParams, echo: bool) -> tuple[dict[int, Output], Times, bool]:
    """Generate; returns the choices by index, the wall-clock seconds, and whether Ctrl-C ended it.

    With one choice the text is echoed as it comes; several would be mixed up, so they are printed when all is done.
    """
    outputs: dict[int, Output] = {index: Output() for index in range(params.n)}
    streaming = echo and params.n == 1
    interrupted = False
    times, start = Times(), time.perf_counter()
    try:
        stream: Any = llm.stream(prompt, params)
        with closing(stream):  # however it ends, the engine frees the sequence now
            for chunk in stream:
                if times.first is None and chunk.token_ids:
                    times.first, times.num_first = time.perf_counter() - start, len(chunk.token_ids)
                outputs[chunk.index].add(chunk)
                if streaming:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    times.total = time.perf_counter() - start
    if echo and not streaming:
        for index, output in outputs.items():
            typer.echo(f"--- choice {index}\n{output.text}")
    elif streaming and sys.stdout.isatty():
        typer.echo()
    return outputs, times, interrupted
