"""Files of chats: what is written, read, listed, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cli.chat.conversations import Conversation, Keeper, kept_files, save
from forerun.cli.chat.screen import Screen
from forerun.cli.chat.session import History, Turn
from forerun.cli.chat.slash_commands import Chat, run_command
from forerun.errors import ConfigError

from .conftest import Invoke
from .test_chat import TEXT, asked, fake, opened, session_of  # noqa: F401

CHAT = History("be brief", [Turn("one\ntwo ä", "answer"), Turn("x", "")])


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "forerun" / "chats"


@pytest.mark.parametrize("history", [CHAT, History(), History(None, [Turn("a", "b")])])
def test_what_is_written_is_read(tmp_path: Path, history: History) -> None:
    save(tmp_path / "it.json", "smollm2", history, None)
    found = Conversation.read(tmp_path / "it.json")
    assert (found.model, found.history) == ("smollm2", history)
    assert (tmp_path / "it.json").stat().st_mode & 0o777 == 0o600


GOOD = {"format": "forerun-chat", "version": 1, "model": "m", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "it is not JSON"),
        ("[]", "must hold an object"),
        ("{}", "no chat of forerun's"),
        (json.dumps(GOOD | {"version": 2}), "is a chat of version 2; this forerun reads 1"),
        (json.dumps(GOOD), "not of user and assistant in turn"),
        (json.dumps(GOOD | {"messages": [{"role": "system"}]}), "content is missing"),
        (json.dumps(GOOD | {"messages": "x"}), "messages is 'x'"),
    ],
)
def test_a_file_that_is_none_is_left_as_it_is(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "it.json"
    path.write_text(content)
    session = session_of(fake())
    session.history.turns.append(Turn("a", "b"))
    chat = Chat(session, Screen(), "m")
    with pytest.raises(ConfigError, match=told) as error:
        run_command(f"/load {path}", chat)
    assert str(error.value).endswith("It is left as it is.")
    with pytest.raises(ConfigError, match="exists"):
        run_command(f"/save {path}", chat)
    assert path.read_text() == content and session.history.turns == [Turn("a", "b")]


def test_a_chat_is_saved_over_its_own_file_alone(tmp_path: Path) -> None:
    session = session_of(fake())
    chat = Chat(session, Screen(), "m")
    session.history.turns.append(Turn("a", "b"))
    run_command(f"/save {tmp_path / 'it.json'}", chat)
    session.history.turns.append(Turn("c", "d"))
    run_command(f"/save {tmp_path / 'it.json'}", chat)
    assert len(Conversation.read(tmp_path / "it.json").history.turns) == 2
    other = Chat(session_of(fake()), Screen(), "m")
    with pytest.raises(ConfigError, match="exists"):
        run_command(f"/save {tmp_path / 'it.json'}", other)
    assert run_command(f"/load {tmp_path / 'it.json'}", other) == "loaded: a (2 turns)"
    run_command(f"/save {tmp_path / 'it.json'}", other)


def test_two_chats_do_not_write_over_each_other(chats: Path) -> None:
    told: list[str] = []
    history = History(None, [Turn("a", "b")])
    first = Keeper(chats)
    first.keep("m", history, told.append)
    [path] = kept_files()
    second = Keeper(chats, path)
    second.keep("m", History(None, [Turn("a", "b"), Turn("c", "d")]), told.append)
    history.turns.append(Turn("e", "f"))
    first.keep("m", history, told.append)
    assert told == [f"{path.name} was changed by another chat: this one is kept in a file of its own from here on"]
    assert {Conversation.read(each).history.turns[-1].user for each in kept_files()} == {"c", "e"}


def test_what_cannot_be_kept_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    keeper = Keeper(tmp_path / "file" / "chats")
    for text in ("a", "b"):
        keeper.keep("m", History(None, [Turn(text, "")]), told.append)
    assert len(told) == 1 and told[0].startswith("this chat is not kept: ")


def test_chats_are_listed_and_go_on(invoke: Invoke, chats: Path, opened: dict[str, object]) -> None:  # noqa: F811
    assert invoke("chat", "--list").stdout == ""
    refused = invoke("chat", "--continue", input="x\n")
    assert refused.exit_code == 2 and "no chat to go on with" in refused.stderr
    Keeper(chats).keep("smollm2", CHAT, print)
    [path] = kept_files()
    (chats / "zz.json").write_text("{}")
    first, second = sorted(invoke("chat", "--list").stdout.splitlines())
    assert path.stem in first and first.endswith("  one two ä  (2 turns, smollm2)")
    assert second.startswith("zz  ") and "cannot be read: " in second
    (chats / "zz.json").unlink()
    assert invoke("chat", "--continue", input="three\n").stdout == f"{TEXT}\n\n"
    assert opened["model"] == "smollm2"
    assert asked(opened["llm"]) == [["be brief", "one\ntwo ä", "answer", "x", "", "three"]]  # type: ignore[arg-type]
    assert Conversation.read(path).history.turns[-1] == Turn("three", TEXT)
    assert run_command(f"/load {path.stem}", Chat(session_of(fake()), Screen(), "other")).endswith(
        "(3 turns); it was held with smollm2"
    )


def test_what_is_listed_holds_no_controls(invoke: Invoke, chats: Path) -> None:
    Keeper(chats).keep("m\x1b", History(None, [Turn("\x1b]0;x\x07 a", "b")]), print)
    assert invoke("chat", "--list").stdout.endswith("  ␛]0;x␇ a  (1 turn, m␛)\n")


def test_a_kept_chat_that_is_loaded_goes_on_in_its_file(chats: Path) -> None:
    Keeper(chats).keep("m", History(None, [Turn("a", "b")]), print)
    [path] = kept_files()
    chat = Chat(session_of(fake()), Screen(), "m", Keeper(chats))
    run_command(f"/load {path.stem}", chat)
    chat.keep()
    chat.session.history.turns.append(Turn("c", "d"))
    chat.keep()
    assert kept_files() == [path] and len(Conversation.read(path).history.turns) == 2
    save(elsewhere := chats.parent / "it.json", "m", CHAT, None)
    run_command(f"/load {elsewhere}", chat)
    chat.keep()
    assert kept_files() == [path]
    chat.session.history.turns.append(Turn("e", "f"))
    chat.keep()
    assert len(kept_files()) == 2 and len(Conversation.read(elsewhere).history.turns) == 2
