"""A day of a coding agent: a conversation with tools over files of this package, replayed turn by turn.

The model answers every turn, but the conversation goes on with the written calls, so that every model and drafter gets
the same prompts. A restart is a new engine after the prefix cache is forgotten; the weights stay loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import forerun
from forerun.config import SamplingParams
from forerun.engine import LLM
from forerun.engine.chat_template import encode
from forerun.engine.opening import check_remembers
from forerun.lab.bench.prompts import BenchPrompt, check_lengths
from forerun.lab.bench.tables import Columns

PACKAGE = Path(forerun.__file__).parent
FILES = ("utils/tree.py", "utils/text_files.py", "utils/workloads.py")
"""What the agent edits, in four turns each: it reads, edits, runs the tests, which fail, and edits again."""
TURNS = 4 * len(FILES)
LINES = 60
"""Lines of a file that a turn reads."""
SYSTEM = 20_000
"""Characters of the system prompt: with the tools, 6,000 tokens of Qwen2.5-Coder's."""
RULES = """You are a coding agent in a terminal. You work in the folder of a Python package and may use the tools below.
- Read a file before you edit it. Keep its style, its names and its line length.
- Change as little as the task needs. Leave a comment only where the code cannot say why.
- Run the tests after every edit. If one fails, find the reason before you edit again.
- Never edit what you have not read, and never run a command that leaves the folder.
- Answer with a call of a tool until the task is done, then with one sentence.
The folder has these files, with their classes and functions:
"""
TASK = "The docstrings of these files should name what each function returns: " + ", ".join(FILES)
NEXT_TASK = "Say in the docstrings of these files which arguments each function takes: " + ", ".join(FILES)
"""Of the day after."""
_TOOLS: Mapping[str, tuple[str, Sequence[str]]] = {
    "read_file": ("Return lines of a file, with their numbers.", ("path", "first", "last")),
    "edit_file": ("Replace a text, which must occur once in the file, by another.", ("path", "old", "new")),
    "write_file": ("Write a file. What it held is lost.", ("path", "content")),
    "find": ("Return the lines of all files that match a regular expression.", ("pattern", "folder")),
    "run": ("Run a command in a shell; return its output and exit code.", ("command",)),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": {each: {"type": "string"} for each in fields},
                "required": fields,
            },
        },
    }
    for name, (about, fields) in _TOOLS.items()
]


