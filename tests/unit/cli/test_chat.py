"""`forerun chat`: what is said, kept, dropped and refused, with models that need no weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doubles import FakeModel, PieceTokenizer
from forerun import LLM, PromptLookup, SamplingParams
from forerun.cli.answers import CallTimes, StreamedChoice
from forerun.cli.chat import command, session as chat_session
from forerun.cli.chat.conversations import Conversation
from forerun.cli.chat.prompt import Prompt, is_open
from forerun.cli.chat.screen import Screen, visible
from forerun.cli.chat.session import ChatAnswer, History, Session, Turn, open_beside
from forerun.cli.chat.slash_commands import ALIASES, COMMANDS, Chat, run_command
from forerun.cli.options import LLMOptions
from forerun.engine import StreamChunk
from forerun.errors import ConfigError, DrafterError, PromptError
from forerun.models import Exactness

from .conftest import Invoke
from .fakes import WORDS, FakeLLM

TEXT = "".join(WORDS)
PARAMS = SamplingParams(temperature=0, max_tokens=8)


def fake(**settings: Any) -> FakeLLM:
    target = SimpleNamespace(
        name="fake",
        context_length=64,
        dtype=torch.bfloat16,
        exactness=Exactness(True),
        quantize=None,
        recommended_sampling={},
    )
    return FakeLLM(drafts=True, target=target, **settings)


def session_of(llm: Any, drafter: str | None = "suffix") -> Session:
    llm.drafter_name = drafter
    return Session(llm, PARAMS, LLMOptions())


def converse(session: Session, *entries: str | type[BaseException]) -> list[str]:
    """Type these, then Ctrl-D. Returns what stood in the prompt each time."""
    typed = iter(entries)
    drafts: list[str] = []

    def read(draft: str) -> tuple[str, bool]:
        drafts.append(draft)
        entry = next(typed, EOFError)
        if not isinstance(entry, str):
            raise entry
        return entry, entry.startswith("/")

    command.converse(Chat(session, Screen(), "some/model"), read)
    return drafts


def asked(llm: FakeLLM) -> list[list[str]]:
    """The contents of the messages of every prompt."""
    return [[message["content"] for message in prompt] for prompt, _ in llm.requests]


# what is said and kept


def test_every_answer_is_part_of_the_next_prompt() -> None:
    llm = fake()
    session = session_of(llm)
    session.history.system = "be brief"
    converse(session, "one", "two words")
    assert asked(llm) == [["be brief", "one"], ["be brief", "one", TEXT, "two words"]]
    assert [message["role"] for message in llm.requests[1][0]] == ["system", "user", "assistant", "user"]
    assert session.history.turns == [Turn("one", TEXT), Turn("two words", TEXT)]


def test_an_answer_and_its_statistics_are_printed_apart(capsys: pytest.CaptureFixture[str]) -> None:
    converse(session_of(fake()), "one")
    out, err = capsys.readouterr()
    assert out == TEXT + "\n\n"
    assert err.startswith("6 tokens · ") and " tokens/s · 3.00 tokens a step · first token 0." in err
    assert err.rstrip().endswith("context full")  # it ends by length, and max_tokens is more


def test_an_answer_is_what_generate_gives_for_the_same_messages() -> None:
    pieces = [bytes([byte]) for byte in b"abcdefghijk"]

    class ChatTokenizer(PieceTokenizer):
        chat_template = "a template"

        def apply_chat_template(self, messages: list[dict[str, Any]], **_: object) -> str:
            return "".join(message["content"] for message in messages)

    plain = LLM(FakeModel(seed=3), None, tokenizer=ChatTokenizer(pieces))
    session = session_of(LLM(FakeModel(seed=3), PromptLookup(), tokenizer=ChatTokenizer(pieces)))
    session.params = SamplingParams(temperature=0.9, seed=5, max_tokens=12)
    shown: list[str] = []
    for text in ("abc", "ded"):
        messages = [*session.history.messages(), {"role": "user", "content": text}]
        answer = session.answer(text, lambda chunk: shown.append(chunk.text), lambda _: None)
        expected = plain.generate(messages, session.params)
        assert answer.output.text == session.history.turns[-1].answer == expected.text
    assert "".join(shown) == "".join(turn.answer for turn in session.history.turns)


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake(fail_after=1)
    session = session_of(llm)
    converse(session, "one", "two")
    said = "alpha beta gamma "
    assert session.history.turns == [Turn("one", said), Turn("two", said)]
    assert asked(llm)[1] == ["one", said, "two"]
    assert capsys.readouterr().err.count("stopped by you") == 2
    assert llm.closed


def test_an_answer_stopped_before_its_first_word_leaves_the_chat_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    session = session_of(fake(fail_after=0))
    session.history.turns.append(Turn("a", "b"))
    converse(session, "one")
    assert session.history.turns == [Turn("a", "b")]
    assert "not part of the chat" in capsys.readouterr().err


@pytest.mark.parametrize("end", [[EOFError], [KeyboardInterrupt] * 2, ["/exit"], ["/bye"], ["/quit"]])
def test_a_chat_ends_at_the_prompt(end: list[Any]) -> None:
    llm = fake()
    converse(session_of(llm), "one", *end, "two")
    assert asked(llm) == [["one"]]


def test_one_ctrl_c_at_the_prompt_says_how_to_leave(capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake()
    converse(session_of(llm), KeyboardInterrupt, "one", KeyboardInterrupt, "two")
    assert len(asked(llm)) == 2
    assert capsys.readouterr().err.count("Ctrl-C once more, or Ctrl-D, ends the chat.") == 2


def test_an_error_is_told_and_the_chat_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake(fail_after=0, error=PromptError("no such role"))
    session = session_of(llm)
    converse(session, "one", "two")
    assert session.history.turns == []
    assert capsys.readouterr().err.count("forerun: no such role") == 2


# what fits the context


def words(messages: Any) -> int:
    return sum(len(message["content"].split()) for message in messages)


def test_the_oldest_turns_are_dropped_and_never_the_system_message() -> None:
    history = History("s s", [Turn("a a a", "b b b"), Turn("c c", "d d"), Turn("e", "f")])
    whole = history.fit("g", words, context_length=40, max_tokens=8)
    assert (whole.size, whole.dropped) == (15, 0)
    for context, dropped in ((23, 0), (22, 1), (16, 2), (12, 2), (10, 2), (8, 3)):
        fitted = history.fit("g", words, context, max_tokens=8)
        assert fitted.dropped == dropped
        assert fitted.messages[0] == {"role": "system", "content": "s s"}
        assert fitted.messages[-1] == {"role": "user", "content": "g"}
        assert len(fitted.messages) == 2 + 2 * (3 - dropped)
        assert words(fitted.messages) == fitted.size <= context - min(8, context // 2)


def test_a_message_that_needs_most_of_the_context_is_taken_alone() -> None:
    history = History(None, [Turn("a", "b")])
    assert history.fit("g " * 19, words, 20, 8).dropped == 1
    with pytest.raises(PromptError, match=r"a prompt of 20 tokens.*holds 20"):
        history.fit("g " * 20, words, 20, 8)
    history.system = "s s"
    with pytest.raises(PromptError, match=r"with the system message makes a prompt of 20 tokens"):
        history.fit("g " * 18, words, 20, 8)


def test_what_is_dropped_is_said_and_stays_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake()
    llm.target.context_length = 30
    session = session_of(llm)
    converse(session, "one " * 6, "two " * 6, "/stats", "three " * 25, "four " * 31, "five")
    err = capsys.readouterr().err
    assert "holds 30 tokens: the oldest turns are dropped from here on (2 of 2)" in err
    assert "leaves 5 tokens for the answer" in err
    assert "a prompt of 31 tokens" in err and "four" not in err
    assert [prompt[0].split()[0] for prompt in asked(llm)] == ["one", "one", "three", "five"]


def test_what_prompts_leave_out_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And prompts go on from the same turn, until turns are taken back."""
    llm = fake()
    llm.target.context_length = 30
    session = session_of(llm)
    path = tmp_path / "it.json"
    converse(
        session, "one " * 6, "two " * 6, "three", "/regen", f"/save {path}", "/undo", "/undo", "two", "/reset", "4"
    )
    assert [prompt[0].split()[0] for prompt in asked(llm)] == ["one", "one", "two", "two", "one", "4"]
    assert capsys.readouterr().err.count("the oldest turns are dropped") == 1
    assert [turn.user.split()[0] for turn in Conversation.read(path).history.turns] == ["one", "two", "three"]


