"""The commands of a chat, typed where a message could be: a table of what each does and says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from forerun.cli.answers import cost, joined
from forerun.cli.chat.screen import Screen
from forerun.cli.chat.session import Session, Totals
from forerun.config import NO_DRAFTER
from forerun.drafters.table import DRAFTERS
from forerun.errors import ConfigError, SamplingError

_EMPTY = '""'


class Quit(Exception):
    """The chat is to end."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        argument: what stands for its argument in help; empty if it takes none.
        help: what it does.
        run: does it, and returns what is said of it.
    """

    argument: str
    help: str
    run: Callable[[Session, Screen, str], str]


def run_command(line: str, session: Session, screen: Screen) -> str:
    """Do what a line that begins with / says; what is to be said of it.

    Raises:
        ConfigError: there is no such command, or it takes no argument.
        DrafterError, ModelLoadError, SamplingError: its argument cannot be taken; nothing is changed.
        Quit: the chat is to end.
    """
    name, _, argument = line.removeprefix("/").partition(" ")
    name, argument = name.strip(), argument.strip()
    command = COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean /{close[0]}?" if close else "/help lists them."
        raise ConfigError(
            f'There is no command /{name[:40]}. {hint} A message that begins with / goes between two lines of """.'
        )
    if argument and not command.argument:
        raise ConfigError(f"/{name} takes no argument.")
    return command.run(session, screen, argument)


def _system(session: Session, screen: Screen, text: str) -> str:
    if not text:
        system = session.history.system
        return "there is no system message" if system is None else f"the system message is: {system}"
    session.history.system = None if text == _EMPTY else text
    return f"the system message is {'removed' if text == _EMPTY else 'set'}, from the next answer on"


def _drafter(session: Session, screen: Screen, text: str) -> str:
    if not text:
        return f"the drafter is {session.drafter}; there are {NO_DRAFTER}, {', '.join(DRAFTERS)}"
    session.change_drafter(text)
    return f"the drafter is {session.drafter}, K {session.llm.num_draft_tokens if session.llm.drafter_name else 0}"


def _temperature(session: Session, screen: Screen, text: str) -> str:
    if text:
        try:
            session.params = replace(session.params, temperature=float(text))
        except ValueError as error:
            if isinstance(error, SamplingError):
                raise
            raise SamplingError(f"temperature is {text[:40]!r}, but must be a number.") from None
    return f"the temperature is {session.params.temperature:g}"


def _drafts(session: Session, screen: Screen, text: str) -> str:
    screen.show_drafts(not screen.shows_drafts)
    return "accepted draft tokens are " + ("marked" if screen.shows_drafts else "no longer marked")


def _stats(session: Session, screen: Screen, text: str) -> str:
    from forerun.models import number_format

    figures = [[f"{name}: {first}", *rest] for name, (first, *rest) in _figures(session.totals)]
    lines = [joined(parts, screen.width) for parts in figures] or ["nothing was answered yet"]
    target, turns = session.llm.target, _counted(len(session.history.turns), "turn")
    lines.append(f"history: {turns}, {session.prompt_size} of {target.context_length} tokens")
    exact = "exact" if session.llm.exact else f"not exact: {target.exactness.reason}"
    weights = number_format(target)
    lines.append(f"target: {target.name}, {weights}, {exact}; drafter: {session.drafter}")
    return "\n".join(lines)


def _figures(by_drafter: Mapping[str, Totals]) -> Iterator[tuple[str, list[str]]]:
    """Drafter, and what its answers have cost."""
    for name, totals in by_drafter.items():
        parts = [f"{_counted(totals.num_answers, 'answer')}, {totals.num_tokens} tokens in {totals.seconds:.1f} s"]
        if totals.seconds:
            parts.append(f"{totals.num_tokens / totals.seconds:.1f} tokens/s with the prompts")
        yield name, parts + cost(totals.num_tokens, totals.num_forwards, totals.num_drafted, totals.num_accepted)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _reset(session: Session, screen: Screen, text: str) -> str:
    session.history.turns.clear()
    kept = "" if session.history.system is None else "; the system message stays"
    return f"what was said is forgotten{kept}"


def _help(session: Session, screen: Screen, text: str) -> str:
    shown = {f"/{name} {command.argument}".rstrip(): command.help for name, command in COMMANDS.items()}
    width = max(map(len, shown))
    return "\n".join([*(f"{usage:<{width}}  {about}" for usage, about in shown.items()), *KEYS])


def _quit(session: Session, screen: Screen, text: str) -> str:
    raise Quit


COMMANDS: Mapping[str, Command] = {
    "system": Command("TEXT", 'set the system message; "" removes it, without TEXT it is shown', _system),
    "drafter": Command("NAME[:options]", "change the drafter; target and chat stay", _drafter),
    "temperature": Command("X", "0 is greedy, above 0 divides the logits", _temperature),
    "drafts": Command("", "mark accepted draft tokens, or no longer", _drafts),
    "stats": Command("", "what the answers have cost, by drafter, and how full the context is", _stats),
    "reset": Command("", "forget what was said", _reset),
    "help": Command("", "this list", _help),
    "quit": Command("", "end the chat", _quit),
}
KEYS = (
    "Ctrl-C stops an answer and keeps the chat; at the prompt it ends the chat, as Ctrl-D does.",
    'A \\ at the end of a line, or """ before and after, makes a message of several lines.',
)
