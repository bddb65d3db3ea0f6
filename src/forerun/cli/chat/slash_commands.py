"""The commands of a chat: lines that begin with /."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from forerun.cli.answers import acceptance_text, stderr_lines
from forerun.cli.chat import session as chat_session
from forerun.cli.chat.conversations import Conversation, Keeper, chats_folder, find_file, save
from forerun.cli.chat.screen import Screen
from forerun.cli.chat.session import ChatAnswer, History, Session, answer_message, counted
from forerun.cli.flags import Flag
from forerun.config import NO_DRAFTER, SamplingParams
from forerun.drafters.registry import DRAFTERS
from forerun.errors import ConfigError, ForerunError
from forerun.utils.fields import described
from forerun.utils.habits import HABITS, hint
from forerun.utils.json_file import read_bytes

NOT_IN_CHATS = (
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
SETTINGS = {name: each for name, each in described(SamplingParams).items() if each.number and name not in NOT_IN_CHATS}
"""Sampling options that /set sets."""
SWITCHES = ("think", "markdown", "drafts")
_ON = ("on", "off")
_MOST_FILE = 1 << 24
"""Bytes of a file that /read takes: more than any context holds."""


@dataclass
class Chat:
    """What commands work on.

    Attributes:
        model: as it was named.
        own: the file that the chat was saved to or loaded from.
    """

    session: Session
    screen: Screen
    model: str = ""
    keeper: Keeper = field(default_factory=Keeper)
    own: Path | None = None

    def keep(self) -> None:
        """Keep the chat if it has changed."""
        self.keeper.keep(self.model, self.session.history, self.screen.note)


def run_command(line: str, chat: Chat) -> str:
    """Run a command and return its message.

    Raises:
        ConfigError: there is no such command, or it needs an argument or takes none, or its file cannot be had.
        DrafterError, ModelLoadError, PromptError: its argument is invalid; nothing is changed.
        EOFError: the command ends the chat.
    """
    name, _, text = (part.strip() for part in line.removeprefix("/").partition(" "))
    if name in ALIASES:
        name, _, more = ALIASES[name].partition(" ")
        text = f"{more} {text}".strip()
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, (*COMMANDS, *ALIASES), n=1)
        meant = f"Did you mean /{close[0]}?" if close else "/help lists them."
        raise ConfigError(
            f'There is no command /{name[:40]}. {meant} A message that begins with / goes between two lines of """.'
        )
    command = COMMANDS[name]
    if text and not command.argument:
        raise ConfigError(f"/{name} takes no argument.")
    if not text and command.argument and command.argument[0] != "[":
        raise ConfigError(f"/{name} needs {command.argument}: {command.about}.")
    try:
        return command.run(chat, text)
    except ForerunError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # of a path that cannot be, or that is closed to this user
        if command.argument != "FILE":
            raise
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise ConfigError(f"/{name} {text[:40]}: {reason}. Give another file.") from None


def _help(chat: Chat, text: str) -> str:
    usages = {f"/{name} {each.argument}".rstrip(): each.about for name, each in COMMANDS.items()}
    width = max(map(len, usages))
    return "\n".join([*(f"{usage:<{width}}  {about}" for usage, about in usages.items()), *KEYS])


def _exit(chat: Chat, text: str) -> str:
    raise EOFError


def _clear(chat: Chat, text: str) -> str:
    chat.keep()
    history = chat.session.history = History(chat.session.history.system)
    chat.session.files.clear()
    chat.keeper.go_on(None, history)
    return "the chat is empty" + ("" if history.system is None else "; the system message stays")


def _save(chat: Chat, text: str) -> str:
    path = Path(text).expanduser()
    save(path, chat.model, chat.session.history, chat.own)
    chat.own = path
    return f"saved: {path}"


def _load(chat: Chat, text: str) -> str:
    found = Conversation.read(find_file(text))
    chat.keep()
    chat.session.history = found.history
    chat.keeper.go_on(found.path if found.path.parent == chats_folder() else None, found.history)
    chat.own = found.path
    other = "" if found.model == chat.model else f"; it was held with {found.model}"
    return f"loaded: {found.title} ({counted(len(found.history.turns), 'turn')}){other}"