def test_an_answer_that_is_not_kept_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatAnswer, "kept", False)
    session = session_of(fake())
    session.history.turns.append(Turn("a " * 40, "b"))
    converse(session, "c " * 20)
    assert session.history == History(None, [Turn("a " * 40, "b")])


def test_few_prompts_of_many_turns_are_counted() -> None:
    history = History(None, [Turn("a", "b")] * 1000)
    counted: list[int] = []

    def count(messages: Any) -> int:
        counted.append(len(messages))
        return len(messages)

    prompt = history.fit("c", count, 101, 1)
    assert (prompt.size, prompt.dropped) == (99, 951) and len(counted) < 15 and counted[-1] == 99


def test_a_refused_message_drops_nothing() -> None:
    session = session_of(fake())
    session.history.turns.append(Turn("a", "b"))
    converse(session, "word " * 64)
    assert session.history.turns == [Turn("a", "b")]


# commands


def test_commands_change_the_chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, other = fake(), fake()
    opened: list[tuple[Any, ...]] = []

    def open_beside(*given: Any) -> FakeLLM:
        opened.append(given)
        other.drafter_name = None if given[1] == "none" else given[1]
        return other

    monkeypatch.setattr(chat_session, "open_beside", open_beside)
    session = session_of(llm)
    converse(session, "one", "/system be brief", "/temperature 0.5", "/drafter recycling:width=2", "two", "/reset", "3")
    assert opened == [(llm, "recycling:width=2", session.settings)]
    assert asked(llm) == [["one"]]
    assert asked(other) == [["be brief", "one", TEXT, "two"], ["be brief", "3"]]
    assert [params.temperature for _, params in other.requests] == [0.5, 0.5]
    assert list(session.answers) == ["suffix", "recycling:width=2"]
    converse(session, '/system ""', "/system", "/drafter none", "/drafter")
    assert session.history.system is None and session.drafter == "none"
    assert "there is no system message" in capsys.readouterr().err


