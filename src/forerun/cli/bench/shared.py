"""What the bench commands share: lists with commas as flags, prompts to measure on, progress, and the report."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass

import typer

from forerun.bench.report import Report
from forerun.cli.options import DRAFTERS_HELP, WORKLOAD_FILE, comma_list
from forerun.cli.output import print_json
from forerun.config import AUTO, NumDraftTokens
from forerun.errors import ConfigError
from forerun.fields import option
from forerun.workloads import Case, categories_in_turn, load, names

NUM_PROMPTS = 10
"""Of a bundled workload."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The drafters that are compared, and the prompts they are compared on."""

    drafters: str | None = option(None, DRAFTERS_HELP, metavar="DRAFTER,...", default_text="all there are")
    prompts: str = option(
        "code", f"With commas between them: bundled workloads, {WORKLOAD_FILE}", metavar="WORKLOAD,..."
    )
    num_prompts: int | None = option(
        None,
        "Prompts of each workload, its categories in turn.",
        low=1,
        default_text=f"{NUM_PROMPTS} of a bundled workload, all of a file",
    )
    max_tokens: int = option(128, "Tokens generated per prompt.", low=2)

    def cases(self) -> dict[str, list[Case]]:
        """The prompts of each workload. Raises ConfigError as `workloads.load`."""
        return {name: self._of(name) for name in comma_list(self.prompts, "--prompts")}

    def _of(self, name: str) -> list[Case]:
        cases = load(name)
        count = self.num_prompts or (NUM_PROMPTS if name in names() else len(cases))
        return categories_in_turn(cases)[:count] if count < len(cases) else cases


def draft_counts(text: str) -> list[NumDraftTokens]:
    """The values of K of a comma-separated flag; "auto" may be one of them.

    Raises:
        ConfigError: an entry is neither a whole number of 1 or more nor "auto".
    """
    entries = comma_list(text, "--num-draft-tokens")
    numbers = [entry for entry in entries if entry != AUTO]
    if not all(entry.isdecimal() and int(entry) > 0 for entry in numbers):
        raise ConfigError(
            f"--num-draft-tokens is {text!r}, but must be whole numbers of 1 or more, or {AUTO!r}, with commas between."
        )
    return [AUTO if entry == AUTO else int(entry) for entry in entries]


def non_negative(text: str, what: str) -> list[float]:
    """The numbers of a comma-separated flag.

    Raises:
        ConfigError: an entry is not a number of 0 or more.
    """
    try:
        numbers = [float(entry) for entry in comma_list(text, what)]
    except ValueError:
        numbers = [-1.0]
    if min(numbers) < 0:
        raise ConfigError(f"{what} is {text!r}, but must be numbers of 0 or more with commas between them.")
    return numbers


def whole_numbers(text: str, what: str) -> list[int]:
    """The numbers of a comma-separated flag.

    Raises:
        ConfigError: an entry is not a whole number of 1 or more.
    """
    entries = comma_list(text, what)
    if not all(entry.isdecimal() and int(entry) > 0 for entry in entries):
        raise ConfigError(f"{what} is {text!r}, but must be whole numbers of 1 or more with commas between them.")
    return [int(entry) for entry in entries]


def set_threads(threads: int | None) -> None:
    """Set torch's number of threads, for all methods alike; None leaves it."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def say(text: str) -> None:
    """Progress, on standard error."""
    typer.echo(f"forerun bench: {text}", err=True)


def print_report(report: Report, json: bool, markdown: bool) -> None:
    """The report on standard output: one JSON object, Markdown, or plain text."""
    if json:
        print_json(report.as_object())
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        typer.echo(report.text(markdown, width))
