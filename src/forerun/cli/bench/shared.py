"""Flags, prompts, number lists, progress lines and reports shared by the bench commands."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.options import DRAFTERS_HELP, WORKLOAD_FILE, LLMOptions, comma_list, set_threads
from forerun.cli.output import log_memory_plan, terminal_width
from forerun.config import AUTO, OFF, NumDraftTokens
from forerun.errors import ConfigError
from forerun.lab.bench.tables import Report
from forerun.lab.results.files import without_folders
from forerun.utils.fields import option
from forerun.utils.files import write_bytes
from forerun.utils.json_file import Fields
from forerun.utils.workloads import Case, bundled_workloads, categories_in_turn, load_workload

if TYPE_CHECKING:
    from forerun.engine import LLM
    from forerun.kernels.provenance import Watch

STDOUT = "-"
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the results into this file, for `forerun bench report` and `compare`; '-' prints them instead of "
        "tables.",
        metavar="FILE",
    ),
]
NUM_PROMPTS = 10
"""Default number of prompts of a bundled workload."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
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
        """Load the prompts of each workload, by its name without folders. Raises ConfigError as `load_workload`."""
        found = comma_list(self.prompts, "--prompts")
        short = [without_folders(name) for name in found]
        return {one if short.count(one) == 1 else name: self._of(name) for name, one in zip(found, short, strict=True)}

    def _of(self, name: str) -> list[Case]:
        cases = load_workload(name)
        count = self.num_prompts or (NUM_PROMPTS if name in bundled_workloads() else len(cases))
        return categories_in_turn(cases)[:count] if count < len(cases) else cases


def draft_counts(text: str) -> list[NumDraftTokens]:
    """Parse the values of K of a comma-separated flag; "auto" may be one of them. Raises ConfigError."""
    rule = f"whole numbers of 1 or more, or {AUTO!r},"
    return [
        AUTO if each == AUTO else int(each) for each in _entries(text, "--num-draft-tokens", rule, r"0*[1-9]\d*|auto")
    ]


def non_negative(text: str, flag: str) -> list[float]:
    """Parse the numbers of a comma-separated flag. Raises ConfigError unless all are 0 or more."""
    return [float(each) for each in _entries(text, flag, "numbers of 0 or more", r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?")]


def whole_numbers(text: str, flag: str) -> list[int]:
    """Parse the numbers of a comma-separated flag. Raises ConfigError unless all are whole and 1 or more."""
    return [int(each) for each in _entries(text, flag, "whole numbers of 1 or more", r"0*[1-9]\d*")]


def _entries(text: str, flag: str, rule: str, pattern: str) -> list[str]:
    entries = comma_list(text, flag)
    if not all(re.fullmatch(pattern, each, re.ASCII) for each in entries):
        raise ConfigError(f"{flag} is {text!r}, but must be {rule} with commas between them.")
    return entries


def begin(threads: int | None, json: Path | None) -> Watch:
    """Set torch's number of threads for all methods; None leaves it. Start watching the machine's load.

    Raises:
        ConfigError: results cannot be written into `json`.
    """
    from forerun.kernels.provenance import Watch

    check_json(json)
    watch = Watch.begin()
    set_threads(threads)
    return watch


def check_json(path: Path | None, flag: str = "--json") -> None:
    """Raise ConfigError if results cannot be written to a file; only forerun's own results may be replaced.

    Args:
        flag: the flag that names the file.
    """
    if path is None or str(path) == STDOUT or not path.exists():
        return
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}, which is a folder. Give the name of a file.")
    from forerun.lab.results.files import check_version

    try:
        check_version(Fields.read(path, ConfigError))
    except ConfigError:
        raise ConfigError(
            f"{flag} is {path}, which exists and holds no results that could be replaced. Give another name."
        ) from None


def say(text: str) -> None:
    """Print a line of progress on standard error."""
    typer.echo(f"forerun bench: {text}", err=True)


def write_text(path: Path, text: str) -> None:
    """Write a file, or standard output for "-". Raises ConfigError."""
    if str(path) == STDOUT:
        typer.echo(text, nl=False)
        return
    write_bytes(path, text.encode(), error=ConfigError)
    say(f"written: {path}")


def print_report(report: Report, watch: Watch, json: Path | None, markdown: bool = False) -> None:
    """Print the report as Markdown or plain text, and save it in a file; "-" prints the file's JSON alone."""
    from forerun.lab.results.files import command_line, results_text, save_results

    environment = watch.environment()
    results = report.results(command_line(sys.argv[1:]), environment)
    if json is not None and str(json) == STDOUT:
        typer.echo(results_text(results), nl=False)
        return
    typer.echo(report.text(environment, markdown, terminal_width()))
    if json is not None:
        save_results(results, json)
        say(f"results in {json}")


def open_plain(model: str, llm: LLMOptions, prefix_reuse: str = OFF) -> LLM:
    """Open the target without a drafter, with lines of progress. Silences Transformers."""
    from forerun.engine import LLM
    from forerun.lab.bench.methods import quieten

    quieten()
    say(f"loading {model}")
    with log_memory_plan(say):
        return LLM(model, drafter=None, dtype=llm.dtype, quantize=llm.quantize, prefix_reuse=prefix_reuse)