def test_stats_and_help_say_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    converse(session_of(fake()), "/stats", "one", "/stats", "/help")
    err = capsys.readouterr().err
    assert "there are no answers yet" in err
    assert "suffix: 1 answer, 6 tokens in" in err and "50 % of 8 draft tokens accepted" in err
    assert "history: 1 turn, 7 of 64 tokens" in err and "fake, bfloat16, exact; drafter: suffix" in err
    assert all(f"/{name} {each.argument}".rstrip() in err for name, each in COMMANDS.items())
    assert ALIASES.keys() - COMMANDS.keys() == ALIASES.keys()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/sytem x", "no command /sytem. Did you mean /system?"),
        ("/xyzzy", "no command /xyzzy. /help lists them."),
        ("/ reset", "no command /."),
        ("/temperature hot", "temperature: 'hot' is not a number in 0..100"),
        ("/temperature -1", "temperature: '-1' is not a number in 0..100"),
        ("/set temprature 1", "no setting 'temprature'. Did you mean temperature?"),
        ("/set xyzzy 1", "no setting 'xyzzy'. There are temperature, top_k"),
        ("/set think off", "template of some/model does not read whether to think"),
        ("/set markdown on", "on a terminal alone"),
        ("/set drafts 1", "drafts is '1', but must be on or off"),
        ("/reset all", "/clear takes no argument"),
        ("/save", "/save needs FILE"),
        ("/load /no/such/file", "/no/such/file: it cannot be read"),
        ("/read /no/such/file", "/no/such/file: it cannot be read"),
        ("/read ~nobody9/x", "/read ~nobody9/x: Could not determine home directory. Give another file."),
        ("/load ~nobody9/x", "/load ~nobody9/x: Could not determine home directory."),
        ("/load " + "x" * 5000, "/load " + "x" * 40 + ": File name too long."),
        ("/save a\0b", ": embedded null byte."),
        ("/copy", "standard output is none"),
        ("/drafter no-such", "no-such"),
        ("/drafts", "on a terminal alone"),
    ],
)
def test_a_command_that_cannot_be_followed_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, told: str
) -> None:
    def refuse(*_: object) -> None:
        raise DrafterError("drafter is 'no-such'")

    monkeypatch.setattr(chat_session, "open_beside", refuse)
    llm = fake()
    session = session_of(llm)
    session.history.turns.append(Turn("a", "b"))
    converse(session, line)
    assert told in capsys.readouterr().err
    assert (session.llm, session.drafter, session.params) == (llm, "suffix", PARAMS)
    assert session.history.turns == [Turn("a", "b")]
    assert llm.requests == []


