"""Ctrl-C waits for the end of a step; what interrupts a step all the same ends or takes back its sequences."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from doubles import FakeModel, Scripted
from forerun import LLM, SamplingParams
from forerun.config import EngineConfig
from forerun.drafters import Suffix
from forerun.drafters.lookup.suffix_automaton import ROOT, SuffixAutomaton
from forerun.engine import Engine
from forerun.engine.engine import HeldInterrupts
from forerun.errors import InterruptedRequestError

from .test_engine import GREEDY, PROMPTS, assert_clean, drafter, model, run, tokens

pytestmark = pytest.mark.usefixtures("sigint_handled")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_sigint_waits_for_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with HeldInterrupts(), HeldInterrupts():
            press()
            done.append(1)
        done.append(2)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_sigint_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():  # noqa: PT012
        press()
        done.append(1)
        press()
        done.append(2)
    assert done == [1]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_other_handlers_are_left_alone(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with HeldInterrupts():
        assert signal.getsignal(signal.SIGINT) is handler


def test_threads_have_no_signals_to_hold() -> None:
    seen: list[Any] = []

    def body() -> None:
        with HeldInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_ctrl_c_loses_no_finished_output() -> None:
    """The step in which it comes finishes a request; the next step returns it."""
    fake = model()
    engine = Engine(fake, drafter(fake, "right"), config=EngineConfig(num_draft_tokens=4))
    ids = [engine.add(prompt, SamplingParams(temperature=0, max_tokens=n)) for prompt, n in zip(PROMPTS, (1, 9))]
    fake.before_forward = lambda _: press()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    fake.before_forward = lambda _: None
    last = run(engine)
    assert tokens(last[ids[0], 0]) == fake.greedy(PROMPTS[0], 1)
    assert tokens(last[ids[1], 0]) == fake.greedy(PROMPTS[1], 9)
    assert_clean(engine)


def test_another_stream_goes_on_after_ctrl_c() -> None:
    fake = FakeModel()
    llm = LLM(fake, Suffix(), num_draft_tokens=4)  # type: ignore[arg-type]
    stream = llm.stream([1, 2, 3], GREEDY)
    ids = list(next(stream).token_ids)
    fake.before_forward = lambda _: press()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[4], [5, 6]], GREEDY)
    fake.before_forward = lambda _: None
    for chunk in stream:
        ids += chunk.token_ids
    assert ids == fake.greedy([1, 2, 3], 14)
    assert not llm.engine.has_work


def test_an_interrupted_commit_ends_its_sequence_alone() -> None:
    """A cache that was interrupted while it committed is not used again."""
    fake = model()
    engine = Engine(fake, drafter(fake, "right"), config=EngineConfig(num_draft_tokens=4))
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
    engine.step()

    def commit(_: object) -> None:
        raise KeyboardInterrupt

    fake.caches[1].commit = commit  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    last = run(engine)
    assert isinstance(last[ids[1], 0].error, InterruptedRequestError)
    for index in (0, 2):
        assert tokens(last[ids[index], 0]) == fake.greedy(PROMPTS[index], 14)
    assert_clean(engine)


@pytest.mark.parametrize("place", ["draft", "commit", "observe"])
def test_an_interrupt_elsewhere_loses_nothing(place: str) -> None:
    fake = model()
    plan = drafter(fake, "right")
    engine = Engine(fake, plan, config=EngineConfig(num_draft_tokens=2))
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    engine.step()
    owner: Any = engine._loop._policy if place == "observe" else plan
    inner, hits = getattr(owner, place), iter([True])

    def interrupt(*arguments: Any) -> Any:
        if next(hits, False):
            raise KeyboardInterrupt
        return inner(*arguments)

    setattr(owner, place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    last = run(engine)
    assert [tokens(last[each, 0]) for each in ids] == [fake.greedy(prompt, 14) for prompt in PROMPTS]
    assert_clean(engine)


def test_an_exception_outside_of_any_sequence_ends_the_step_and_no_more() -> None:
    fake = model()
    engine = Engine(fake, drafter(fake, "right"), config=EngineConfig(num_draft_tokens=2, max_batch=2))
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
    inner, hits = engine._loop.observe, iter([True])

    def observe(*arguments: Any) -> None:
        if next(hits, False):
            raise ZeroDivisionError
        inner(*arguments)

    engine._loop.observe = observe  # type: ignore[method-assign]
    last = run(engine)
    assert [type(last[each, 0].error) for each in ids] == [ZeroDivisionError, ZeroDivisionError, type(None)]
    assert tokens(last[ids[2], 0]) == fake.greedy(PROMPTS[2], 14)
    assert_clean(engine)


def test_an_interrupt_between_admission_and_start_loses_no_request() -> None:
    fake = model()
    plan = Scripted(lambda *_: [])
    engine = Engine(fake, plan, config=EngineConfig(num_draft_tokens=2))
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    inner, calls = plan.start, iter(range(99))

    def start(sequence: Any) -> None:
        inner(sequence)
        if next(calls) == 1:
            raise KeyboardInterrupt

    plan.start = start  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    last = run(engine)
    assert [tokens(last[each, 0]) for each in ids] == [fake.greedy(prompt, 14) for prompt in PROMPTS]
    assert_clean(engine)


def test_a_half_added_state_does_not_loop() -> None:
    """A state without link and continuation, as an interrupt of `add` leaves it."""
    automaton = SuffixAutomaton()
    end = ROOT
    for token in (1, 2, 1, 2):
        end = automaton.add(end, token)
    half = automaton._new_state(5)
    assert automaton.continued(half, 5) == (ROOT, 0)
    assert automaton.match(half, 5, 9) == (ROOT, 0)
    assert automaton.copy(half, 5, 4) == ([], [])


@pytest.mark.parametrize("sharing", [True, False])
def test_text_that_sequences_share_is_dropped(sharing: bool) -> None:
    fake = model()
    suffix = Suffix(share=sharing)
    engine = Engine(fake, suffix, config=EngineConfig(num_draft_tokens=2))
    engine.add(PROMPTS[0], SamplingParams(temperature=0, max_tokens=14, tenant="a"))
    engine.step()
    before = suffix._tenants
    fake.before_forward = lambda _: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    fake.before_forward = lambda _: None
    assert (suffix._tenants is before) != sharing
    assert tokens(run(engine)[0, 0]) == fake.greedy(PROMPTS[0], 14)
