"""EngineThread: requests that nobody waits for, handed to sinks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from doubles import FakeModel, adversaries
from forerun import LLM, EngineClosedError, PromptError, SamplingParams
from forerun.engine import EngineThread, StepOutput

LIMIT = 60.0
"""Seconds that a test waits for a thread."""
PROMPTS = [[i % 11, (3 * i + 1) % 11, i // 11] for i in range(40)]
GREEDY = SamplingParams(temperature=0, max_tokens=14)


@dataclass
class Heard:
    """A sink that keeps what it is given."""

    num_choices: int = 1
    outputs: list[StepOutput] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, output: StepOutput) -> None:
        self.outputs.append(output)
        if len(self.last) == self.num_choices:
            self.ended.set()

    @property
    def last(self) -> list[StepOutput]:
        return [output for output in self.outputs if output.choice is not None or output.error is not None]

    @property
    def token_ids(self) -> list[int]:
        """Of the one choice, once it has ended."""
        assert self.ended.wait(LIMIT)
        choice = self.last[0].choice
        assert choice is not None
        return choice.token_ids

    @property
    def error(self) -> Exception | None:
        assert self.ended.wait(LIMIT)
        return self.last[0].error


@pytest.fixture
def llm() -> LLM:
    fake = FakeModel()
    references = {tuple(prompt): fake.greedy(prompt, 20) for prompt in PROMPTS}
    target: Any = fake
    return LLM(target, adversaries(references, 11)["random"], num_draft_tokens=3, max_batch=4)


@pytest.fixture
def thread(llm: LLM) -> Iterator[EngineThread]:
    with EngineThread(llm.shared) as thread:
        yield thread
    fake: Any = llm.target
    assert not llm.engine.has_work and not llm.shared._inboxes and not thread._jobs and not thread._inside
    assert all(cache.freed for cache in fake.caches)


def submit(thread: EngineThread, prompt: list[int], params: SamplingParams, sink: Any, *, stream: bool = False) -> int:
    """Submit a request; return its id."""
    (request,) = thread._shared.engine.requests([prompt], params, stream=stream)
    thread.enter(request, sink)
    return request.id


class RequestMiddleware:
    """Holds every forward until it is opened."""

    def __init__(self, llm: LLM) -> None:
        self.inside, self._open = threading.Event(), threading.Event()
        fake: Any = llm.target
        fake.before_forward = self._hold

    def _hold(self, _: Any) -> None:
        self.inside.set()
        assert self._open.wait(LIMIT)

    def open(self) -> None:
        self._open.set()


def test_a_request_has_the_tokens_of_the_same_request_alone(llm: LLM, thread: EngineThread) -> None:
    fake: Any = llm.target
    heard, streamed = Heard(), Heard()
    first = submit(thread, PROMPTS[0], GREEDY, heard)
    second = submit(thread, PROMPTS[1], GREEDY, streamed, stream=True)
    assert heard.token_ids == fake.greedy(PROMPTS[0], 14)
    assert len(heard.outputs) == 1
    assert streamed.token_ids == fake.greedy(PROMPTS[1], 14)
    assert [token for output in streamed.outputs for token in output.chunk.token_ids] == streamed.token_ids
    assert len(streamed.outputs) > 1
    assert {output.request_id for output in heard.outputs} == {first} != {second}


def test_every_choice_ends(llm: LLM, thread: EngineThread) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=9)
    heard = Heard(3)
    submit(thread, PROMPTS[0], params, heard)
    assert heard.ended.wait(LIMIT)
    alone = llm.generate([PROMPTS[0]], params)[0]
    assert sorted(output.choice.token_ids for output in heard.last if output.choice) == sorted(
        choice.token_ids for choice in alone.choices
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_submissions_and_aborts(llm: LLM, thread: EngineThread, seed: int) -> None:
    """Three threads submit and abort as they like while a fourth uses the LLM; each request's tokens are its own."""
    fake: Any = llm.target
    failures: list[BaseException] = []

    def client(number: int) -> None:
        rng = random.Random(f"{seed}, {number}")
        mine: list[tuple[int, list[int], SamplingParams, Heard]] = []
        for _ in range(12):
            prompt, num_tokens = rng.choice(PROMPTS), rng.randrange(1, 25)
            params = SamplingParams(temperature=0, max_tokens=num_tokens)
            heard = Heard()
            mine.append((submit(thread, prompt, params, heard, stream=rng.random() < 0.5), prompt, params, heard))
            if rng.random() < 0.4:
                thread.abort(rng.choice(mine)[0])
            if rng.random() < 0.1:
                thread.abort(10**6)
        for request_id, prompt, params, heard in mine:
            found, whole = heard.token_ids, fake.greedy(prompt, params.max_tokens)
            assert heard.error is None and heard.outputs[-1] is heard.last[0] and len(heard.last) == 1
            choice = heard.last[0].choice
            assert choice is not None and choice.finish_reason in ("length", "abort")
            assert found == whole[: len(found)]
            assert found == whole or choice.finish_reason == "abort"
            assert heard.last[0].request_id == request_id

    def user(_: int) -> None:
        for prompt in PROMPTS[:6]:
            assert llm.generate([prompt], GREEDY)[0].token_ids == fake.greedy(prompt, 14)

    def guarded(body: Any, number: int) -> None:
        try:
            body(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(client, i), daemon=True) for i in range(3)]
    threads.append(threading.Thread(target=guarded, args=(user, 3), daemon=True))
    for each in threads:
        each.start()
    for each in threads:
        each.join(LIMIT)
    assert not any(each.is_alive() for each in threads), "a thread hangs"
    if failures:
        raise failures[0]
    assert thread.drain(LIMIT)