def test_a_folder_of_another_user_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_dir", refuse)
    converse(session_of(fake()), "/save theirs/x")
    assert "/save theirs/x: Permission denied. Give another file." in capsys.readouterr().err


def test_what_fails_within_the_model_is_no_matter_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("of torch")

    monkeypatch.setattr(chat_session, "open_beside", fail)
    with pytest.raises(RuntimeError, match="of torch"):
        converse(session_of(fake()), "/drafter suffix")


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_no_note_sends_controls_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", kind)
    Screen().note("loaded: \x1b]0;x\x07")
    assert "loaded: ␛]0;x␇" in capsys.readouterr().err


def test_a_drafter_is_changed_over_the_same_target() -> None:
    llm = LLM(FakeModel(), "prompt-lookup", tokenizer=PieceTokenizer([b"a"] * 11))
    settings = LLMOptions(num_draft_tokens=3, prefix_reuse="off")
    other = open_beside(llm, "suffix:num_draft_tokens=5", settings)
    assert other.target is llm.target and other.tokenizer is llm.tokenizer
    assert type(other.drafter).__name__ == "Suffix" and other.num_draft_tokens == 3
    assert other.engine.config.prefix_reuse == "off"
    session = Session(other, PARAMS, settings)
    with pytest.raises(DrafterError):
        run_command("/drafter suffixx", Chat(session, Screen()))
    assert session.drafter == "suffix:num_draft_tokens=5"
    run_command("/drafter none", Chat(session, Screen()))
    assert session.drafter == "none" and session.llm.drafter is None


def test_another_drafter_has_the_memory_of_the_first() -> None:
    llm = LLM("bundled", "prompt-lookup", cache_memory=0.01)
    pool, context = llm.target.pool, llm.target.context_length
    assert pool is not None and (bound := pool.num_pages)
    assert open_beside(llm, "suffix", LLMOptions(cache_memory=0.01)).target.pool is pool
    assert (pool.num_pages, llm.target.context_length) == (bound, context)


