"""`forerun chat`: flags and default model, the loop over typed or piped messages, and the commands of a chat."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Annotated

import typer

from forerun.cli import chat_session, options
from forerun.cli.answers import acceptance_text, stderr_lines, summary
from forerun.cli.chat_session import ChatAnswer, History, Screen, Session
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED, open_llm
from forerun.cli.options import LLMOptions
from forerun.cli.output import log_memory_plan, unicode_text
from forerun.config import AUTO, NO_DRAFTER, SamplingParams
from forerun.drafters.registry import DRAFTERS
from forerun.errors import ConfigError, DeviceError, ForerunError, ModelLoadError, PromptError, SamplingError
from forerun.utils import fetch as store

CHAT_MODEL = store.fetchable_names()[0]
"""The model of a chat that names none."""
_DEFAULTS = SamplingParams(temperature=options.TEMPERATURE, max_tokens=512)
_TYPED = ("temperature", "top_k", "top_p", "max_tokens", "seed")
_NOT_IN_CHATS = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
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
    ctx: typer.Context,
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
    draft_model: options.DraftModelName = None,
    draft_vocab: options.DraftVocab = None,
    settings: Annotated[LLMOptions, Flags(leave_out=("acceptance", *options.OF_SERVERS), typed=options.LLM_TYPED)],
    system: options.System = None,
    chat_template: options.ChatTemplate = None,
    threads: options.Threads = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark the tokens that a draft had right, on a terminal.")
    ] = False,
    params: Annotated[SamplingParams, Flags(base=_DEFAULTS, leave_out=_NOT_IN_CHATS, typed=_TYPED, panel="Sampling")],
) -> None:
    """Chat with a model; on a pipe, every line is a message, and standard output gets the answers alone, each with an
    empty line after it.

    Sampling options that are not given are the model's own, where its files have any.
    """
    screen = Screen()
    screen.show_drafts(show_drafts)
    if model is not None and named is not None:
        raise ConfigError(f"The model is given twice: {model!r}, and {named!r} by --model. Give it once.")
    name = model or named or _chat_model()
    history = History(None if system is None else unicode_text(system, "--system"))
    template = options.template_text(chat_template)
    screen.note(f"forerun: loading {name}")
    options.set_threads(threads)
    with log_memory_plan(lambda line: screen.note(f"forerun: {line}")):
        chosen = options.named_drafter(drafter, draft_model, draft_vocab) or AUTO
        llm = open_llm(name, chosen, chat=True, chat_template=template, **asdict(settings))
    params, own = options.own_sampling(ctx, params, llm.target)
    if own is not None:
        screen.note(f"forerun: {own}")
    session = Session(llm, params, settings, history)
    if sys.stdin.isatty():
        screen.note(f"{name}, drafter {session.drafter}. /help lists the commands, Ctrl-D ends the chat.")
        converse(session, screen, lambda: read_entry(terminal_line))
    else:
        answer_lines(session, screen)


def _chat_model() -> str:
    """Return the model of a chat that names none. Raises ModelLoadError if it is not fetched."""
    if store.path_of(CHAT_MODEL) is None:
        raise ModelLoadError(
            f"There is no model to chat with: {CHAT_MODEL} is not fetched. Fetch it (forerun fetch {CHAT_MODEL}), or "
            "name a model with a chat template (forerun chat MODEL)."
        )
    return CHAT_MODEL


def converse(session: Session, screen: Screen, read: Callable[[], tuple[str, bool]]) -> None:
    """Answer typed messages until the end of input, Ctrl-C at the prompt, or /quit; print errors and continue.

    Args:
        read: as `read_entry`; raises EOFError and KeyboardInterrupt.

    Raises:
        DeviceError: the device that computes the model has failed.
    """
    while True:
        text: str | None = None
        try:
            text, is_command = read()
            if is_command:
                screen.note(run_command(text, session, screen))
            elif text.strip():
                _answer_message(session, screen, text)
        except EOFError:
            screen.note("")  # the prompt's line is not ended
            return
        except DeviceError:  # nothing more can be computed
            raise
        except ForerunError as error:
            screen.note(f"forerun: {error}")
        except KeyboardInterrupt:
            screen.note("" if text is None else "interrupted")
            if text is None:
                return


def answer_lines(session: Session, screen: Screen) -> None:
    """Answer each line of standard input, until its end, Ctrl-C, or the first one that cannot be answered.

    Raises:
        ForerunError: the error of that line.
    """
    try:
        stopped = any(_answer_message(session, screen, text) for text in pipe_lines())
    except KeyboardInterrupt:
        stopped = True
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _answer_message(session: Session, screen: Screen, text: str) -> bool:
    """Answer one message and print a line of statistics. Returns whether Ctrl-C ended the answer."""
    try:
        answer = session.answer(text, lambda chunk: screen.chunk(session.llm.tokenizer, chunk), screen.note)
    except ForerunError:
        screen.end_line()
        raise
    screen.end_answer()
    if answer.kept:
        screen.note(summary({0: answer.output}, answer.times, session.llm.drafter_name, answer.interrupted))
    else:
        screen.note("interrupted before the first word: the message is not part of the chat")
    return answer.interrupted


# Reading: messages as people type them, and the lines of a pipe.

PROMPT = "> "
MORE = "… "
_QUOTES = '"""'


