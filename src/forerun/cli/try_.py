"""`forerun try`: whether a model is faster with a drafter on this machine, within a minute."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
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
from forerun.utils.workloads import Case, categories_in_turn, load_workload

if TYPE_CHECKING:
    from forerun.engine import LLM

SECONDS = 56.0
"""From the end of loading to the last trial, which is given up then; what is printed takes the rest of a minute."""
NUM_PROMPTS, MOST_TOKENS, LEAST_TOKENS = 60, 64, 8
"""Bundled prompts, of which as many are answered as time allows, and tokens of an answer: as many as leave time for
`_TRIALS` answers."""
_TRIALS = 30
_PROMPT = "def fibonacci(n):"
"""Of a model without a chat template."""
_CHATS = "questions"
_KINDS = ("editing", "extraction", "chat")
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
    model, plain, watch = begin_tuning(model, llm, "a minute", None)
    loaded = perf_counter()
    cases = cases or _bundled(chat=is_chat(plain))
    from forerun.lab.tune.tuning import find_fastest

    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    task = make_task(plain, model, cases, prompts or "bundled prompts", params, SECONDS, quick=True)
    params = replace(params, max_tokens=_tokens(plain, task.requests[0].token_ids))
    task = replace(task, params=params, seconds=SECONDS - (perf_counter() - loaded))
    with TimedProgress("tuning", task.seconds) as progress:
        outcome = find_fastest(task, progress)
    if outcome.search.rounds:
        show_outcome(outcome, watch.environment())
        typer.echo(f"Measured with temperature 0 and {params.max_tokens} tokens an answer at most, prompts included.")
        _show_start(outcome.verdict.arm.drafter, model, llm, chat=is_chat(plain))
    else:
        note("interrupted before anything was measured")
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _bundled(*, chat: bool) -> list[Case]:
    """Return edits, questions on a text and chats in turn; without a chat template, beginnings of code."""
    cases = [case for case in load_workload(_CHATS) if case.category in _KINDS] if chat else load_workload(_RAW)
    return categories_in_turn(cases)[:NUM_PROMPTS]


def _tokens(plain: LLM, prompt: list[int]) -> int:
    """Return the tokens of an answer for which there is time, by the second of two short answers."""
    params = SamplingParams(temperature=0, max_tokens=LEAST_TOKENS, ignore_eos=True)
    plain.generate(prompt, params)
    started = perf_counter()
    plain.generate(prompt, params)
    seconds = perf_counter() - started
    return max(LEAST_TOKENS, min(MOST_TOKENS, int(SECONDS / _TRIALS / seconds * LEAST_TOKENS)))


def _show_start(drafter: str, model: str, settings: LLMOptions, *, chat: bool) -> None:
    """Print the memory of what was chosen, and the commands that run it."""
    from forerun.engine.memory_division import MemoryPlan

    with suppress(ForerunError):  # beside what is loaded here it may not fit a second time
        typer.echo(f"Memory: {MemoryPlan.of(model, drafter, EngineConfig(), **kept_options(settings))}")
    command, *prompt = ["chat"] if chat else ["generate", _PROMPT]
    typer.echo(f"Start it: {start_command(command, model, settings, drafter, *prompt)}")
    typer.echo(f"As a server: {start_command('serve', model, settings, drafter)}")