def _read(chat: Chat, text: str) -> str:
    path = Path(text).expanduser()
    content = read_bytes(path, ConfigError, remedy="Give a text file.", max_bytes=_MOST_FILE)
    try:
        decoded = content.decode("utf-8")
    except UnicodeDecodeError:
        decoded = "\0"
    if "\0" in decoded:
        raise ConfigError(f"{path} is no UTF-8 text, and forerun reads text alone. Convert it first.")
    size = chat.session.count([{"role": "user", "content": decoded}])
    most = chat.session.llm.target.context_length
    if size >= most:
        raise ConfigError(f"{path} makes {size} tokens, and the context holds {most}. Read a shorter one.")
    chat.session.files[text] = decoded
    return f"{text} goes with the next message: {size} of {most} tokens"


def _regen(chat: Chat, text: str) -> str:
    session = chat.session
    answer_message(session, chat.screen, _last(chat).user, again=True)
    return ""


def _edit(chat: Chat, text: str) -> str:
    chat.session.draft = _last(chat).user
    chat.session.replaces = True
    return "what you send now replaces the last message and its answer; Ctrl-C leaves them"


def _undo(chat: Chat, text: str) -> str:
    last = _last(chat)
    chat.session.history.turns.pop()
    chat.session.draft = last.user
    return f"the last message and its answer are taken back: {counted(len(chat.session.history.turns), 'turn')} left"


def _copy(chat: Chat, text: str) -> str:
    if not chat.screen.is_terminal:
        raise ConfigError("/copy asks the terminal for its clipboard, and standard output is none.")
    content = base64.b64encode(_last(chat).answer.encode()).decode()
    print(f"\x1b]52;c;{content}\x07", end="", flush=True)  # OSC 52, which reaches through ssh too
    return "the last answer was handed to the terminal's clipboard, if it takes that"


def _last(chat: Chat) -> chat_session.Turn:
    if not chat.session.history.turns:
        raise ConfigError("There is no message yet.")
    return chat.session.history.turns[-1]


def _system(chat: Chat, text: str) -> str:
    history = chat.session.history
    if not text:
        return "there is no system message" if history.system is None else f"the system message is: {history.system}"
    history.system = None if text == '""' else text
    return f"the system message is {'set' if history.system else 'removed'}, from the next answer on"


def _drafter(chat: Chat, text: str) -> str:
    session = chat.session
    if not text:
        return f"the drafter is {session.drafter}; there are {NO_DRAFTER}, {', '.join(DRAFTERS)}"
    session.llm = chat_session.open_beside(session.llm, text, session.settings)
    count = session.llm.num_draft_tokens if session.llm.drafter_name else 0
    return f"the drafter is {session.drafter}, K {count}"


def _set(chat: Chat, text: str) -> str:
    name, _, value = (part.strip() for part in text.partition(" "))
    if not name:
        return _settings(chat)
    key = HABITS.get(known := name.replace("-", "_"), known)
    key = key if key in SETTINGS else known
    if key in SWITCHES:
        return _switch(chat, key, value)
    if key not in SETTINGS:
        there = f"There are {', '.join((*SETTINGS, *SWITCHES))}."
        raise ConfigError(f"There is no setting {name[:40]!r}. {hint(key, SETTINGS, sentences=False) or there}")
    if value:
        try:
            read: Any = Flag.of(key, SETTINGS[key], chat.session.params, None).parse(value)
        except typer.BadParameter as error:
            raise ConfigError(f"{key}: {error.message}") from None
        chat.session.params = replace(chat.session.params, **{key: read})
    return f"{key} is {_value(chat, key)}"


def _value(chat: Chat, key: str) -> str:
    value = getattr(chat.session.params, key)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _settings(chat: Chat) -> str:
    values = [f"{key} {_value(chat, key)}" for key in SETTINGS]
    thinks = str(chat.session.template.get("enable_thinking", "as the model does")).lower()
    states = [f"think {thinks}", f"markdown {_ON[not chat.screen.reads_markdown]}"]
    return ", ".join([*values, *states, f"drafts {_ON[not chat.screen.shows_drafts]}"])


