"""One LLM, several threads: each gets its own answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from doubles import FakeModel, adversaries
from forerun import LLM, SamplingParams
from forerun.types import Draft, Sequence

LIMIT = 60.0
"""Seconds that a test waits for its threads."""
PROMPTS = [[i % 11, (3 * i + 1) % 11, i // 11] for i in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=14)


def open_llm(max_batch: int = 32) -> LLM:
    fake = FakeModel()
    references = {tuple(prompt): fake.greedy(prompt, 20) for prompt in PROMPTS}
    target: Any = fake
    return LLM(target, adversaries(references, 11)["random"], num_draft_tokens=3, max_batch=max_batch)


def in_threads(bodies: list[Callable[[], object]]) -> None:
    """Run them all, and raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("max_batch", [1, 4, 32])
def test_every_thread_gets_its_own_answers(max_batch: int) -> None:
    llm = open_llm(max_batch)
    fake: Any = llm.target
    together = []
    fake.before_forward = lambda batch: together.append(len(batch))

    def generates(part: list[list[int]]) -> Callable[[], None]:
        def body() -> None:
            for prompt in part:
                assert llm.generate([prompt], GREEDY)[0].token_ids == fake.greedy(prompt, 14)

        return body

    def streams(part: list[list[int]]) -> Callable[[], None]:
        def body() -> None:
            for prompt in part:
                ids = [token_id for chunk in llm.stream(prompt, GREEDY) for token_id in chunk.token_ids]
                assert ids == fake.greedy(prompt, 14)

        return body

    in_threads([(generates, streams)[i % 2](PROMPTS[i::6]) for i in range(6)])
    assert not llm.engine.has_work
    assert all(cache.freed for cache in fake.caches)
    assert max(together) <= max_batch


def test_requests_of_two_threads_are_computed_together() -> None:
    """While one thread is in a step, another one's request waits for its end, and then joins."""
    llm = open_llm()
    fake: Any = llm.target
    inside, entered = threading.Event(), threading.Event()
    together: list[int] = []

    def hold(batch: Any) -> None:
        together.append(len(batch))
        inside.set()
        if len(together) == 2:
            assert entered.wait(LIMIT)  # the other thread is at the door

    fake.before_forward = hold

    def first() -> None:
        assert llm.generate([PROMPTS[0]], GREEDY)[0].token_ids == fake.greedy(PROMPTS[0], 14)

    def second() -> None:
        assert inside.wait(LIMIT)
        entering = llm.shared._entering
        add = entering.add

        class Watched(set[object]):
            def add(self, ticket: object) -> None:
                add(ticket)
                super().add(ticket)
                entered.set()

        llm.shared._entering = Watched(entering)
        assert llm.generate([PROMPTS[1]], GREEDY)[0].token_ids == fake.greedy(PROMPTS[1], 14)

    in_threads([first, second])
    assert max(together) == 2


def test_a_stream_that_is_given_up_inside_a_step_of_another() -> None:
    """As a garbage collector does it, in whatever thread it runs: the step under way is not waited for."""
    llm = open_llm()
    fake: Any = llm.target
    streams = [llm.stream(PROMPTS[0], GREEDY)]
    next(streams[0])

    fake.before_forward = lambda _: streams.clear()  # nobody else holds it: its generator is closed here
    in_threads([lambda: bool(llm.generate([PROMPTS[1]], GREEDY))])
    assert not llm.engine.has_work and not llm.shared._inboxes
    assert all(cache.freed for cache in fake.caches)


def test_errors_hold_no_tokens() -> None:
    secret = [7, 7, 3, 9, 10]
    sequence = Sequence(5, secret, 3, GREEDY)
    for text in (repr(sequence), str(KeyError(sequence)), repr(Draft.chain(secret))):
        assert "7" not in text and "token_ids" not in text
    assert repr(sequence) == "Sequence(id=5, 5 tokens)"


def test_a_failed_request_leaves_the_engine_to_the_others() -> None:
    llm = open_llm()
    fake: Any = llm.target

    def fail(batch: Any) -> None:
        if any((rows.cache.tokens or rows.token_ids)[0] == 5 for rows in batch):
            raise OSError("out of paper")

    fake.before_forward = fail
    good, bad = PROMPTS[1], [5, 5]

    def fails() -> None:
        with pytest.raises(OSError, match="paper"):
            list(llm.stream(bad, GREEDY))

    def works() -> None:
        assert llm.generate([good], GREEDY)[0].token_ids == fake.greedy(good, 14)

    in_threads([fails, works, works, fails])
    assert not llm.engine.has_work
