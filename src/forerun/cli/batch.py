"""`forerun batch`: answers to a file of requests in OpenAI's batch format."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from forerun import __version__
from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED, open_llm
from forerun.cli.options import LLMOptions, chosen_model
from forerun.cli.output import log_memory_plan, note, note_untried
from forerun.config import AUTO, EngineConfig, SamplingParams
from forerun.errors import ConfigError
from forerun.integrations.ray.plan import RayOptions
from forerun.utils.model_names import served_name

if TYPE_CHECKING:
    from forerun.server.batch.files import BatchJournal
    from forerun.server.batch.lines import BatchFile

_INTERVAL, _TERMINAL_INTERVAL = 10.0, 0.2
"""Seconds between two reports of progress: lines of a log, and a terminal's line that is overwritten."""

_CLEAR = "\r\033[K"
"""Moves to the beginning of the terminal's line and clears it."""

Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN.jsonl",
        help='Requests, one a line: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions" or '
        '"/v1/completions", "body": {...}}.',
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers, in the order of the requests.")]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        help="What requests and answers call the model. A request for another one is refused.",
        metavar="NAME",
        show_default="that of --model",
    ),
]
Compute: TypeAlias = Callable[["Path", "BatchFile", "BatchJournal", "BatchProgress", Mapping[str, Any]], None]
Force = Annotated[bool, typer.Option("--force", help="Begin anew, and replace OUT.")]


