"""What is remembered by tenant: said lately or before, sorted, forgotten."""

from __future__ import annotations

import errno
import logging
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from forerun.drafters.lookup.remembered import answer_file, remembered_text
from forerun.drafters.lookup.remembered.answer_file import NUM_SEGMENTS
from forerun.drafters.lookup.remembered.remembered_text import CONTEXT_TOKENS, RememberedText
from forerun.drafters.lookup.remembered.sorted_answers import SortedAnswers
from forerun.drafters.lookup.suffix_automaton import SuffixAutomaton

LEAST_BYTES = 4096 * (1 + NUM_SEGMENTS)
VOCAB = 70_000
ANSWER = list(range(100, 160))


def opened(path: Path) -> RememberedText:
    text = RememberedText(path, None, VOCAB, "f", default_bytes=LEAST_BYTES)
    text.start()
    return text


def num_new(text: RememberedText) -> int:
    """Tokens that are not sorted yet."""
    return sum(each.new.num_tokens for each in text._tenants.values())


def copied(text: RememberedText, context: list[int], tenant: str | None) -> list[list[int]]:
    return [each.token_ids for each in text.position(tenant).copies(context, 2, lambda _: 6)]


def test_an_answer_is_found_at_once_and_after_a_restart_by_its_tenant_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "answers") as text:
        assert copied(text, ANSWER[:5], None) == []
        text.write(ANSWER, 3, None)
        assert copied(text, ANSWER[:5], None) == [ANSWER[5:11]]
        assert copied(text, ANSWER[:5], "key 1") == []
    with opened(tmp_path / "answers") as text:
        assert copied(text, ANSWER[:5], None) == [ANSWER[5:11]]
        other = [*ANSWER[:5], *range(900, 920)]
        text.write(other, 0, "key 1")
        assert copied(text, ANSWER[:5], None) == [ANSWER[5:11]]
        assert copied(text, ANSWER[:5], "key 1") == [other[5:11]]
        text.write(other, 0, None)
        assert copied(text, ANSWER[:5], None) == [other[5:11], ANSWER[5:11]]
        before = num_new(text)
        text.write(ANSWER, len(ANSWER), None)  # no answer at all
        assert num_new(text) == before
    held = (tmp_path / "answers").read_bytes()
    assert b"key 1" not in held


def test_the_end_of_the_prompt_is_kept_with_the_answer(tmp_path: Path) -> None:
    prompt = list(range(1000, 1200))
    with opened(tmp_path / "answers") as text:
        text.write([*prompt, *ANSWER], len(prompt), None)
        assert num_new(text) == CONTEXT_TOKENS + len(ANSWER)
        assert copied(text, prompt, None) == [ANSWER[:6]]


def test_a_growing_sequence_finds_what_a_new_one_finds(tmp_path: Path) -> None:
    with opened(tmp_path / "answers") as text:
        for start in range(0, 300, 7):
            text.write([(start * start + at * 13) % 40 for at in range(30)], 0, None)
        text._sort()
        text.write([(at * at) % 40 for at in range(90)], 0, None)
        sequence = [(at * at) % 40 for at in range(8)]
        position = text.position(None)
        for at in range(8, 90):
            sequence += [(at * at) % 40] * (1 + at % 3)
            if at % 5 == 0:
                continue  # a step in which nothing is searched
            grown = [each.token_ids for each in position.copies(sequence, 2, lambda _: 6)]
            assert grown == copied(text, sequence, None)
            if at == 50:
                text._sort()  # all is old now
                assert num_new(text) == 0


def test_what_the_file_forgets_is_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path / "answers") as text:
        text.write(ANSWER, 0, "first")
        for number in range(100):
            text.write([number * 100 + at for at in range(90)], 0, "second")
            text.settle()
        assert copied(text, ANSWER[:5], "first") == []
        assert copied(text, [105, 106], "second") == []
        assert copied(text, [9905, 9906], "second") == [[9907 + at for at in range(6)]]
        assert len(text._tenants) == 1
    assert (tmp_path / "answers").stat().st_size == LEAST_BYTES


def test_much_is_sorted_in_another_thread_and_found_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "answers") as text:
        text.write(ANSWER, 0, None)
    monkeypatch.setattr(remembered_text, "_MOST_NEW", 7)
    with opened(tmp_path / "answers") as text:
        text.settle()
        assert copied(text, ANSWER[:5], None) == [ANSWER[5:11]]
        text.write([*ANSWER[:5], 7, 8, 9], 0, None)
        text.settle()
        assert num_new(text) == 0
        assert copied(text, [*ANSWER[:5], 7], None) == [[8, 9]]


