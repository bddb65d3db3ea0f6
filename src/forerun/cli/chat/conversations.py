"""Files of chats: those that are kept in the state folder, and those that people save and load."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forerun.cli.chat.session import History, Turn
from forerun.errors import ConfigError
from forerun.utils.files import refuse_to_overwrite, write_json
from forerun.utils.json_file import Fields

FORMAT = "forerun-chat"
VERSION = 1
_REMEDY = "It is left as it is."
_TITLE = 60
"""Characters of a title at most."""


def state_folder() -> Path | None:
    """Return the folder in which chats and what was typed are kept; None for a user without a home. It need not
    exist."""
    from platformdirs import user_state_path

    folder = user_state_path("forerun", appauthor=False)
    return folder if folder.is_absolute() else None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat of a file.

    Attributes:
        model: that it was held with.
        history: its system message and turns.
    """

    path: Path
    model: str
    history: History

    @property
    def title(self) -> str:
        """Return the beginning of the first message, on one line."""
        words = " ".join(self.history.turns[0].user.split()) if self.history.turns else "(empty)"
        return words if len(words) <= _TITLE else f"{words[: _TITLE - 1]}…"

    @classmethod
    def read(cls, path: Path) -> Conversation:
        """Read a file. Raises ConfigError: it cannot be read, or is none of this version."""
        fields = Fields.read(path, ConfigError, remedy=_REMEDY)
        if fields.string("format", "") != FORMAT:
            raise ConfigError(f"{path} is no chat of forerun's: /save writes such files. {_REMEDY}")
        if (version := fields.integer("version")) != VERSION:
            raise ConfigError(f"{path} is a chat of version {version}; this forerun reads {VERSION}. {_REMEDY}")
        messages = [
            Fields.of(each, f"{path}: message {number}", ConfigError, remedy=_REMEDY)
            for number, each in enumerate(fields.list_of("messages", dict), 1)
        ]
        history = History()
        if messages and messages[0].string("role") == "system":
            history.system = messages.pop(0).string("content")
        roles = [each.string("role") for each in messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ConfigError(f"{path}: its messages are not of user and assistant in turn. {_REMEDY}")
        texts = [each.string("content") for each in messages]
        history.turns = [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
        return cls(path, fields.string("model"), history)


def write_conversation(path: Path, model: str, history: History) -> None:
    """Write a chat, for its owner's eyes alone. Raises ConfigError if it cannot be written."""
    made = {"format": FORMAT, "version": VERSION, "model": model, "messages": history.messages()}
    write_json(path, made, error=ConfigError, mode=0o600)


def save(path: Path, model: str, history: History, own: Path | None) -> None:
    """Write a chat to where a user says. own: the file that this chat was saved to or loaded from, which is replaced.

    Raises:
        ConfigError: something else is there, or it cannot be written.
    """
    if own is None or not own.exists() or not path.exists() or not path.samefile(own):
        refuse_to_overwrite(path, ConfigError, "Give another name.")
    write_conversation(path, model, history)


class Keeper:
    """Keeps a chat in a file of its own, which is written anew after each answer.

    What fails is said once; the chat goes on.

    Args:
        folder: None keeps nothing.
        path: the file of a chat that goes on.
    """

    def __init__(self, folder: Path | None = None, path: Path | None = None) -> None:
        self._folder = folder
        self._has_failed = False
        self.go_on(path, History())

    def go_on(self, path: Path | None, history: History) -> None:
        """Write to this file from now on; None: to a new one. history: of the chat that need not be kept anew."""
        self._path = path
        self._written = None if path is None else _changed(path)
        self._kept = _state(history)

    def keep(self, model: str, history: History, note: Callable[[str], None]) -> None:
        """Write the chat if it has changed and is not empty.

        note: is called with what people should know.
        """
        state = _state(history)
        if self._folder is None or state == self._kept or not history.turns:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path is not None and _changed(self._path) != self._written:
                note(
                    f"{self._path.name} was changed by another chat: this one is kept in a file of its own from here on"
                )
                self._path = None
            if self._path is None:
                self._path = self._folder / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{secrets.token_hex(2)}.json"
            write_conversation(self._path, model, history)
            self._written = _changed(self._path)
            self._kept = state
        except (ConfigError, OSError) as error:
            if not self._has_failed:
                note(f"this chat is not kept: {error}")
            self._has_failed = True


def _state(history: History) -> tuple[str | None, tuple[Turn, ...]]:
    return history.system, (*history.turns,)


def _changed(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def kept_files() -> list[Path]:
    """Return the files of chats that were kept, the last one first."""
    folder = chats_folder()
    found = [] if folder is None else list(folder.glob("*.json"))
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def chats_folder() -> Path | None:
    """Return the folder of the chats that are kept."""
    base = state_folder()
    return None if base is None else base / "chats"


def last_conversation() -> Conversation:
    """Return the chat that was kept last. Raises ConfigError if there is none, or it cannot be read."""
    found = kept_files()
    if not found:
        raise ConfigError("There is no chat to go on with: none was kept. Leave --continue out.")
    return Conversation.read(found[0])


def listed() -> Iterator[str]:
    """Yield a line for each chat that was kept."""
    for path in kept_files():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        try:
            chat = Conversation.read(path)
            count = len(chat.history.turns)
            about = f"{chat.title}  ({count} {'turn' if count == 1 else 'turns'}, {chat.model})"
        except ConfigError as error:
            about = f"cannot be read: {error}"
        yield f"{path.stem}  {when}  {about}"


def find_file(name: str) -> Path:
    """Return the file of a path, or of a kept chat by what `--list` calls it."""
    path = Path(name).expanduser()
    folder = chats_folder()
    kept = None if folder is None or os.sep in name else folder / f"{name.removesuffix('.json')}.json"
    return kept if kept is not None and not path.exists() and kept.exists() else path
