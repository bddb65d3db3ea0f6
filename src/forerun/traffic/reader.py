"""A journal read: runs with their answers and steps. A line that a crash has cut short is left out, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.traffic.records import REMEDY, Answer, Begun, Steps, answer_of, begun_of, steps_of

_MOST_LINE = 1 << 22
"""Characters of a line; a longer one is damage."""


@dataclass(slots=True)
class Run:
    """What one server served.

    Attributes:
        answers: in the order in which they ended.
        steps: alike steps together.
    """

    begun: Begun
    answers: list[Answer] = field(default_factory=list)
    steps: dict[tuple[int, int, int], Steps] = field(default_factory=dict)

    @property
    def busy(self) -> float:
        """Seconds that the engine computed."""
        return sum(each.total for each in self.steps.values())


@dataclass(frozen=True, slots=True)
class Traffic:
    """All that a journal tells.

    Attributes:
        runs: with answers; of one model, drafter and machine: those of the last run.
        num_damaged: lines that could not be read.
        num_other: answers of runs with another model, drafter or machine, which are left out.
    """

    runs: list[Run]
    num_damaged: int
    num_other: int

    @property
    def answers(self) -> list[Answer]:
        """Of all runs."""
        return [answer for run in self.runs for answer in run.answers]

    @property
    def steps(self) -> list[Steps]:
        """Of all runs, alike ones together."""
        found: dict[tuple[int, int, int], Steps] = {}
        for run in self.runs:
            for key, each in run.steps.items():
                found.setdefault(key, Steps(*key)).add(each)
        return list(found.values())

    @property
    def begun(self) -> Begun:
        """Of the last run."""
        return self.runs[-1].begun


def read_journal(path: Path) -> Traffic:
    """A journal, and the older part that lies beside it as FILE.1.

    Raises:
        ConfigError: it cannot be read, is no journal, or holds no answers.
    """
    older = path.with_name(path.name + ".1")
    runs: dict[str, Run] = {}
    damaged = 0
    for each in ([older] if older.is_file() else []) + [path]:
        damaged += _read(each, runs)
    held = [run for run in runs.values() if run.answers and run.steps]
    if not held:
        raise ConfigError(
            f"{path}: it holds no complete answers with their steps. Let the server answer some requests and end, or "
            "give another journal."
        )
    same = [run for run in held if run.begun.setting == held[-1].begun.setting]
    return Traffic(same, damaged, sum(len(run.answers) for run in held) - sum(len(run.answers) for run in same))


def _read(path: Path, runs: dict[str, Run]) -> int:
    """Add one file's records to the runs; how many lines could not be read."""
    run, damaged = None, 0
    for number, content in enumerate(_lines(path)):
        try:
            found = Fields.parse(content, f"{path}, line {number + 1}", ConfigError, remedy=REMEDY)
            if "format" in found.values or run is None:
                begun = begun_of(found)
                run = runs.setdefault(begun.run, Run(begun))
            elif "answer" in found:
                run.answers.append(answer_of(found.fields("answer")))
            else:
                for each in steps_of(found.fields("steps")):
                    run.steps.setdefault(each.key, Steps(*each.key)).add(each)
        except ConfigError:
            if run is None:
                raise
            damaged += 1
    if run is None:
        raise ConfigError(f"{path}: it is empty. {REMEDY}")
    return damaged


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while content := file.readline(_MOST_LINE):
                yield content
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. {REMEDY}") from None