def test_few_tenants_are_in_memory_and_others_come_back_when_they_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered_text, "_MOST_TENANTS", 3)
    with opened(tmp_path / "answers") as text:
        for number in range(8):
            text.write([number, *ANSWER], 0, f"key {number}")
    with opened(tmp_path / "answers") as text:
        assert [*text._tenants] == [text._file.header.hashed(f"key {number}") for number in (5, 6, 7)]
        assert copied(text, [7, 100], "key 7") == [ANSWER[1:7]]
        text.position("key 1")
        text.settle()
        assert copied(text, [1, 100], "key 1") == [ANSWER[1:7]]
        assert len(text._tenants) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_after_an_interrupt_nothing_is_half_written_and_all_is_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    add = remembered_text._add

    def interrupted(automaton: SuffixAutomaton, token_ids: list[int]) -> None:
        add(automaton, token_ids[:7])
        raise error

    with opened(tmp_path / "answers") as text:
        with monkeypatch.context() as patched:
            patched.setattr(remembered_text, "_add", interrupted)
            with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
                text.write(ANSWER, 0, None)  # no error of its own ends a request
        assert (error is KeyboardInterrupt) != bool(caplog.records)
        assert num_new(text) == 0
        text._sort()
        assert copied(text, ANSWER[:5], None) == [ANSWER[5:11]]


def test_where_sorting_fails_memory_stays_bounded_and_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(remembered_text, "_MOST_NEW", 200)
    with opened(tmp_path / "answers") as text:
        with monkeypatch.context() as patched:
            patched.setattr(remembered_text, "SortedAnswers", full)
            for number in range(60):
                text.write([number * 100 + at for at in range(50)], 0, None)
                text.settle()
                assert num_new(text) <= 400
        assert [each.getMessage() for each in caplog.records] == ["What is remembered is not sorted: MemoryError."]
        monkeypatch.setattr(text, "_sorts_again", 0.0)
        text.write(ANSWER, 0, None)
        text.settle()
        assert num_new(text) == 0
        assert copied(text, [5805, 5806], None) == [[5807 + at for at in range(6)]]


def test_what_is_asked_and_said_while_another_is_sorted_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "answers") as text:
        for number in range(3):
            text.write([number, *ANSWER], 0, f"key {number}")
    monkeypatch.setattr(remembered_text, "_MOST_TENANTS", 2)
    sort = SortedAnswers
    begun = threading.Semaphore(0)
    goes_on = threading.Semaphore(0)

    def slow(*args: Any) -> SortedAnswers:
        begun.release()
        assert goes_on.acquire(timeout=10)
        return sort(*args)

    with opened(tmp_path / "answers") as text:
        monkeypatch.setattr(remembered_text, "SortedAnswers", slow)
        text.position("key 0")
        assert begun.acquire(timeout=10)
        text.write([0, 100, 55, 56], 0, "key 0")
        assert copied(text, [0, 100], "key 0") == [[55, 56]]
        text.position("key 1")  # whom the former has pushed out
        goes_on.release()
        assert begun.acquire(timeout=10)
        assert copied(text, [0, 100], "key 0") == [[55, 56], ANSWER[1:7]]
        goes_on.release(2)
        text.settle()
        assert copied(text, [1, 100], "key 1") == [ANSWER[1:7]]
        assert num_new(text) == 0


def test_a_disk_that_fails_is_told_once_and_costs_answers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path / "answers") as text, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(answer_file, "_write_at", full)
        text.write(ANSWER, 0, None)
        text.write(ANSWER, 0, None)
        assert copied(text, ANSWER[:5], None) == []
        (told,) = caplog.records
        assert told.getMessage().startswith("Answers are not remembered for 60 seconds: ")
        assert told.getMessage().endswith("answers cannot be written: No space left on device.")


def test_a_file_that_is_cut_short_meanwhile_has_no_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "answers") as text:
        text.write(ANSWER, 0, None)
        os.truncate(tmp_path / "answers", 100)
        text._sort()
        assert copied(text, ANSWER[:5], None) == []
    assert not caplog.records
    text.write(ANSWER, 0, None)  # after the end nothing is remembered, nothing fails, and a line says so
    assert "closed file" in caplog.text
