"""`forerun generate`: one prompt, streamed, and a line of statistics."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import NO_DRAFTER, LLMOptions
from forerun.cli.output import print_json
from forerun.config import BUNDLED_TARGET, SamplingParams
from forerun.errors import PromptError

if TYPE_CHECKING:
    from forerun.engine import LLM, SequenceStats, StreamChunk

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


@dataclass
class Output:
    """One choice, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    stats: SequenceStats | None = None
    num_accepted: int = 0


@with_flags
def generate(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, or with -, standard input.")] = None,
    model: options.ModelName = BUNDLED_TARGET,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="A drafter (`forerun drafters` lists them), the folder or id of a draft model, or 'none'.",
            metavar="DRAFTER",
            show_default="prediction, if one is given; the bundled draft for the bundled target, else prompt-lookup",
        ),
    ] = None,
    settings: Annotated[LLMOptions, Flags()],
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    json: options.Json = False,
    params: Annotated[SamplingParams, Flags(leave_out=("prompt_logprobs", "tenant"), panel="Sampling")],
) -> None:
    """Generate text from a prompt, streaming it to standard output."""
    params = replace(params, prediction=read_prediction(params.prediction))
    text = read_prompt(prompt)
    chosen = choose_drafter(model, drafter, params.prediction is not None)
    llm = open_llm(
        model,
        chosen,
        dtype=settings.dtype,
        device=settings.device,
        num_draft_tokens=settings.num_draft_tokens,
        acceptance=settings.acceptance,
    )
    request: Any = [{"role": "user", "content": text}] if chat else text
    outputs, seconds, interrupted = run(llm, request, params, echo=not json)
    if json:
        facts = {"model": model, "drafter": chosen, "num_draft_tokens": llm.num_draft_tokens if chosen else 0}
        print_json({**facts, "exact": llm.exact, **as_object(outputs, seconds)})
    else:
        typer.echo(summary(outputs, seconds, chosen, interrupted), err=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def read_prompt(prompt: str | None) -> str:
    """The argument, or all of standard input.

    Raises:
        PromptError: no argument and nobody typing into a pipe; or the input is not UTF-8.
    """
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise PromptError("There is no prompt. Give one as the argument, or pipe it in: forerun generate < file.txt")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"Standard input is not UTF-8 text: {error}. Convert it first.") from None


def read_prediction(prediction: str | Sequence[int] | None) -> str | Sequence[int] | None:
    """The flag's text, or that of the file it names.

    Raises:
        PromptError: the file cannot be read, or is not UTF-8.
    """
    if not isinstance(prediction, str) or not prediction.startswith("@"):
        return prediction
    try:
        return Path(prediction[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"--prediction is {prediction!r}, but that file cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"--prediction is {prediction!r}, but that file is not UTF-8 text: {error}.") from None


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
    return "draft-model" if model == BUNDLED_TARGET else "prompt-lookup"


def open_llm(model: str, drafter: str | None, **settings: Any) -> LLM:
    """The seam that tests replace."""
    from forerun.engine import LLM

    return LLM(model, drafter=drafter, **settings)


def run(llm: LLM, prompt: Any, params: SamplingParams, echo: bool) -> tuple[dict[int, Output], float, bool]:
    """Generate; returns the choices by index, the wall-clock seconds, and whether Ctrl-C ended it.

    With one choice the text is echoed as it comes; several would be mixed up, so they are printed when all is done.
    """
    outputs: dict[int, Output] = {index: Output() for index in range(params.n)}
    streaming = echo and params.n == 1
    interrupted = False
    start = time.perf_counter()
    try:
        stream: Any = llm.stream(prompt, params)
        with closing(stream):  # however it ends, the engine frees the sequence now
            for chunk in stream:
                _add(outputs[chunk.index], chunk)
                if streaming:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - start
    if echo and not streaming:
        for index, output in outputs.items():
            typer.echo(f"--- choice {index}\n{output.text}")
    elif streaming and sys.stdout.isatty():
        typer.echo()
    return outputs, seconds, interrupted


def _add(output: Output, chunk: StreamChunk) -> None:
    output.text += chunk.text
    output.token_ids += chunk.token_ids
    output.num_accepted += chunk.num_accepted_draft
    output.finish_reason = chunk.finish_reason or output.finish_reason
    output.stats = chunk.stats or output.stats
    output.logprobs += getattr(chunk, "logprobs", None) or []


def as_object(outputs: dict[int, Output], seconds: float) -> dict[str, Any]:
    """What --json prints, beside the facts of the call. A choice cut short by Ctrl-C has the reason "abort"."""
    choices = [
        {
            "index": index,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason or "abort",
            **({"logprobs": output.logprobs} if output.logprobs else {}),
            "stats": _stats_object(output),
        }
        for index, output in outputs.items()
    ]
    tokens = sum(len(output.token_ids) for output in outputs.values())
    return {"choices": choices, "num_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def _stats_object(output: Output) -> dict[str, Any] | None:
    stats = output.stats
    if stats is None:
        return None
    return {
        "num_tokens": stats.num_tokens,
        "num_forwards": stats.num_forwards,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_plain_forwards": stats.num_plain_forwards,
        "mean_num_draft_tokens": stats.mean_num_draft_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate if stats.num_draft_tokens else None,
        "drafted_per_position": list(stats.drafted_per_position),
        "reached_per_position": list(stats.reached_per_position),
        "accepted_per_position": list(stats.accepted_per_position),
        "time_draft": stats.time_draft,
        "time_target": stats.time_target,
        "time_verify": stats.time_verify,
        "time_total": stats.time_total,
    }


def summary(outputs: dict[int, Output], seconds: float, drafter: str | None, interrupted: bool) -> str:
    """The line of statistics."""
    tokens = sum(len(output.token_ids) for output in outputs.values())
    parts = [f"{tokens} tokens in {seconds:.2f} s", f"{tokens / seconds:.1f} tokens/s"]
    measured = [output.stats for output in outputs.values() if output.stats is not None]
    forwards = sum(stats.num_forwards for stats in measured)
    drafted = sum(stats.num_draft_tokens for stats in measured)
    if forwards:
        parts.append(f"{sum(stats.num_tokens for stats in measured) / forwards:.2f} tokens per forward")
    if drafted:
        accepted = sum(stats.num_accepted_tokens for stats in measured)
        parts.append(f"{100 * accepted / drafted:.0f} % of {drafted} draft tokens accepted")
    parts.append(drafter or "no drafter")
    reasons = {output.finish_reason or "abort" for output in outputs.values()}
    parts.append("interrupted" if interrupted else "finished: " + ", ".join(sorted(reasons)))
    return "forerun: " + " · ".join(parts)