@with_flags
def batch(
    *,
    source: Source,
    out: Out,
    model: options.ModelName = None,
    drafter: options.DrafterName = None,
    draft_model: options.DraftModelName = None,
    draft_vocab: options.DraftVocab = None,
    settings: Annotated[LLMOptions, Flags(leave_out=("acceptance", *options.OF_SERVERS), typed=options.LLM_TYPED)],
    engine: Annotated[EngineConfig, Flags("max_batch")],
    sampling: Annotated[SamplingParams, Flags("seed")],
    served_model_name: ServedModelName = None,
    chat_template: options.ChatTemplate = None,
    ray: Annotated[RayOptions, Flags(leave_out=("routing", "ray_timeout"), typed=options.RAY_TYPED, panel="Ray")],
    force: Force = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format; the same command goes on after a kill, also with --ray.

    With --seed, a request that has no seed gets one made from it and the request's custom_id.
    """
    model = chosen_model(model)
    chosen = options.named_drafter(drafter, draft_model, draft_vocab) or AUTO
    name = served_model_name or served_name(model)
    template = options.template_text(chat_template)
    if ray.ray and settings.remember is not None:
        raise ConfigError("--remember is for a single process, and --ray starts several. Leave it out.")
    llm = asdict(settings) | {"max_batch": engine.max_batch, "chat_template": template}
    run = {
        "model": model,
        "drafter": chosen,
        "served_model_name": name,
        "seed": sampling.seed,
        "forerun": __version__,
        **({} if template is None else {"chat_template": template}),
        **asdict(settings),
    }
    worker = {"model": model, "drafter": chosen, "llm": llm, "name": name, "seed": sampling.seed}
    options.set_threads(None)
    _answer(source, out, run, partial(_compute_on_ray, ray) if ray.ray else _compute_here, worker, force)


def _answer(
    source: Path, out: Path, run: dict[str, Any], compute: Compute, worker: Mapping[str, Any], force: bool
) -> None:
    """Answer the requests that have no answer yet, and write the file of answers.

    Args:
        run: options on which answers depend; a run with others does not resume.
        compute: answers the requests that the journal does not have.
        worker: options of the model that computes them.
    """
    from forerun.server.batch.files import BatchJournal, locked_journal
    from forerun.server.batch.lines import BatchFile, write_broken

    with (
        BatchFile(source) as requests,
        locked_journal(source, out, force=force) as path,
        BatchJournal(path, {"requests": requests.digest, **run}, requests.num_lines) as journal,
    ):
        progress = BatchProgress(journal, requests.num_lines)
        with _resume_hint(journal, requests.num_lines):
            if journal.num_done < requests.num_lines:
                compute(source, requests, journal, progress, worker)
            journal.write_out(out)
        aside = write_broken(requests, out)
        journal.remove()
        progress.end(out)
        if aside is not None:
            note(f"lines without a custom_id that can be read, answered by an error: {requests.num_broken}, in {aside}")


class BatchProgress:
    """The progress of a batch, on standard error."""

    def __init__(self, journal: BatchJournal, num_lines: int) -> None:
        self._journal = journal
        self._num_lines = num_lines
        self._num_before = journal.num_done
        self._terminal = sys.stderr.isatty()
        self._interval = _TERMINAL_INTERVAL if self._terminal else _INTERVAL
        self._start = self._shown = time.monotonic()
        self._num_tokens = self._num_cached = 0
        if self._num_before:
            typer.echo(f"forerun: {self._num_before} of {num_lines} requests are answered already", err=True)

    def begin(self) -> None:
        """Measure time from now on, when the model is loaded."""
        self._start = self._shown = time.monotonic()

    def show(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Report progress after an answer, if the last report is long enough ago.

        Args:
            num_tokens: tokens generated since the beginning.
            num_cached_tokens: tokens of prompts found in the cache, since the beginning.
        """
        self._num_tokens = num_tokens
        self._num_cached = num_cached_tokens
        now = time.monotonic()
        if now - self._shown >= self._interval:
            self._shown = now
            typer.echo(f"{_CLEAR}{self._line}" if self._terminal else self._line, err=True, nl=not self._terminal)

    def end(self, out: Path) -> None:
        """Print the final line."""
        typer.echo(f"{_CLEAR if self._terminal else ''}{self._line}; {out}", err=True)

    @property
    def _line(self) -> str:
        seconds = time.monotonic() - self._start
        parts = [f"forerun: {self._journal.num_done} of {self._num_lines} requests"]
        if self._journal.num_errors:
            parts.append(f"{self._journal.num_errors} of them errors")
        if self._num_tokens:
            parts.append(f"{self._num_tokens} tokens in {seconds:.1f} s, {self._num_tokens / seconds:.1f} tokens/s")
        if self._num_cached:
            parts.append(f"{self._num_cached} tokens of prompts were in memory")
        return " · ".join(parts)


def _compute_here(
    source: Path, requests: BatchFile, journal: BatchJournal, progress: BatchProgress, worker: Mapping[str, Any]
) -> None:
    """Answer the requests in this process."""
    from forerun.engine import EngineThread
    from forerun.server.batch.run import BatchRun

    note(f"loading {worker['model']}")
    with log_memory_plan(note):
        llm = open_llm(worker["model"], worker["drafter"], chat=False, **worker["llm"])
    progress.begin()
    name = worker["name"]
    with EngineThread(llm.shared) as thread:
        run = BatchRun(llm, thread, name, worker["seed"])
        missing = requests.requests(lambda index: not journal.has(index), name, llm.target.context_length)
        for index, answer in run.answers(missing):
            journal.add(index, answer)
            progress.show(run.num_tokens, run.num_cached_tokens)


def _compute_on_ray(
    options: RayOptions,
    source: Path,
    requests: BatchFile,
    journal: BatchJournal,
    progress: BatchProgress,
    worker: Mapping[str, Any],
) -> None:
    """Answer the requests by workers on Ray."""
    from forerun.integrations.ray.batch import answer_on_ray

    note_untried("Ray")
    note(f"starting {options.replicas} workers of {worker['model']}")
    answer_on_ray(source, requests, journal, worker, options, on_loaded=progress.begin, on_answer=progress.show)


@contextmanager
def _resume_hint(journal: BatchJournal, num_lines: int) -> Iterator[None]:
    """Print after Ctrl-C how many answers are kept and how to resume; exit with INTERRUPTED."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            f"\nforerun: stopped after {journal.num_done} of {num_lines} requests. Their answers are in "
            f"{journal.path}; the same command goes on, with --force it begins anew.",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None
