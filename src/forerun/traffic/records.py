"""What a journal holds: lines of JSON, each the beginning of a server's run, an answer, or the steps of some seconds.

Times are in seconds, counted from the beginning of the run. Nothing of a prompt or an answer is kept but its length;
no id, key or address of who asked.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ConfigError
from forerun.files.json_file import Fields

FORMAT = "forerun.journal"
VERSION = 1
CATEGORY = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""What a category may be: a word, not a text."""
MOST_CATEGORIES = 64
OTHER = "other"
"""The category of answers beyond MOST_CATEGORIES."""
EXACT_ROWS = 16
"""Draft tokens of a step up to which steps are told apart one by one."""
_MOST_COUNT, _MOST_SECONDS, _MOST_SUM = 10**6, 1e9, 10**15
"""What is larger is damage."""
REMEDY = "Give a file that `forerun serve --journal FILE` wrote."


@dataclass(frozen=True, slots=True)
class Begun:
    """The run of one server, from its start to its end; written again at the head of each part of the file.

    Attributes:
        run: a random name, by which the parts of a run are known.
        started: ISO 8601 in UTC; times of other records count from there.
        model: as requests call it.
        number_format: of its weights.
        exact: whether speculation gives the same bits, by the self-test at load.
        drafter: the default of requests; "none" for plain decoding.
        num_draft_tokens: K, or "auto".
        max_batch: sequences of a step.
        machine: processor, cores, threads, versions and commit, as `results/machine.py` tells them.
    """

    run: str
    started: str
    model: str
    number_format: str
    exact: bool
    drafter: str
    num_draft_tokens: str
    max_batch: int
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> tuple[object, ...]:
        """All that runs must share to be one traffic."""
        same = ("cpu", "cores", "threads", "kernels")
        return (
            *(self.model, self.number_format, self.drafter, self.num_draft_tokens, self.max_batch),
            *(str(self.machine.get(name)) for name in same),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of one request, complete.

    Attributes:
        at: when it came, in seconds of the run.
        category: the client's word for it; empty without one.
        prompt: tokens of the prompt.
        cached: of these, found in memory and not computed.
        tokens: of the answer.
        end: why it ended.
        greedy: at temperature 0.
        drafter: that it was to have; "none" where the request switched speculation off.
        forwards, plain_forwards, asked, drafted, accepted: as in SequenceStats; asked is K summed over the forwards.
        reached, accepted_at: [position] drafts with a token there below what was accepted, and how many were.
        decisions: forwards by what was decided about drafting, and why.
        waited: seconds before its first step.
        first: to its first token, waiting included.
        seconds: to its end.
        draft, target, verify: parts of the steps that it took part in, which it shared with others.
    """

    at: float
    category: str
    prompt: int
    cached: int
    tokens: int
    end: str
    greedy: bool
    drafter: str
    forwards: int
    plain_forwards: int
    asked: int
    drafted: int
    accepted: int
    reached: Sequence[int]
    accepted_at: Sequence[int]
    decisions: Mapping[str, int]
    waited: float
    first: float
    seconds: float
    draft: float
    target: float
    verify: float

    @property
    def per_token(self) -> float | None:
        """Seconds from one token to the next, after the first; None where there is but one."""
        return (self.seconds - self.first) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(slots=True)
class Steps:
    """Steps of the engine that are alike, added up. Times in seconds.

    Attributes:
        decoding: sequences that were past their prompts.
        drafted: class of draft tokens of a step: their number, from EXACT_ROWS on coarser.
        prompt: class of prompt rows of a step: 0, or the power of two below.
        count: how many steps.
        draft_rows, prompt_rows, accepted, tokens, positions: sums of rows, of draft tokens accepted, of tokens
            committed, of positions in the caches.
        draft, target, verify, total: sums of seconds.
        squares: sum of the squares of each step's total, by which its spread is known.
    """

    decoding: int
    drafted: int
    prompt: int
    count: int = 0
    draft_rows: int = 0
    prompt_rows: int = 0
    accepted: int = 0
    tokens: int = 0
    positions: int = 0
    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> tuple[float, float]:
        """Seconds of a step, and the half of its 95 % interval."""
        mean = self.total / max(self.count, 1)
        variance = max(self.squares / max(self.count, 1) - mean**2, 0.0)
        return mean, 1.96 * (variance / max(self.count - 1, 1)) ** 0.5

    @property
    def key(self) -> tuple[int, int, int]:
        """By which steps are alike."""
        return self.decoding, self.drafted, self.prompt

    def add(self, other: Steps) -> None:
        """Count others of the same key."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_SUMS = tuple(each.name for each in dataclasses.fields(Steps))[3:]


def class_of_rows(count: int) -> int:
    """A number of draft tokens as steps are told apart by it: within an eighth from EXACT_ROWS on."""
    if count <= EXACT_ROWS:
        return count
    step = 1 << (count.bit_length() - 4)
    return count // step * step


def class_of_prompt(count: int) -> int:
    """A number of prompt rows as steps are told apart by it."""
    return 1 << (count.bit_length() - 1) if count else 0


def line(record: Begun | Answer) -> bytes:
    """A line of the file."""
    if isinstance(record, Begun):
        return _dumped({"format": FORMAT, "version": VERSION, **dataclasses.asdict(record)})
    return _dumped({"answer": {name: _short(value) for name, value in dataclasses.asdict(record).items()}})


def steps_line(since: float, until: float, steps: Sequence[Steps]) -> bytes:
    """The line of the steps between two times."""
    rows = [[_short(getattr(each, name)) for name in _NAMES] for each in steps]
    return _dumped({"steps": {"since": _short(since), "until": _short(until), "rows": rows}})


_NAMES = tuple(each.name for each in dataclasses.fields(Steps))


def begun_of(found: Fields) -> Begun:
    """The beginning of a run, from its line. Raises ConfigError."""
    if found.values.get("format") != FORMAT:
        raise ConfigError(f"{found.place}: it is no journal of a server. {REMEDY}")
    version = found.integer("version", low=1)
    if version != VERSION:
        newer = "Update forerun." if version > VERSION else "Begin a new one."
        raise ConfigError(f"{found.place}: it is of version {version}, but this forerun reads {VERSION}. {newer}")
    machine = found.fields("machine", None)
    return Begun(
        run=found.string("run"),
        started=found.string("started"),
        model=found.string("model"),
        number_format=found.string("number_format"),
        exact=found.flag("exact"),
        drafter=found.string("drafter"),
        num_draft_tokens=found.string("num_draft_tokens"),
        max_batch=found.integer("max_batch", low=1, high=_MOST_COUNT),
        machine={} if machine is None else machine.values,
    )


def answer_of(found: Fields) -> Answer:
    """An answer, from its line. Raises ConfigError."""
    values: dict[str, Any] = {}
    for each in dataclasses.fields(Answer):
        kind = str(each.type)
        if kind == "str":
            values[each.name] = found.string(each.name)
        elif kind == "bool":
            values[each.name] = found.flag(each.name)
        elif kind == "int":
            values[each.name] = found.integer(each.name, low=0, high=_MOST_COUNT)
        elif kind == "float":
            values[each.name] = found.number(each.name, low=0, high=_MOST_SECONDS)
        elif kind == "Sequence[int]":
            values[each.name] = tuple(found.list_of(each.name, int))
            if not all(0 <= count <= _MOST_COUNT for count in values[each.name]):
                raise found.wrong(each.name, f"whole numbers in 0..{_MOST_COUNT}")
        else:
            held = found.fields(each.name)
            values[each.name] = {name: held.integer(name, low=0, high=_MOST_COUNT) for name in held.values}
    return Answer(**values)


def steps_of(found: Fields) -> list[Steps]:
    """Steps, from their line. Raises ConfigError."""
    made = []
    for row in found.list_of("rows", list):
        if len(row) != len(_NAMES) or not all(_is_amount(each) for each in row):
            raise found.wrong("rows", f"rows of {len(_NAMES)} numbers of 0 or more")
        counts, seconds = row[: -len(_TIMES)], row[-len(_TIMES) :]
        made.append(Steps(*map(int, counts), *map(float, seconds)))
    return made


_TIMES = ("draft", "target", "verify", "total", "squares")


def _is_amount(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value <= _MOST_SUM


def _short(value: Any) -> Any:
    return float(f"{max(value, 0.0):.7g}") if isinstance(value, float) else value


def _dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
