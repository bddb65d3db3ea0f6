"""`forerun chat`: its flags, the model it takes, and the loop over what is typed or piped in."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from forerun.cli import options
from forerun.cli.answers import cost, joined, summary
from forerun.cli.chat_session import History, Screen, Session, Totals
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED, choose_drafter, open_llm
from forerun.cli.options import LLMOptions
from forerun.cli.output import memory_told, unicode_text
from forerun.config import NO_DRAFTER, SamplingParams
from forerun.drafters.registry import DRAFTERS
from forerun.errors import ConfigError, DeviceError, ForerunError, ModelLoadError, PromptError, SamplingError
from forerun.utils import fetch as store

# The commands of a chat, typed where a message could be: a table of what each does and says.

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


# Messages as people type them, and as a pipe brings them.

PROMPT = "> "
MORE = "… "
_QUOTES = '"""'


@dataclass(frozen=True, slots=True)
class Entered:
    """What was typed.

    Attributes:
        is_command: it begins with / and was not put between quotation marks.
    """

    text: str
    is_command: bool = False


def read_entry(ask: Callable[[str], str]) -> Entered:
    """One message or command, of one line or several.

    Args:
        ask: prints a prompt and returns the next line; raises EOFError at the end of input, KeyboardInterrupt at
            Ctrl-C.

    Raises:
        EOFError, KeyboardInterrupt: in the first line. In a later one, the end of input ends the message, and Ctrl-C
            forgets it: what is returned is empty.
    """
    line = ask(PROMPT)
    quoted = line.lstrip().startswith(_QUOTES)
    lines = [line.lstrip().removeprefix(_QUOTES) if quoted else line]
    try:
        while not lines[-1].rstrip().endswith(_QUOTES) if quoted else lines[-1].endswith("\\"):
            if not quoted:
                lines[-1] = lines[-1][:-1]
            lines.append(ask(MORE))
        if quoted:
            lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    except EOFError:
        pass
    except KeyboardInterrupt:
        return Entered("")
    text = "\n".join(lines)
    return Entered(text.strip("\n")) if quoted else Entered(text, text.startswith("/"))


def terminal_line(prompt: str) -> str:
    """The next line that is typed. With readline, where Python has it, it can be edited, and lines of this chat are
    found again with the arrow keys; they are kept in memory alone.

    Raises:
        EOFError, KeyboardInterrupt: Ctrl-D, Ctrl-C.
        PromptError: it is not text.
    """
    try:
        if sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - input() uses it from then on
            return input(prompt)
        sys.stderr.write(prompt)  # standard output takes answers alone
        sys.stderr.flush()
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise PromptError(f"What was typed is not UTF-8 text: {error.reason}.") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def pipe_lines() -> Iterator[str]:
    """The lines of standard input, each a message; empty ones are passed over.

    Raises:
        PromptError: a line is not UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"Line {number} of standard input is not UTF-8 text: {error.reason}. Convert it first."
            ) from None
        if text.strip():
            yield text


CHAT_MODEL = store.names()[0]
"""The model of a chat that names none."""
_DEFAULTS = SamplingParams(temperature=0.7, max_tokens=512)
_TYPED = ("temperature", "top_k", "top_p", "max_tokens", "seed")
_NOT_IN_CHATS = (
    "n",
    "logprobs",
    "prompt_logprobs",
    "prediction",
    "drafter",
    "num_draft_tokens",
    "tenant",
    "priority",
    "grammar",
)


@with_flags
def chat(
    *,
    named: Annotated[
        str | None,
        typer.Argument(
            help="A model with a chat template: 'smollm2', a folder, a GGUF file or a hub id.",
            metavar="MODEL",
            show_default=f"{CHAT_MODEL}, once it is fetched",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The same as an option.", metavar="MODEL")] = None,
    drafter: options.DrafterName = None,
    settings: Annotated[LLMOptions, Flags(typed=options.LLM_TYPED)],
    system: options.System = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark the tokens that a draft had right, on a terminal.")
    ] = False,
    params: Annotated[SamplingParams, Flags(base=_DEFAULTS, leave_out=_NOT_IN_CHATS, typed=_TYPED, panel="Sampling")],
) -> None:
    """Chat with a model; on a pipe, every line is a message, and standard output gets the answers alone."""
    screen = Screen()
    screen.show_drafts(show_drafts)
    if model is not None and named is not None:
        raise ConfigError(f"The model is given twice: {model!r}, and {named!r} by --model. Give it once.")
    name = model or named or default_model()
    chosen = choose_drafter(drafter)
    history = History(None if system is None else unicode_text(system, "--system"))
    screen.note(f"forerun: loading {name}")
    with memory_told(lambda line: screen.note(f"forerun: {line}")):
        llm = open_llm(name, chosen, chat=True, **asdict(settings))
    session = Session(llm, params, settings, history)
    if sys.stdin.isatty():
        screen.note(f"{name}, drafter {session.drafter}. /help lists the commands, Ctrl-D ends the chat.")
        converse(session, screen, lambda: read_entry(terminal_line))
    else:
        answer_lines(session, screen)


def default_model() -> str:
    """The model of a chat that names none. Raises ModelLoadError if it is not fetched."""
    if store.path_of(CHAT_MODEL) is None:
        raise ModelLoadError(
            f"There is no model to chat with: {CHAT_MODEL} is not fetched. Fetch it (forerun fetch {CHAT_MODEL}), or "
            "name a model with a chat template (forerun chat MODEL)."
        )
    return CHAT_MODEL


def converse(session: Session, screen: Screen, read: Callable[[], Entered]) -> None:
    """Answer what is typed until the end of input, Ctrl-C at the prompt, or /quit; errors are told.

    read: raises EOFError and KeyboardInterrupt as `read_entry`.

    Raises:
        DeviceError: the device that computes it has failed.
    """
    while True:
        try:
            entered = read()
        except (EOFError, KeyboardInterrupt):
            screen.note("")  # the prompt's line is not ended
            return
        except ForerunError as error:
            screen.note(f"forerun: {error}")
            continue
        try:
            if entered.is_command:
                screen.note(run_command(entered.text, session, screen))
            elif entered.text.strip():
                say(session, screen, entered.text)
        except Quit:
            return
        except DeviceError:  # nothing more can be computed
            raise
        except ForerunError as error:
            screen.note(f"forerun: {error}")
        except KeyboardInterrupt:
            screen.note("interrupted")


def answer_lines(session: Session, screen: Screen) -> None:
    """Answer each line of standard input, until its end, Ctrl-C, or the first one that cannot be answered.

    Raises:
        ForerunError: that one's.
    """
    try:
        stopped = any(say(session, screen, text) for text in pipe_lines())
    except KeyboardInterrupt:
        stopped = True
    if stopped:
        raise typer.Exit(INTERRUPTED)


def say(session: Session, screen: Screen, text: str) -> bool:
    """One message and its answer, with a line of statistics; whether Ctrl-C ended it."""
    try:
        answer = session.answer(text, lambda chunk: screen.chunk(session.llm.tokenizer, chunk), screen.note)
    except ForerunError:
        screen.end_line()
        raise
    screen.end_answer()
    if not answer.kept:
        screen.note("interrupted before the first word: the message is not part of the chat")
        return True
    screen.note(summary({0: answer.output}, answer.times, session.llm.drafter_name, answer.interrupted))
    return answer.interrupted
