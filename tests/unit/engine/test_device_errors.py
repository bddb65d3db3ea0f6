"""A device that fails in the middle of a run: every request ends with the reason, now and later; none hangs. One that
has no memory left for a step: others go on."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from doubles import FakeModel, adversaries
from forerun import LLM, AsyncLLM, BatchError, SamplingParams
from forerun.engine import EngineThread, StepOutput
from forerun.errors import DeviceError, DeviceMemoryError, DrafterError
from forerun.models import Rows
from forerun.types import Cache
from forerun.utils.device import as_device_errors, device_error

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PROMPTS = [[i % 11, (3 * i + 1) % 11] for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LIMIT = 60.0
SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.8 GiB"


def lost() -> Exception:
    return torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered\nSearch for it in the manual.\n"
    )


def fake_llm(fake: FakeModel, drafter: Any = None, **options: Any) -> LLM:
    target: Any = fake
    return LLM(target, drafter, **{"max_batch": 4, **options})


def failing_after(fake: FakeModel, num_forwards: int, error: Exception) -> list[int]:
    """Every forward fails after so many: as on a device that has failed. What is returned has the rows of each."""
    tried: list[int] = []

    def fail(batch: Seq[Rows]) -> None:
        if fake.num_forwards >= num_forwards:
            tried.append(len(batch))
            raise error

    fake.before_forward = fail
    return tried


def all_free(fake: FakeModel) -> bool:
    return all(cache.freed for cache in fake.caches)


def test_all_requests_end_with_the_reason_and_later_ones_at_once() -> None:
    """Four run and two wait."""
    fake = FakeModel()
    llm = fake_llm(fake, adversaries({}, 11)["random"], num_draft_tokens=3)
    tried = failing_after(fake, 3, lost())
    with pytest.raises(BatchError) as raised:
        llm.generate(PROMPTS, GREEDY)
    assert tried == [4], "nothing is tried again on a device that has failed"
    errors = raised.value.errors
    assert sorted(errors) == list(range(6)) and all(type(error) is DeviceError for error in errors.values())
    assert len({id(error) for error in errors.values()}) > 1, "each may be raised, and grows a traceback of its own"
    text = str(errors[5])
    assert "cpu has failed: CUDA error: an illegal memory access was encountered. " in text and "again" in text
    assert "manual" not in text
    num_forwards, fake.before_forward = fake.num_forwards, lambda _: None
    assert llm.engine.faults.failure == text
    for _ in range(2):
        with pytest.raises(DeviceError) as later:
            llm.generate(PROMPTS[0], GREEDY)
        assert str(later.value) == text
    assert fake.num_forwards == num_forwards == 3
    assert not llm.engine.has_work and all_free(fake)


def test_a_failed_device_is_asked_nothing_when_sequences_leave() -> None:
    """What a drafter raises as it lets them go changes nothing."""

    class Dying(type(adversaries({}, 11)["random"])):  # type: ignore[misc]
        def stop(self, sequence: Any) -> None:
            super().stop(sequence)
            raise lost()

    fake, drafter = FakeModel(), adversaries({}, 11)["random"]
    drafter.__class__ = Dying
    llm = fake_llm(fake, drafter, num_draft_tokens=2)
    failing_after(fake, 2, lost())
    with pytest.raises(BatchError) as raised:
        llm.generate(PROMPTS, GREEDY)
    assert {type(error) for error in raised.value.errors.values()} == {DeviceError}
    assert all_free(fake)


@pytest.mark.parametrize("where", ["draft", "commit", "start"])
def test_what_a_drafter_meets_on_the_device_is_of_the_device(where: str) -> None:
    fake, drafter = FakeModel(), adversaries({}, 11)["random"]

    def fail(*_: object) -> None:
        raise lost()

    setattr(drafter, where, fail)
    llm = fake_llm(fake, drafter, num_draft_tokens=2)
    with pytest.raises(DeviceError):
        llm.generate(PROMPTS[0], GREEDY)
    with pytest.raises(DeviceError):
        llm.generate(PROMPTS[1], GREEDY)
    assert not llm.engine.has_work and all_free(fake)


def test_without_memory_for_a_step_its_sequences_are_tried_alone() -> None:
    """A step of two has memory; the next one of more has not. What the failed step held is free by then."""
    fake = FakeModel()
    llm = fake_llm(fake)
    held: list[weakref.ref[torch.Tensor]] = []

    def fail(batch: Seq[Rows]) -> None:
        assert not [each for each in held if each() is not None], "what the failed step held keeps memory from others"
        if len(batch) > 2:
            large = torch.empty(1)
            held.append(weakref.ref(large))
            raise torch.OutOfMemoryError(SHORT)

    fake.before_forward = fail
    gc.disable()
    try:
        answers = llm.generate(PROMPTS, GREEDY)
    finally:
        gc.enable()
    assert held
    assert [answer.token_ids for answer in answers] == [fake.greedy(prompt, 12) for prompt in PROMPTS]
    assert llm.engine.faults.failure is None


def test_without_memory_even_alone_only_that_request_fails() -> None:
    fake = FakeModel()
    llm = fake_llm(fake)

    def fail(batch: Seq[Rows]) -> None:
        if any(list(rows.token_ids)[:2] == PROMPTS[2] for rows in batch):
            raise torch.OutOfMemoryError(SHORT)

    fake.before_forward = fail
    with pytest.raises(BatchError) as raised:
        llm.generate(PROMPTS, GREEDY)
    (error,) = raised.value.errors.values()
    assert type(error) is DeviceMemoryError and list(raised.value.errors) == [2]
    assert "Tried to allocate 2.00 GiB" in str(error) and "Lower max_batch or cache_memory" in str(error)
    fake.before_forward = lambda _: None
    assert llm.generate(PROMPTS[2], GREEDY).token_ids == fake.greedy(PROMPTS[2], 12)
    assert all_free(fake)


def test_a_cache_that_finds_no_memory() -> None:
    """Pages are allocated before the model computes."""
    fake = FakeModel()
    llm, new_cache = fake_llm(fake), fake.new_cache

    def fail() -> Cache:
        raise torch.OutOfMemoryError(SHORT)

    fake.new_cache = fail  # type: ignore[method-assign]
    with pytest.raises(DeviceMemoryError):
        llm.generate(PROMPTS[0], GREEDY)
    fake.new_cache = new_cache  # type: ignore[method-assign]
    assert llm.generate(PROMPTS[0], GREEDY).token_ids == fake.greedy(PROMPTS[0], 12)


def test_the_engines_thread_ends_requests_and_refuses_new_ones() -> None:
    fake, ended = FakeModel(), threading.Semaphore(0)
    heard: list[StepOutput] = []

    def sink(output: StepOutput) -> None:
        heard.append(output)
        if output.error is not None or output.choice is not None:
            ended.release()

    failing_after(fake, 4, lost())
    llm = fake_llm(fake)
    with EngineThread(llm.shared) as thread:
        for request in llm.requests(PROMPTS, GREEDY):
            thread.enter(request, sink)
        for _ in PROMPTS:
            assert ended.acquire(timeout=LIMIT)
        assert {type(output.error) for output in heard} == {DeviceError}
        with pytest.raises(DeviceError, match="has failed"):
            llm.requests(PROMPTS, GREEDY)
        assert thread.drain(LIMIT)


def test_asynchronous_requests() -> None:
    fake = FakeModel()

    async def run() -> list[BaseException | Any]:
        async with AsyncLLM(fake_llm(fake)) as llm:
            failing_after(fake, 3, lost())
            first = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS), return_exceptions=True)
            with pytest.raises(DeviceError):
                async for _ in llm.stream(PROMPTS[0], GREEDY):
                    pass
            return first

    assert {type(each) for each in asyncio.run(asyncio.wait_for(run(), LIMIT))} == {DeviceError}


class Asked:
    """A device that has failed, or has not, and says so when it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Exception | None) -> None:
        self.devices: list[torch.device] = []
        self._answer = answer
        monkeypatch.setattr(torch.accelerator, "synchronize", self)

    def __call__(self, device: torch.device) -> None:
        self.devices.append(device)
        if self._answer is not None:
            raise self._answer


