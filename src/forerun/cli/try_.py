"""`forerun try`: whether a model is faster with a drafter on this machine, in as little time as its speed allows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED
from forerun.cli.options import LLMOptions, start_command
from forerun.cli.output import TimedProgress, note
from forerun.cli.tune import (
    Prompts,
    begin_tuning,
    chosen_cases,
    is_chat,
    kept_options,
    make_task,
    show_outcome,
)
from forerun.config import EngineConfig, SamplingParams
from forerun.errors import ForerunError
from forerun.utils.workloads import Case, everyday_questions, load_workload

if TYPE_CHECKING:
    from forerun.engine import LLM

LEAST_SECONDS = 56.0
MOST_SECONDS = 600.0
"""From the end of loading to the last trial, which is given up then; what is printed takes the rest of a minute."""
TRIALS = 40
FEWEST_TRIALS = 20
"""Answers for which there is time: of three drafters, each round with two of plain decoding, to eight prompts; and the
fewest, whatever the time: to four."""
NUM_PROMPTS = 60
"""Bundled prompts, of which as many are answered as is needed."""
MAX_TOKENS = 96
"""Tokens of an answer at most, in which a draft model can repay that it reads the prompt."""
MEASURED_TOKENS = 8
"""Tokens of the answer by which the time is told."""
_PROMPT = "def fibonacci(n):"
"""Of a model without a chat template."""
_RAW = "code"


@with_flags
def try_(
    *,
    model: options.TargetArgument = None,
    prompts: Prompts = None,
    llm: Annotated[LLMOptions, Flags("device", "quantize", typed=("quantize",))],
) -> None:
    """Measure a model with the best drafter that is found for it beside plain decoding, and say what to type."""
    cases = None if prompts is None else chosen_cases(prompts)
    model, plain, watch = begin_tuning(model, llm, "", None)
    loaded = perf_counter()
    cases = cases or _bundled(chat=is_chat(plain))
    from forerun.lab.tune.tuning import find_fastest

    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    task = make_task(plain, model, cases, prompts or "bundled prompts", params, LEAST_SECONDS, quick=True)
    rate, seconds = _pace(plain, [request.token_ids for request in task.requests])
    seconds = time_for(seconds)
    note(f"about {_in_minutes(seconds)} at most: this model writes {rate:.3g} tokens a second")
    task = replace(task, seconds=seconds - (perf_counter() - loaded))
    with TimedProgress("tuning", task.seconds) as progress:
        outcome = find_fastest(task, progress)
    if outcome.is_measured:
        show_outcome(outcome, watch.environment())
        typer.echo(f"Measured with temperature 0 and {MAX_TOKENS} tokens an answer at most.")
        _show_start(outcome.verdict.arm.drafter, model, llm, chat=is_chat(plain))
    else:
        note("interrupted before anything was measured")
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _bundled(*, chat: bool) -> list[Case]:
    """Return questions on code, edits, questions on a text and chats in turn; beginnings of code without a chat
    template."""
    return (everyday_questions() if chat else load_workload(_RAW))[:NUM_PROMPTS]


def _pace(plain: LLM, prompts: Sequence[list[int]]) -> tuple[float, float]:
    """Return tokens a second of plain decoding and the seconds of an answer to a prompt of mean length, by the second
    of two short answers."""
    params = SamplingParams(temperature=0, max_tokens=MEASURED_TOKENS, ignore_eos=True)
    plain.generate(prompts[0], params)
    stats = plain.generate(prompts[0], params).stats
    rate = (stats.num_tokens - 1) / max(stats.time_total - stats.time_first_token, 1e-9)
    length = fmean(map(len, prompts)) / len(prompts[0])
    return rate, stats.time_first_token * length + MAX_TOKENS / rate


def time_for(answer: float) -> float:
    """Return the seconds that trials may take where an answer of plain decoding takes so many."""
    return max(LEAST_SECONDS, min(TRIALS * answer, MOST_SECONDS), FEWEST_TRIALS * answer)


def _in_minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes > 1 else "a minute"


def _show_start(drafter: str, model: str, settings: LLMOptions, *, chat: bool) -> None:
    """Print the memory of what was chosen, and the commands that run it."""
    from forerun.engine.memory_division import MemoryPlan

    with suppress(ForerunError):  # beside what is loaded here it may not fit a second time
        typer.echo(f"Memory: {MemoryPlan.of(model, drafter, EngineConfig(), **kept_options(settings))}")
    command, *prompt = ["chat"] if chat else ["generate", _PROMPT]
    typer.echo(f"Start it: {start_command(command, model, settings, drafter, *prompt)}")
    typer.echo(f"As a server: {start_command('serve', model, settings, drafter)}")