def conversation(
    turns: int = TURNS, system: int = SYSTEM, lines: int = LINES, task: str = TASK
) -> list[list[dict[str, Any]]]:
    """Return the messages of every turn's request. system, lines: as SYSTEM and LINES."""
    outlines = []
    for path in sorted(PACKAGE.rglob("*.py")):
        names = re.findall(r"^(?:class|def) (\w+)", path.read_text(encoding="utf-8"), re.M)
        outlines.append(f"{path.relative_to(PACKAGE).as_posix()}: {', '.join(names)}")
    prompt = (RULES + "\n".join(outlines))[:system]
    history: list[dict[str, Any]] = [{"role": "system", "content": prompt}, {"role": "user", "content": task}]
    made = []
    for turn in range(turns):
        made.append([*history])
        name, arguments, result = _call(FILES[turn // 4 % len(FILES)], turn % 4, lines)
        call = {"id": f"call{turn:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        history.append({"role": "assistant", "content": "", "tool_calls": [call]})
        history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return made


def _call(path: str, step: int, lines: int) -> tuple[str, dict[str, str], str]:
    """Return the tool, the arguments and the result of one of the four steps of a file."""
    text = (PACKAGE / path).read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(text) if line.startswith(("def ", "class ")))
    part = text[begin : begin + lines // 3]
    if step == 0:
        numbered = [f"{number}: {line}" for number, line in enumerate(text[:lines], 1)]
        return "read_file", {"path": path, "first": "1", "last": str(lines)}, "\n".join(numbered)
    if step == 2:
        failed = [f">   {line}" for line in part[:6]]
        output = ["=== FAILURES ===", *part, *failed, f"E   AssertionError: {path}:{begin + 1}", "1 failed, 41 passed"]
        return "run", {"command": f"python -m pytest -x -k {Path(path).stem}"}, "\n".join(output)
    new = [part[0], *(f"{line}  # step {step}" if '"""' in line else line for line in part[1:4])]
    diff = [f"-{line}" for line in part[:4]] + [f"+{line}" for line in new] + [f" {line}" for line in part[4:]]
    return "edit_file", {"path": path, "old": "\n".join(part[:4]), "new": "\n".join(new)}, "\n".join(diff)


def encode_turns(llm: LLM, messages: Sequence[Sequence[dict[str, Any]]], max_tokens: int) -> list[BenchPrompt]:
    """Encode every turn. Raises PromptError where the model's template has no tools, ConfigError beyond its context."""
    target = llm.target
    made = []
    for turn, each in enumerate(messages, 1):
        ids = encode(each, llm.tokenizer, target.name, {"tools": TOOLS}, model=target)
        made.append(BenchPrompt(f"turn {turn}", "agent", ids))
    check_lengths(made, max_tokens, target.context_length, target.name)
    return made


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """One answered turn.

    Attributes:
        name: its number, and what was restarted.
        prompt: tokens of the prompt. own: those that the turn before did not have.
        computed: tokens of the prompt that were in no cache. read: those that came from the disk.
        first_token: seconds to it. seconds: of the whole answer.
        num_forwards: steps that gave tokens.
        token_ids: the answer.
    """

    name: str
    prompt: int
    own: int
    computed: int
    read: int
    first_token: float
    seconds: float
    num_forwards: int
    token_ids: Sequence[int]


def replay_turns(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[AnsweredTurn]:
    """Answer the turns one after the other, at temperature 0."""
    turns = []
    before = 0
    for each in prompts:
        answer: Any = llm.generate(each.token_ids, SamplingParams(temperature=0, max_tokens=max_tokens))
        length = len(each.token_ids)
        stats = answer.stats
        turns.append(
            AnsweredTurn(
                each.name,
                length,
                length - before,
                length - stats.num_cached_tokens,
                stats.num_read_tokens,
                stats.time_first_token,
                stats.time_total,
                stats.num_forwards,
                answer.token_ids,
            )
        )
        before = length
    return turns


@dataclass(frozen=True, slots=True)
class DrafterOverTurns:
    """A drafter over all turns. over_plain: its speed by that of plain decoding. same: its answers are plain's."""

    drafter: str
    tokens_per_forward: float
    tokens_per_second: float
    over_plain: float
    same: bool

    @classmethod
    def of(cls, drafter: str, turns: Sequence[AnsweredTurn], plain: Sequence[AnsweredTurn]) -> DrafterOverTurns:
        """Summarize the turns beside those of plain decoding."""
        num_tokens = sum(len(turn.token_ids) for turn in turns)
        same = [turn.token_ids for turn in turns] == [turn.token_ids for turn in plain]
        speed = _speed(turns)
        forwards = sum(turn.num_forwards for turn in turns)
        return cls(drafter, num_tokens / forwards, speed, speed / _speed(plain), same)


def _speed(turns: Sequence[AnsweredTurn]) -> float:
    """Return the tokens per second after the first of each answer."""
    return sum(len(turn.token_ids) - 1 for turn in turns) / sum(turn.seconds - turn.first_token for turn in turns)


@dataclass(frozen=True, slots=True)
class RememberingDay:
    """A drafter on the second day, without what was answered on the first and with it.

    Attributes:
        without, remembering: its figures.
        over_without: its speed with the answers of the first day by that without.
    """

    without: DrafterOverTurns
    remembering: DrafterOverTurns
    over_without: float


RESTART_COLUMNS: Columns[AnsweredTurn] = {
    "turn": lambda row: row.name,
    "prompt tokens": lambda row: str(row.prompt),
    "computed": lambda row: str(row.computed),
    "from disk": lambda row: str(row.read),
    "first token, s": lambda row: f"{row.first_token:.2f}",
}
TURN_COLUMNS: Columns[AnsweredTurn] = {
    **{name: cell for name, cell in RESTART_COLUMNS.items() if name != "from disk"},
    "new": lambda row: str(row.own),
}
DRAFTER_COLUMNS: Columns[DrafterOverTurns] = {
    "drafter": lambda row: row.drafter,
    "tokens a forward": lambda row: f"{row.tokens_per_forward:.2f}",
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "over plain": lambda row: f"{row.over_plain:.2f}",
    "same answers": lambda row: "yes" if row.same else "no",
}


DAY_COLUMNS: Columns[RememberingDay] = {
    "drafter": lambda row: row.without.drafter,
    "tokens a forward": lambda row: f"{row.without.tokens_per_forward:.2f}",
    "remembering": lambda row: f"{row.remembering.tokens_per_forward:.2f}",
    "tokens/s": lambda row: f"{row.without.tokens_per_second:.1f}",
    "remembering, tokens/s": lambda row: f"{row.remembering.tokens_per_second:.1f}",
    "over without": lambda row: f"{row.over_without:.2f}",
    "same answers": lambda row: "yes" if row.without.same and row.remembering.same else "no",
}


def check_second_day(drafters: Mapping[str, str], target: str) -> None:
    """Raise ConfigError if one of a target's drafters copies nothing from answers of the past."""
    for spec in drafters.values():
        check_remembers(spec, target, "--second-day is given")


def measure_second_day(
    plain: LLM,
    drafters: Mapping[str, str],
    first: Sequence[BenchPrompt],
    second: Sequence[BenchPrompt],
    max_tokens: int,
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
) -> list[RememberingDay]:
    """Return what each drafter does on the second day, without the answers of the first and with them.

    Args:
        plain: the engine of the target alone, which keeps prefixes, so that prompts are computed once.
        first, second: the turns of each day.
        folder: for the files of answers.

    Raises:
        ConfigError: as `check_second_day`.
    """
    say(f"{len(second)} turns of the second day, plain decoding")
    base = replay_turns(plain, second, max_tokens)
    rows = []
    for number, (name, spec) in enumerate(drafters.items()):

        def replayed(prompts: Sequence[BenchPrompt], file: Path | None, about: str) -> list[AnsweredTurn]:
            say(f"{about} with {name}")  # noqa: B023 - called in this round
            llm = LLM(plain.target, spec, tokenizer=plain.tokenizer, prefix_reuse="on", remember=file)  # noqa: B023
            with llm:
                if llm.engine.remembered is not None:
                    llm.engine.remembered.settle()
                return replay_turns(llm, prompts, max_tokens)

        file = folder / f"answers-{number}"
        without = DrafterOverTurns.of(name, replayed(second, None, "the second day alone"), base)
        replayed(first, file, "the first day")
        remembering = DrafterOverTurns.of(name, replayed(second, file, "the second day after the first"), base)
        ratio = remembering.tokens_per_second / without.tokens_per_second
        rows.append(RememberingDay(without, remembering, ratio))
    return rows


def measure_agent(
    plain: LLM,
    drafters: Mapping[str, str],
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[AnsweredTurn], list[DrafterOverTurns], list[AnsweredTurn]]:
    """Return the turns of the first drafter, all drafters, and what restarts cost.

    The first drafter computes the prompts; the others, each new, find them in memory.

    Args:
        plain: the engine of the target alone, which keeps prefixes.
        folder: for the prompts on disk.
    """

    def opened(spec: str | None, prompt_cache: Path | None) -> LLM:
        return LLM(plain.target, spec, tokenizer=plain.tokenizer, prefix_reuse="on", prompt_cache=prompt_cache)

    replayed: dict[str, list[AnsweredTurn]] = {}
    for name, spec in drafters.items():
        say(f"{len(prompts)} turns with {name}")
        with opened(spec, None if replayed else folder) as llm:
            replayed[name] = replay_turns(llm, prompts, max_tokens)
    say("plain decoding")
    base = replay_turns(plain, prompts, max_tokens)
    rows = [
        DrafterOverTurns.of("none", base, base),
        *(DrafterOverTurns.of(name, each, base) for name, each in replayed.items()),
    ]
    restarts = []
    for prompt, kept in product((prompts[0], prompts[-1]), (None, folder)):
        name = f"{prompt.name}, {'with' if kept else 'without'} the disk"
        say(name)
        plain.reset_prefix_cache()
        with opened(None, kept) as llm:
            restarts += replay_turns(llm, [BenchPrompt(name, "agent", prompt.token_ids)], max_tokens)
    return next(iter(replayed.values())), rows, restarts
