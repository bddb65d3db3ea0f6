"""`forerun chat`: flags and default model, and the loop over typed or piped messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from forerun.cli import options
from forerun.cli.chat import conversations
from forerun.cli.chat.screen import Screen, silent_keys, visible
from forerun.cli.chat.session import History, Session, answer_message, counted
from forerun.cli.chat.slash_commands import NOT_IN_CHATS, Chat, run_command
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED, open_llm
from forerun.cli.options import LLMOptions
from forerun.cli.output import log_memory_plan, unicode_text
from forerun.config import AUTO, SamplingParams
from forerun.errors import DeviceError, ForerunError, ModelLoadError, PromptError
from forerun.utils import fetch as store

CHAT_MODEL = store.fetchable_names()[0]
"""The model of a chat that names none."""
_DEFAULTS = SamplingParams(temperature=options.TEMPERATURE, max_tokens=512)
_TYPED = ("temperature", "top_k", "top_p", "max_tokens", "seed")
LEAVE = "Ctrl-C once more, or Ctrl-D, ends the chat."


@with_flags
def chat(
    *,
    ctx: typer.Context,
    model: Annotated[
        str | None,
        options.model_argument(
            "A model with a chat template: 'smollm2', a folder, a GGUF file, a hub id, or a name of `forerun models`.",
            f"{CHAT_MODEL}, once it is fetched",
        ),
    ] = None,
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
    continue_: Annotated[bool, typer.Option("--continue", help="Go on with the chat that was kept last.")] = False,
    list: Annotated[bool, typer.Option("--list", help="List the chats that were kept, and leave.")] = False,  # noqa: A002
    no_history: Annotated[bool, typer.Option("--no-history", help="Keep neither this chat nor what is typed.")] = False,
    params: Annotated[SamplingParams, Flags(base=_DEFAULTS, leave_out=NOT_IN_CHATS, typed=_TYPED, panel="Sampling")],
) -> None:
    """Chat with a model; on a pipe, every line is a message, and standard output gets the answers alone, each with an
    empty line after it.

    Sampling options that are not given are the model's own, where its files have any.
    """
    if list:
        for line in conversations.listed():
            typer.echo(visible(line))
        return
    screen = Screen()
    screen.show_drafts(show_drafts)
    last = conversations.last_conversation() if continue_ else None
    name = model or (last.model if last is not None else _chat_model())
    history = History() if last is None else last.history
    if system is not None:
        history.system = unicode_text(system, "--system")
    template = options.template_text(chat_template)
    screen.note(f"forerun: loading {name}")
    options.set_threads(threads)
    with log_memory_plan(lambda line: screen.note(f"forerun: {line}")):
        chosen = options.named_drafter(drafter, draft_model, draft_vocab) or AUTO
        llm = open_llm(name, chosen, chat=True, chat_template=template, **asdict(settings))
    params, own = options.own_sampling(ctx, params, llm.target)
    if own is not None:
        screen.note(f"forerun: {own}")
    _begin(Chat(Session(llm, params, settings, history), screen, name), last, keeps=not no_history)


def _begin(chat: Chat, last: conversations.Conversation | None, *, keeps: bool) -> None:
    """Answer what is typed or piped in.

    Args:
        last: the chat that goes on.
        keeps: the chat, and what is typed, for the next one; of a pipe, only what goes on.
    """
    is_typed = sys.stdin.isatty()
    if keeps and (is_typed or last is not None):
        chat.keeper = conversations.Keeper(conversations.chats_folder(), None if last is None else last.path)
    if not is_typed:
        answer_lines(chat)
        return
    from forerun.cli.chat.prompt import Prompt, typed_history

    note = chat.screen.note
    note(f"{chat.model}, drafter {chat.session.drafter}. /help lists the commands, Ctrl-D ends the chat.")
    if last is not None:
        note(f"going on: {last.title} ({counted(len(last.history.turns), 'turn')})")
    folder = conversations.state_folder() if keeps else None
    path = None if folder is None else folder / "typed"
    converse(chat, Prompt(typed_history(path, note), note).read)


def _chat_model() -> str:
    """Return the model of a chat that names none. Raises ModelLoadError if it is not fetched."""
    if store.path_of(CHAT_MODEL) is None:
        raise ModelLoadError(
            f"There is no model to chat with: {CHAT_MODEL} is not fetched. Fetch it (forerun fetch {CHAT_MODEL}), or "
            "name a model with a chat template (forerun chat MODEL)."
        )
    return CHAT_MODEL


def converse(chat: Chat, read: Callable[[str], tuple[str, bool]]) -> None:
    """Answer what is typed until the end of input, Ctrl-C twice, or /exit; print errors and continue.

    Args:
        read: takes the text that stands there already, and returns what was typed and whether it is a command; raises
            EOFError, and KeyboardInterrupt where nothing was typed.

    Raises:
        DeviceError: the device that computes the model has failed.
    """
    session = chat.session
    is_leaving = False
    while True:
        text: str | None = None
        draft = session.draft
        session.draft = ""
        try:
            text, is_command = read(draft)
            is_leaving = False
            with silent_keys():
                _take(chat, text, is_command=is_command)
        except EOFError:
            chat.screen.note("")  # the prompt's line is not ended
            return
        except DeviceError:  # nothing more can be computed
            raise
        except ForerunError as error:
            chat.screen.note(f"forerun: {error}")
        except KeyboardInterrupt:
            if text is None and is_leaving:
                return
            is_leaving = text is None
            chat.screen.note(LEAVE if is_leaving else "interrupted")
        chat.keep()


def _take(chat: Chat, text: str, *, is_command: bool) -> None:
    """Answer a message or run a command. Raises ForerunError, EOFError and KeyboardInterrupt as these do."""
    session = chat.session
    if text.strip() and not is_command:
        answer_message(session, chat.screen, text)
        return
    session.replaces = False
    if is_command and (said := run_command(text, chat)):
        chat.screen.note(said)


def answer_lines(chat: Chat) -> None:
    """Answer each line of standard input, until its end, Ctrl-C, or the first one that cannot be answered.

    Raises:
        ForerunError: the error of that line.
    """
    stopped = False
    try:
        for text in pipe_lines():
            stopped = answer_message(chat.session, chat.screen, text)
            chat.keep()
            if stopped:
                break
    except KeyboardInterrupt:
        stopped = True
    if stopped:
        raise typer.Exit(INTERRUPTED)


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
