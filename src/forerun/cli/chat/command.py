"""`forerun chat`: its flags, the model it takes, and the loop over what is typed or piped in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from forerun.cli import options
from forerun.cli.answers import summary
from forerun.cli.chat.commands import Quit, run_command
from forerun.cli.chat.history import History
from forerun.cli.chat.reading import Entered, pipe_lines, read_entry, terminal_line
from forerun.cli.chat.screen import Screen
from forerun.cli.chat.session import Session
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED, choose_drafter, open_llm
from forerun.cli.memory_line import memory_told
from forerun.cli.options import LLMOptions
from forerun.cli.text_argument import unicode_text
from forerun.config import SamplingParams
from forerun.errors import ConfigError, DeviceError, ForerunError, ModelLoadError
from forerun.fetch import store

CHAT_MODEL = store.names()[0]
"""The model of a chat that names none."""
_DEFAULTS = SamplingParams(temperature=0.7, max_tokens=512)
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
    drafter: Annotated[
        str | None,
        typer.Option(help=options.DRAFTER_HELP, metavar="DRAFTER", show_default=options.DEFAULT_DRAFTER_TEXT),
    ] = None,
    settings: Annotated[LLMOptions, Flags()],
    system: options.System = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark the tokens that a draft had right, on a terminal.")
    ] = False,
    params: Annotated[SamplingParams, Flags(base=_DEFAULTS, leave_out=_NOT_IN_CHATS, panel="Sampling")],
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