def _switch(chat: Chat, name: str, value: str) -> str:
    if value not in _ON:
        raise ConfigError(f"{name} is {value[:40]!r}, but must be on or off.")
    is_on = value == "on"
    if name == "think":
        template = getattr(chat.session.llm.tokenizer, "chat_template", None)
        if "enable_thinking" not in str(template):
            raise ConfigError(f"The chat template of {chat.model} does not read whether to think.")
        chat.session.template = {"enable_thinking": is_on}
    elif name == "markdown":
        chat.screen.read_markdown(is_on)
    else:
        chat.screen.show_drafts(is_on)
    return f"{name} is {value}"


def _drafts(chat: Chat, text: str) -> str:
    return _switch(chat, "drafts", _ON[chat.screen.shows_drafts])


def _show(chat: Chat, text: str) -> str:
    session = chat.session
    system = "none" if session.history.system is None else session.history.system
    files = [f"files that go with the next message: {', '.join(session.files)}"] if session.files else []
    return "\n".join([*_state(session), f"system message: {system}", f"settings: {_settings(chat)}", *files])


def _stats(chat: Chat, text: str) -> str:
    session = chat.session
    lines = [_figures(name, answers) for name, answers in session.answers.items()] or ["there are no answers yet"]
    return "\n".join([*lines, *_state(session)])


def _state(session: Session) -> list[str]:
    from forerun.models import number_format

    target = session.llm.target
    turns = session.history.turns
    size = session.count(session.history.messages(session.history.first)) if turns else 0
    return [
        f"history: {counted(len(turns), 'turn')}, {size} of {target.context_length} tokens",
        f"target: {target.name}, {number_format(target)}, {target.exactness}; drafter: {session.drafter}",
    ]


def _figures(drafter: str, answers: Sequence[ChatAnswer]) -> str:
    outputs = [each.output for each in answers]
    seconds = sum(each.times.total for each in answers)
    tokens = sum(len(each.token_ids) for each in outputs)
    stats = [each.stats for each in outputs if each.stats]
    return stderr_lines(
        [
            f"{drafter}: {counted(len(answers), 'answer')}, {tokens} tokens in {seconds:.1f} s",
            *([f"{tokens / seconds:.1f} tokens/s with the prompts"] if seconds else []),
            *acceptance_text(
                tokens,
                sum(each.num_forwards for each in outputs),
                sum(each.num_draft_tokens for each in stats),
                sum(each.num_accepted_tokens for each in stats),
            ),
        ]
    )


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a chat.

    Attributes:
        argument: its name, in brackets where it may be left out; empty where the command takes none.
        about: what it does.
        run: takes the chat and the argument's text, and returns a message.
    """

    argument: str
    about: str
    run: Callable[[Chat, str], str]


COMMANDS: Mapping[str, Command] = {
    "help": Command("", "this list", _help),
    "exit": Command("", "end the chat (also /bye, /quit)", _exit),
    "clear": Command("", "forget the chat so far (also /reset)", _clear),
    "save": Command("FILE", "write the chat into a file", _save),
    "load": Command("FILE", "go on with the chat of a file, or with a kept one by its name", _load),
    "read": Command("FILE", "send a text file along with the next message", _read),
    "regen": Command("", "answer the last message again", _regen),
    "edit": Command("", "change the last message and send it again", _edit),
    "undo": Command("", "take the last message and its answer back", _undo),
    "copy": Command("", "put the last answer into the clipboard", _copy),
    "system": Command("[TEXT]", 'set the system message; "" removes it, without TEXT it is shown', _system),
    "set": Command("[NAME VALUE]", "change a setting, such as temperature 0, think off; alone: show all", _set),
    "drafter": Command("[NAME]", "change the drafter; target and chat stay", _drafter),
    "drafts": Command("", "mark accepted draft tokens, or no longer", _drafts),
    "show": Command("", "show model, system message and settings", _show),
    "stats": Command("", "what the answers have cost, by drafter, and how full the context is", _stats),
}
ALIASES = {"bye": "exit", "quit": "exit", "reset": "clear", "temperature": "set temperature", "?": "help"}
KEYS = (
    "Ctrl-C stops an answer and keeps what was said. Ctrl-D ends the chat, and so does Ctrl-C twice.",
    'Alt-Enter, or a \\ at the end of a line, begins a new line; so does Enter between """ and """. Ctrl-R searches.',
)