@pytest.mark.parametrize("typed", ["/set temp 0", "/set temperature 0", "/temperature 0.0"])
def test_a_setting_by_its_other_names(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake()
    session = session_of(llm)
    converse(session, typed, "/set top_k 5", "one", "/set")
    params = llm.requests[0][1]
    assert (params.temperature, params.top_k) == (0, 5)
    assert "temperature 0, top_k 5" in capsys.readouterr().err


def test_thinking_is_switched_in_the_template() -> None:
    given: list[Any] = []

    class Thinking(FakeLLM):
        def stream(self, prompt: Any, params: Any, **template: Any) -> Any:
            given.append(template)
            return super().stream(prompt, params)

    llm = Thinking(drafts=True, target=fake().target)
    llm.tokenizer.chat_template = "{{ enable_thinking }} {{ messages[0].content }}"  # type: ignore[attr-defined]
    session = session_of(llm)
    session.count = lambda messages: 1  # type: ignore[method-assign]
    converse(session, "one", "/set think off", "two", "/set think on", "three")
    kwargs = [{"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True)]
    assert given == [{}, *kwargs]


def test_what_is_thought_is_shown_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Thinking(FakeLLM):
        def stream(self, prompt: Any, params: Any) -> Any:
            for part in ("<thi", "nk>\nhm", ", so\n</think>\n\nThe *an", "swer*"):
                yield StreamChunk(part, [0])
            yield StreamChunk(".", [0], finish_reason="stop")

    llm = Thinking(target=fake().target)
    llm.tokenizer.chat_template = "<think></think>"  # type: ignore[attr-defined]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    converse(session_of(llm), "one", "/set markdown off", "two")
    first, _, second = capsys.readouterr().out.partition("\x1b[3manswer\x1b[0m.\n")
    assert first.startswith("\x1b[2mhm") and "</think>" not in first
    assert second.endswith("\x1b[2m, so\x1b[0m\n\nThe *answer*.\n")


def test_the_last_message_is_answered_again_edited_and_taken_back() -> None:
    llm = fake()
    session = session_of(llm)
    assert converse(session, "one", "two", "/regen", "/edit", "deux", "/undo", "") == [*[""] * 4, "two", "", "deux", ""]
    assert asked(llm)[1:] == [["one", TEXT, "two"], ["one", TEXT, "two"], ["one", TEXT, "deux"]]
    assert session.history.turns == [Turn("one", TEXT)]


def test_what_cannot_be_sent_comes_back_into_the_prompt() -> None:
    llm = fake(fail_after=0, error=PromptError("no"))
    session = session_of(llm)
    session.history.turns.append(Turn("a", "b"))
    assert converse(session, "one", "", "/regen", "", "/edit", "c") == ["", "one", "", "a", "", "a", "c"]
    assert session.history.turns == [Turn("a", "b")]


def test_files_go_with_the_next_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake()
    session = session_of(llm)
    (tmp_path / "a.md").write_text("say ```x```\n")
    (tmp_path / "b.bin").write_bytes(b"a\0b")
    (tmp_path / "c.txt").write_text("word " * 64)
    converse(session, *(f"/read {tmp_path / name}" for name in ("a.md", "b.bin", "c.txt")), "one", "two")
    err = capsys.readouterr().err
    assert "a.md goes with the next message: 2 of 64 tokens" in err
    assert "b.bin is no UTF-8 text" in err and "c.txt makes 64 tokens, and the context holds 64" in err
    assert asked(llm) == [[(sent := f"{tmp_path}/a.md:\n````\nsay ```x```\n````\n\none")], [sent, TEXT, "two"]]


def test_two_files_of_one_name_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(folder)
    llm = fake()
    converse(session_of(llm), "/read a/x.py", "/read b/x.py", "one")
    assert asked(llm) == [["a/x.py:\n```\na\n```\n\nb/x.py:\n```\nb\n```\n\none"]]


# what is typed


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("hello", False),
        ("one\\", True),
        ('"""', True),
        ('"""one', True),
        ('"""one\ntwo"""', False),
        ('"""""', True),
        ('""""""', False),
        ("", False),
    ],
)
def test_when_enter_begins_another_line(text: str, more: bool) -> None:
    assert is_open(text) == more


@pytest.mark.parametrize(
    ("typed", "text", "is_command"),
    [
        ("/\n", "/\n", False),
        ("hello", "hello", False),
        ("/help", "/help", True),
        ("/sytem x", "/sytem x", True),
        ("/usr/bin\n/usr/lib", "/usr/bin\n/usr/lib", False),
        ("/system be\nbrief", "/system be\nbrief", True),
        ("for x \\\n  y", "for x \\\n  y", False),
        ('"""\n/help\nx\n"""', "/help\nx", False),
        ('"""one"""', "one", False),
        ("see [#1]", "see pasted text", False),
    ],
)
def test_what_is_a_command(typed: str, text: str, is_command: bool) -> None:
    prompt = Prompt.__new__(Prompt)
    prompt._pastes = {"[#1]": "pasted text"}
    assert prompt._entry(typed) == (text, is_command)


def test_control_characters_of_an_answer_do_not_reach_a_terminal() -> None:
    assert visible("a\tb\n\x1b[2J\x07\x9b\r\x7f\u202e") == "a\tb\n␛[2J␇\ufffd␡\ufffd"


# the command


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How the model was opened; "llm" is what open_llm returns."""
    seen: dict[str, Any] = {"llm": fake()}

    def open_llm(model: str, drafter: str | None, **settings: Any) -> FakeLLM:
        seen.update(model=model, drafter=drafter, **settings)
        llm: FakeLLM = seen["llm"]
        return llm

    monkeypatch.setattr(command, "open_llm", open_llm)
    return seen


def test_on_a_pipe_every_line_is_a_message(invoke: Invoke, opened: dict[str, Any]) -> None:
    flags = ["--system", "brief", "--seed", "3", "--max-tokens", "9", "--adapter", "some/adapter", "--drafter", "none"]
    result = invoke("chat", "some/model", *flags, input="one\n\n/quit\\\n")
    assert result.exit_code == 0
    assert result.stdout == f"{TEXT}\n\n{TEXT}\n\n"
    assert asked(opened["llm"]) == [["brief", "one"], ["brief", "one", TEXT, "/quit\\"]]
    assert (opened["model"], opened["drafter"], opened["adapter"]) == ("some/model", "none", "some/adapter")
    assert opened["chat"] is True
    params = opened["llm"].requests[0][1]
    assert (params.seed, params.max_tokens, params.temperature) == (3, 9, 0.7)


@pytest.mark.parametrize(("content", "told"), [(b"one\n\xff\xfe\n", "Line 2"), ("x " * 64, "a prompt of 64 tokens")])
def test_on_a_pipe_a_line_that_cannot_be_answered_ends_the_chat(
    invoke: Invoke, opened: dict[str, Any], content: Any, told: str
) -> None:
    result = invoke("chat", "some/model", input=content)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == (f"{TEXT}\n\n" if content[:3] == b"one" else "")


def test_on_a_pipe_ctrl_c_ends_the_chat_with_what_was_said(invoke: Invoke, opened: dict[str, Any]) -> None:
    opened["llm"] = fake(fail_after=1)
    result = invoke("chat", "some/model", input="one\ntwo\n")
    assert result.exit_code == 130
    assert result.stdout == "alpha beta gamma \n\n"


def test_without_a_model_and_without_smollm2_it_says_how_to_fetch_it(
    invoke: Invoke, opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    result = invoke("chat", input="one\n")
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert "forerun fetch smollm2" in line
    monkeypatch.setattr("forerun.utils.fetch.path_of", lambda name: tmp_path)
    assert invoke("chat", input="one\n").exit_code == 0
    assert (opened["model"], opened["drafter"]) == ("smollm2", "auto")


@pytest.mark.parametrize("arguments", [["chat", "bundled"], ["generate", "--chat", "x"]])
def test_a_model_without_a_template_is_refused_before_its_weights_are_read(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("forerun.models.loading.load.read_model", None)
    result = invoke(*arguments, input="one\n")
    assert result.exit_code == 2
    assert "bundled has no chat template" in result.stderr and "chat_template.jinja" in result.stderr


def test_drafts_are_marked_on_a_terminal_alone(invoke: Invoke, opened: dict[str, Any]) -> None:
    result = invoke("chat", "some/model", "--show-drafts", input="one\n")
    assert result.exit_code == 2 and "on a terminal alone" in result.stderr
    assert "model" not in opened


def test_marks_are_around_what_the_draft_had_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    screen.show_drafts(True)
    llm = fake()
    for chunk in llm.stream([], PARAMS):
        screen.chunk(llm.tokenizer, chunk)
    assert "\x1b[32m\x1b[4malpha beta \x1b[0mgamma " in capsys.readouterr().out
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(ConfigError):
        Screen().show_drafts(True)


def test_a_chat_template_of_a_file(invoke: Invoke, opened: dict[str, Any], tmp_path: Path) -> None:
    flags = ["--chat-template", str(tmp_path / "it.jinja")]
    result = invoke("chat", "some/model", *flags, input="one\n")
    assert result.exit_code == 2 and "it.jinja: it cannot be read" in result.stderr
    (tmp_path / "it.jinja").write_text("{{ messages }}")
    assert (
        invoke("chat", "some/model", *flags, input="one\n").exit_code == 0
        and opened["chat_template"] == "{{ messages }}"
    )


@pytest.mark.parametrize(
    ("answer", "plain", "told"),
    [
        ({}, None, "3 tokens · 4.0 tokens/s · 1.50 tokens a step · first token 0.50 s"),
        (
            {},
            3.0,
            "/s · about 1.3 times plain (estimated) · 1.50 tokens a step · first token 0.50 s",
        ),
        ({}, 2.0, "/s · about 1.5 times plain (estimated) · 1.50 tokens a step · first token 0.50 s"),
        ({"finish_reason": "length"}, None, " · cut: /set max_tokens N allows more than 3"),
        ({"interrupted": True}, None, " · stopped by you"),
    ],
)
def test_the_figures_of_an_answer(answer: dict[str, Any], plain: float | None, told: str) -> None:
    output = StreamedChoice("a b c", [0, 1, 2], answer.get("finish_reason", "stop"), num_forwards=2)
    made = ChatAnswer(output, CallTimes(1.0, 0.5, 1), answer.get("interrupted", False))
    assert made.figures(plain, 3).endswith(told)