def test_an_abort_while_it_enters_and_while_it_runs(llm: LLM, thread: EngineThread) -> None:
    gate = RequestMiddleware(llm)
    running, entering, other = Heard(), Heard(), Heard()
    first = submit(thread, PROMPTS[0], GREEDY, running)
    assert gate.inside.wait(LIMIT)
    thread.abort(first)
    thread.abort(first)
    thread.abort(submit(thread, PROMPTS[1], GREEDY, entering))
    submit(thread, PROMPTS[2], GREEDY, other)
    gate.open()
    fake: Any = llm.target
    assert other.token_ids == fake.greedy(PROMPTS[2], 14)
    for heard in (running, entering):
        assert heard.ended.wait(LIMIT) and len(heard.last) == 1
        choice = heard.last[0].choice
        assert choice is not None and choice.finish_reason == "abort" and len(choice.token_ids) < 14


def test_a_sink_that_raises_ends_its_request_alone(llm: LLM, thread: EngineThread) -> None:
    fake: Any = llm.target
    calls, other = [], Heard()

    def broken(output: StepOutput) -> None:
        calls.append(output)
        raise SystemExit("no paper")

    submit(thread, PROMPTS[0], SamplingParams(temperature=0, max_tokens=4000), broken, stream=True)
    submit(thread, PROMPTS[1], GREEDY, other)
    assert other.token_ids == fake.greedy(PROMPTS[1], 14)
    assert thread.drain(LIMIT)  # not after 4,000 tokens: it was aborted
    assert len(calls) == 1
    assert fake.num_forwards < 2000


def test_drain_with_work_under_way(llm: LLM, thread: EngineThread) -> None:
    fake: Any = llm.target
    gate, heard = RequestMiddleware(llm), [Heard() for _ in range(9)]
    for prompt, each in zip(PROMPTS, heard):
        submit(thread, prompt, GREEDY, each)
    assert gate.inside.wait(LIMIT)
    assert not thread.drain(0.01)
    with pytest.raises(EngineClosedError, match="takes no more requests"):
        submit(thread, PROMPTS[0], GREEDY, Heard())
    gate.open()
    assert thread.drain(LIMIT)
    assert all(each.ended.is_set() for each in heard)  # the sinks have had all, too
    assert [each.token_ids for each in heard] == [fake.greedy(prompt, 14) for prompt in PROMPTS[:9]]


def test_closing_ends_what_is_under_way_and_leaves_the_llm(llm: LLM, thread: EngineThread) -> None:
    fake: Any = llm.target
    gate, heard = RequestMiddleware(llm), [Heard(2) for _ in range(6)]
    for prompt, each in zip(PROMPTS, heard):
        submit(thread, prompt, SamplingParams(n=2, seed=1, max_tokens=50), each, stream=True)
    assert gate.inside.wait(LIMIT)
    closing = threading.Thread(target=thread.close, daemon=True)
    closing.start()
    while thread._accepting:
        pass
    gate.open()
    closing.join(LIMIT)
    assert not closing.is_alive()
    for each in heard:
        assert isinstance(each.error, EngineClosedError) and len(each.last) == 2
    with pytest.raises(EngineClosedError):
        submit(thread, PROMPTS[0], GREEDY, Heard())
    assert llm.generate([PROMPTS[0]], GREEDY)[0].token_ids == fake.greedy(PROMPTS[0], 14)
    thread.close()


def test_what_cannot_be_served_is_refused_at_once(thread: EngineThread) -> None:
    with pytest.raises(PromptError, match="is empty"):
        submit(thread, [], GREEDY, Heard())
    with pytest.raises(PromptError, match="outside the vocabulary"):
        submit(thread, [11], GREEDY, Heard())


def test_a_failed_request_leaves_the_others(llm: LLM, thread: EngineThread) -> None:
    fake: Any = llm.target

    def fail(batch: Any) -> None:
        if any((rows.cache.tokens or rows.token_ids)[0] == 5 for rows in batch):
            raise OSError("out of paper")

    fake.before_forward = fail
    bad, good = Heard(), Heard()
    submit(thread, [5, 5], GREEDY, bad)
    submit(thread, PROMPTS[1], GREEDY, good)
    assert good.token_ids == fake.greedy(PROMPTS[1], 14)
    assert isinstance(bad.error, OSError)


def test_an_engine_that_fails_as_a_whole_ends_all_and_the_thread_goes_on(
    llm: LLM, thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Any = llm.target
    heard = [Heard(), Heard()]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "advance", lambda: 1 / 0)
        for each in heard:
            submit(thread, PROMPTS[0], GREEDY, each)
            assert isinstance(each.error, ZeroDivisionError)
    again = Heard()
    submit(thread, PROMPTS[0], GREEDY, again)
    assert again.token_ids == fake.greedy(PROMPTS[0], 14)


def test_a_request_that_the_engine_refuses_ends_by_its_sink(
    llm: LLM, thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that finds the queue full."""

    def full(*_: Any, **__: Any) -> int:
        raise EngineClosedError("no room")

    heard = Heard(2)
    monkeypatch.setattr(llm.engine, "enqueue", full)
    submit(thread, PROMPTS[0], SamplingParams(n=2), heard)
    assert isinstance(heard.error, EngineClosedError) and len(heard.last) == 2
