"""Which replica a request goes to: beginnings, sessions, queues, what is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.integrations.ray.affinity import PIECE, Affinity, prefix_of
from forerun.integrations.ray.messages import Prefix

LONG = "once upon a time " * 100
USER = {"role": "user", "content": LONG}
REPLY = {"role": "assistant", "content": "and so on " * 40}


def chat(*messages: dict[str, Any], session: str = "", tenant: str | None = None, **more: Any) -> Prefix:
    return prefix_of({"messages": [*messages], **more}, tenant, session)


def test_a_chat_that_goes_on_begins_with_all_of_itself() -> None:
    first, second = chat(USER), chat(USER, REPLY, {"role": "user", "content": "go on"})
    assert second.keys[: len(first.keys)] == first.keys and len(second.keys) > len(first.keys)
    assert second.lengths[: len(first.lengths)] == first.lengths
    assert [*second.lengths] == sorted(second.lengths)


@pytest.mark.parametrize(
    "other",
    [
        chat(USER, tenant="key 1"),
        chat({"role": "system", "content": "be brief"}, USER),
        chat(USER, tools=[{"type": "function"}]),
        prefix_of({"prompt": "o" + LONG}, None, ""),
    ],
    ids=["tenant", "system", "tools", "text"],
)
def test_what_does_not_begin_alike(other: Prefix) -> None:
    assert not set(chat(USER).keys) & set(other.keys)


@pytest.mark.parametrize(
    ("body", "pieces"),
    [
        ({"prompt": "a" * (3 * PIECE)}, 3),
        ({"prompt": ["a" * PIECE, "b"]}, 1),
        ({"prompt": list(range(9))}, 1),
        ({"prompt": [[1, 2], [3]]}, 1),
        ({"input": "hello"}, 1),
        ({"instructions": "be brief", "input": [USER]}, 1 + -(-len(LONG) // PIECE)),
        ({"messages": [1, None]}, 2),
        ({"messages": "\ud800"}, 1),
        ({"messages": {}}, 0),
        ({}, 0),
        ([], 0),
        (None, 0),
        ({"prompt": "a" * 10_000_000}, 512),
    ],
    ids=lambda value: str(value)[:30],
)
def test_every_body_has_a_prefix(body: Any, pieces: int) -> None:
    assert abs(len(prefix_of(body, None, "").keys) - pieces) <= (1 if "instructions" in str(body) else 0)


def test_a_keystroke_goes_where_the_files_are() -> None:
    files = [{"filename": "a.py", "text": LONG}, {"filename": "b.py", "text": "short"}]
    before = {"input_prefix": LONG, "input_suffix": "", "prompt": "x", "input_extra": files}
    after = {**before, "prompt": "xy", "input_suffix": "z"}
    affinity: Affinity[str] = Affinity(slack=4)
    affinity.sent(prefix_of(before, None, ""), "b")
    assert affinity.ranked(prefix_of(after, None, ""), {"a": 0, "b": 0}) == [["b"], ["a"]]
    assert affinity.ranked(prefix_of({**after, "input_extra": []}, None, ""), {"a": 0, "b": 1}) == [["a"], ["b"]]
    first, moved = (prefix_of(each, None, "") for each in (before, {**after, "input_prefix": "another " * 100}))
    common = len(set(first.keys) & set(moved.keys))
    assert first.lengths[common - 1] >= len(LONG) + len("short")


def test_a_request_goes_where_its_beginning_is() -> None:
    affinity: Affinity[str] = Affinity(slack=4)
    affinity.sent(chat(USER), "b")
    affinity.sent(chat({"role": "user", "content": "another " * 100}), "a")
    going_on = chat(USER, REPLY)
    assert affinity.ranked(going_on, {"a": 0, "b": 0}) == [["b"], ["a"]]
    assert affinity.ranked(going_on, {"a": 0, "b": 4}) == [["b"], ["a"]]
    assert affinity.ranked(going_on, {"a": 0, "b": 5})[0] == ["a"]  # it yields
    assert affinity.ranked(going_on, {"a": 1, "c": 0})[0] == ["c"]  # b is gone


def test_the_longest_beginning_wins() -> None:
    affinity: Affinity[str] = Affinity(slack=4)
    affinity.sent(chat(USER), "a")
    affinity.sent(chat(USER, REPLY), "b")
    assert affinity.ranked(chat(USER, REPLY, USER), {"a": 0, "b": 3})[0] == ["b"]


def test_less_than_a_page_counts_for_nothing() -> None:
    affinity: Affinity[str] = Affinity(slack=4)
    system = {"role": "system", "content": "be brief"}
    for _ in range(3):
        affinity.sent(chat(system), "a")
    assert affinity.ranked(chat(system, USER), {"a": 0, "b": 0})[0] == ["b"]  # which has had fewer


def test_new_conversations_are_spread() -> None:
    affinity: Affinity[str] = Affinity(slack=4)
    sent = []
    for number in range(10):
        prefix = chat({"role": "user", "content": f"{number} " * 200})
        sent.append(affinity.ranked(prefix, {"a": 0, "b": 0})[0][0])
        affinity.sent(prefix, sent[-1])
    assert sent.count("a") == sent.count("b") == 5


def test_a_session_keeps_its_replica() -> None:
    affinity: Affinity[str] = Affinity(slack=1)
    affinity.sent(chat(USER), "a")
    affinity.sent(chat(REPLY, session="x"), "b")
    assert affinity.ranked(chat(USER, session="x"), {"a": 0, "b": 9}) == [["b"], ["a"]]
    assert affinity.ranked(chat(USER, session="x", tenant="key 2"), {"a": 0, "b": 9})[0] == ["a"]
    affinity.sent(chat(USER, session="x"), "a")  # b was full
    assert affinity.ranked(chat(REPLY, session="x"), {"a": 0, "b": 0})[0] == ["a"]


def test_memory_is_bounded_and_replicas_are_forgotten() -> None:
    affinity: Affinity[str] = Affinity(slack=4, most=50)
    for number in range(100):
        affinity.sent(chat({"role": "user", "content": f"{number} " * 200}, session=str(number)), "a")
    assert len(affinity._holders) == 50
    affinity.sent(chat(USER), "b")
    affinity.keep({"a": 0})
    assert affinity.ranked(chat(USER), {"a": 0, "b": 0})[0] == ["b"]  # new, with nothing sent yet
    assert all(holders == {"a"} for holders in affinity._holders.values())
    assert affinity.ranked(chat(USER), {}) == []