def read_entry(ask: Callable[[str], str]) -> tuple[str, bool]:
    """Read one message or command, of one line or several.

    Args:
        ask: prints a prompt and returns the next line; raises EOFError at the end of input, KeyboardInterrupt at
            Ctrl-C.

    Returns:
        The text, and whether it is a command: it begins with / and is not between quotation marks.

    Raises:
        EOFError, KeyboardInterrupt: in the first line. In a later one, the end of input ends the message, and Ctrl-C
            discards it: the returned text is empty.
    """
    text = ask(PROMPT)
    quoted = text.lstrip().startswith(_QUOTES)
    text = text.lstrip().removeprefix(_QUOTES) if quoted else text
    try:
        while not text.rstrip().endswith(_QUOTES) if quoted else text.endswith("\\"):
            text = f"{text if quoted else text[:-1]}\n{ask(MORE)}"
    except EOFError:
        pass
    except KeyboardInterrupt:
        return "", False
    if quoted:
        return text.rstrip().removesuffix(_QUOTES).strip("\n"), False
    return text.removesuffix("\\"), text.startswith("/")


def terminal_line(prompt: str) -> str:
    """Read the next typed line; with readline, where Python has it, it can be edited, and recalled with arrow keys.

    Raises:
        EOFError, KeyboardInterrupt: Ctrl-D, Ctrl-C.
        PromptError: it is not UTF-8.
    """
    try:
        if sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - input() uses it from then on
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # standard output gets the answers alone
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise PromptError(f"The typed line is not UTF-8 text: {error.reason}.") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def pipe_lines() -> Iterator[str]:
    """Yield the lines of standard input, each a message; skip empty ones.

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


# Commands: lines that begin with /.

COMMANDS: Mapping[str, tuple[str, str]] = {
    "system": ("TEXT", 'set the system message; "" removes it, without TEXT it is shown'),
    "drafter": ("NAME[:options]", "change the drafter; target and chat stay"),
    "temperature": ("X", "0 is greedy, above 0 divides the logits"),
    "drafts": ("", "mark accepted draft tokens, or no longer"),
    "stats": ("", "what the answers have cost, by drafter, and how full the context is"),
    "reset": ("", "forget the chat so far"),
    "help": ("", "this list"),
    "quit": ("", "end the chat"),
}
"""Name -> (argument, empty if it takes none; help)."""
KEYS = (
    "Ctrl-C stops an answer and keeps the chat; at the prompt it ends the chat, as Ctrl-D does.",
    'A \\ at the end of a line, or """ before and after, makes a message of several lines.',
)


def run_command(line: str, session: Session, screen: Screen) -> str:
    """Run a command and return its message.

    Raises:
        ConfigError: there is no such command, or it takes no argument.
        DrafterError, ModelLoadError, SamplingError: its argument is invalid; nothing is changed.
        EOFError: the command ends the chat.
    """
    name, _, text = (part.strip() for part in line.removeprefix("/").partition(" "))
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean /{close[0]}?" if close else "/help lists them."
        raise ConfigError(
            f'There is no command /{name[:40]}. {hint} A message that begins with / goes between two lines of """.'
        )
    if text and not COMMANDS[name][0]:
        raise ConfigError(f"/{name} takes no argument.")
    history = session.history
    match name:
        case "system" if not text:
            return (
                "there is no system message" if history.system is None else f"the system message is: {history.system}"
            )
        case "system":
            history.system = None if text == '""' else text
            return f"the system message is {'set' if history.system else 'removed'}, from the next answer on"
        case "drafter" if not text:
            return f"the drafter is {session.drafter}; there are {NO_DRAFTER}, {', '.join(DRAFTERS)}"
        case "drafter":
            session.llm = chat_session.open_beside(session.llm, text, session.settings)
            count = session.llm.num_draft_tokens if session.llm.drafter_name else 0
            return f"the drafter is {session.drafter}, K {count}"
        case "temperature":
            session.params = replace(session.params, temperature=_number(text)) if text else session.params
            return f"the temperature is {session.params.temperature:g}"
        case "drafts":
            screen.show_drafts(not screen.shows_drafts)
            return "accepted draft tokens are " + ("marked" if screen.shows_drafts else "no longer marked")
        case "stats":
            return _stats(session)
        case "reset":
            history.turns.clear()
            return "the chat is empty" + ("" if history.system is None else "; the system message stays")
        case "help":
            usages = {f"/{each} {argument}": about for each, (argument, about) in COMMANDS.items()}
            return "\n".join(
                [*(f"{usage:<{max(map(len, usages))}}  {about}" for usage, about in usages.items()), *KEYS]
            )
    raise EOFError


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SamplingError(f"temperature is {text[:40]!r}, but must be a number.") from None


def _stats(session: Session) -> str:
    from forerun.models import number_format

    lines = [_figures(name, answers) for name, answers in session.answers.items()] or ["there are no answers yet"]
    target = session.llm.target
    turns = session.history.turns
    size = session.count(session.history.messages()) if turns else 0
    lines.append(f"history: {_counted(len(turns), 'turn')}, {size} of {target.context_length} tokens")
    lines.append(f"target: {target.name}, {number_format(target)}, {target.exactness}; drafter: {session.drafter}")
    return "\n".join(lines)


def _figures(drafter: str, answers: Sequence[ChatAnswer]) -> str:
    outputs = [each.output for each in answers]
    seconds = sum(each.times.total for each in answers)
    tokens = sum(len(each.token_ids) for each in outputs)
    stats = [each.stats for each in outputs if each.stats]
    return stderr_lines(
        [
            f"{drafter}: {_counted(len(answers), 'answer')}, {tokens} tokens in {seconds:.1f} s",
            *([f"{tokens / seconds:.1f} tokens/s with the prompts"] if seconds else []),
            *acceptance_text(
                tokens,
                sum(each.num_forwards for each in outputs),
                sum(each.num_draft_tokens for each in stats),
                sum(each.num_accepted_tokens for each in stats),
            ),
        ]
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