def test_an_accelerator_is_asked_whether_it_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's launcher raises a plain RuntimeError, and not every error that PyTorch reports is for good."""
    asked = Asked(monkeypatch, lost())
    found = device_error(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), CUDA)
    assert isinstance(found, DeviceError) and "cuda:0 has failed: CUDA error: an illegal" in str(found)
    assert asked.devices == [CUDA]
    Asked(monkeypatch, None)
    assert device_error(RuntimeError("no kernel"), CUDA) is None
    assert device_error(torch.AcceleratorError("CUDA error: invalid argument"), CUDA) is None
    assert isinstance(device_error(torch.OutOfMemoryError(SHORT), CUDA), DeviceMemoryError)
    of_memory = torch.AcceleratorError("CUDA error: out of memory")
    of_memory.error_code = 2  # type: ignore[attr-defined]
    assert isinstance(device_error(of_memory, CUDA), DeviceMemoryError)
    assert isinstance(device_error(of_memory, CPU), DeviceMemoryError)


def test_what_another_error_was_raised_from() -> None:
    outer = DrafterError("it failed")
    outer.__cause__ = lost()
    assert isinstance(device_error(outer, CPU), DeviceError)
    assert device_error(ValueError("a shape"), CPU) is None
    own = DeviceMemoryError("said before")
    assert device_error(own, CPU) is own


def test_around_what_computes() -> None:
    with pytest.raises(DeviceError) as raised, as_device_errors(CPU):
        raise lost()
    assert isinstance(raised.value.__cause__, torch.AcceleratorError)
    with pytest.raises(ZeroDivisionError), as_device_errors(CPU):
        raise ZeroDivisionError
