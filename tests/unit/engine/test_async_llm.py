"""AsyncLLM: answers and streams for asyncio; cancellation ends a request."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from doubles import FakeModel, adversaries
from forerun import LLM, AsyncLLM, BatchError, ConfigError, EngineClosedError, Generation, PromptError, SamplingParams

LIMIT = 60.0
PROMPTS = [[i % 11, (3 * i + 1) % 11, i // 11] for i in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=14)
LONG = SamplingParams(temperature=0, max_tokens=3000)

Body = Callable[[AsyncLLM, Any], Coroutine[Any, Any, None]]


@pytest.fixture
def run() -> Callable[[Body], None]:
    """Run a body with an AsyncLLM and its fake model; afterwards nothing may be left."""

    def run(body: Body) -> None:
        fake = FakeModel()
        references = {tuple(prompt): fake.greedy(prompt, 20) for prompt in PROMPTS}
        target: Any = fake

        async def main() -> None:
            async with AsyncLLM(target, adversaries(references, 11)["random"], num_draft_tokens=3, max_batch=4) as llm:
                await asyncio.wait_for(body(llm, fake), LIMIT)
            assert not llm.thread._jobs and not llm.llm.shared._inboxes and not llm.llm.engine.has_work
            assert all(cache.freed for cache in fake.caches)

        asyncio.run(main())

    return run


async def ended(llm: AsyncLLM) -> None:
    """Wait until no request is left."""
    while llm.thread._jobs:
        await asyncio.sleep(0.001)


def test_one_and_several(run: Any) -> None:
    async def body(llm: AsyncLLM, fake: FakeModel) -> None:
        one = await llm.generate(PROMPTS[0], GREEDY)
        assert isinstance(one, Generation) and one.token_ids == fake.greedy(PROMPTS[0], 14)
        assert one.prompt_token_ids == PROMPTS[0]
        several = await llm.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in several] == [fake.greedy(prompt, 14) for prompt in PROMPTS]
        sampled = SamplingParams(n=3, seed=2, max_tokens=8, prompt_logprobs=1)
        choices = (await llm.generate(PROMPTS[0], sampled)).choices
        alone = llm.llm.generate(PROMPTS[0], sampled)
        assert [choice.token_ids for choice in choices] == [choice.token_ids for choice in alone.choices]
        assert alone.prompt_logprobs is not None

    run(body)


def test_streams_side_by_side(run: Any) -> None:
    async def body(llm: AsyncLLM, fake: FakeModel) -> None:
        async def follow(prompt: list[int]) -> list[int]:
            return [token async for chunk in llm.stream(prompt, GREEDY) for token in chunk.token_ids]

        found = await asyncio.gather(*map(follow, PROMPTS))
        assert found == [fake.greedy(prompt, 14) for prompt in PROMPTS]

    run(body)


def test_cancelling_a_task_ends_its_request(run: Any) -> None:
    async def body(llm: AsyncLLM, fake: FakeModel) -> None:
        inside = threading.Event()
        fake.before_forward = lambda _: inside.set()
        several = asyncio.create_task(llm.generate(PROMPTS, LONG))
        one = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
        other = asyncio.create_task(llm.generate(PROMPTS[1], GREEDY))
        await asyncio.to_thread(inside.wait, LIMIT)
        while len(llm.thread._jobs) < 25 + (not other.done()):
            await asyncio.sleep(0.001)
        for task in (several, one):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await other).token_ids == fake.greedy(PROMPTS[1], 14)
        await ended(llm)
        assert fake.num_forwards < 1000

    run(body)


def test_closing_an_iterator_ends_its_request(run: Any) -> None:
    async def body(llm: AsyncLLM, fake: FakeModel) -> None:
        stream = llm.stream(PROMPTS[0], LONG)
        async for _ in stream:
            break
        await stream.aclose()
        await ended(llm)
        async for _ in llm.stream(PROMPTS[1], LONG):
            break  # nobody else holds it
        gc.collect()
        await ended(llm)
        assert fake.num_forwards < 1000
        never_started = llm.stream(PROMPTS[2], LONG)
        assert not llm.thread._jobs
        await never_started.aclose()

    run(body)


def test_a_stream_whose_task_is_cancelled(run: Any) -> None:
    async def body(llm: AsyncLLM, fake: FakeModel) -> None:
        begun = asyncio.Event()

        async def follow() -> None:
            async for _ in llm.stream(PROMPTS[0], LONG):
                begun.set()

        task = asyncio.create_task(follow())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ended(llm)
        assert fake.num_forwards < 1000

    run(body)


def test_errors_reach_their_consumer_alone(run: Any) -> None:
    async def body(llm: AsyncLLM, fake: FakeModel) -> None:
        def fail(batch: Any) -> None:
            if any((rows.cache.tokens or rows.token_ids)[0] == 5 for rows in batch):
                raise OSError("out of paper")

        fake.before_forward = fail
        good = asyncio.create_task(llm.generate(PROMPTS[1], GREEDY))
        with pytest.raises(OSError, match="paper"):
            await llm.generate([5, 5], GREEDY)
        with pytest.raises(OSError, match="paper"):
            _ = [chunk async for chunk in llm.stream([5, 5], GREEDY)]
        with pytest.raises(BatchError) as caught:
            await llm.generate([PROMPTS[1], [5, 5]], GREEDY)
        assert caught.value.generations[0].token_ids == fake.greedy(PROMPTS[1], 14)
        assert isinstance(caught.value.errors[1], OSError)
        with pytest.raises(PromptError, match="outside the vocabulary"):  # before the other is computed
            await llm.generate([PROMPTS[1], [99]], GREEDY)
        assert (await good).token_ids == fake.greedy(PROMPTS[1], 14)

    run(body)


def test_closing_while_streams_are_open(run: Any) -> None:
    async def body(llm: AsyncLLM, fake: FakeModel) -> None:
        begun = asyncio.Semaphore(0)

        async def follow(prompt: list[int]) -> None:
            with pytest.raises(EngineClosedError):  # noqa: PT012
                async for _ in llm.stream(prompt, LONG):
                    begun.release()

        tasks = [asyncio.create_task(follow(prompt)) for prompt in PROMPTS[:6]]
        await begun.acquire()
        await llm.close()
        await asyncio.gather(*tasks)
        with pytest.raises(EngineClosedError):
            await llm.generate(PROMPTS[0], GREEDY)
        assert llm.llm.generate([PROMPTS[0]], GREEDY)[0].token_ids == fake.greedy(PROMPTS[0], 14)

    run(body)


def test_drain(run: Any) -> None:
    async def body(llm: AsyncLLM, fake: FakeModel) -> None:
        under_way = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
        while not llm.thread._jobs and not under_way.done():
            await asyncio.sleep(0)
        assert await llm.drain(LIMIT)
        assert (await under_way).token_ids == fake.greedy(PROMPTS[0], 14)
        with pytest.raises(EngineClosedError):
            await llm.generate(PROMPTS[0], GREEDY)

    run(body)


def test_the_engine_of_an_llm() -> None:
    fake: Any = FakeModel()
    llm = LLM(fake, None)

    async def main() -> None:
        async with AsyncLLM(llm) as shared:
            assert shared.llm is llm
            both = await asyncio.gather(
                shared.generate(PROMPTS[0], GREEDY), asyncio.to_thread(llm.generate, PROMPTS[1], GREEDY)
            )
        assert [each.token_ids for each in both] == [fake.greedy(prompt, 14) for prompt in PROMPTS[:2]]

    asyncio.run(asyncio.wait_for(main(), LIMIT))
    with pytest.raises(ConfigError, match="together with drafter, max_batch"):
        AsyncLLM(llm, drafter="suffix", max_batch=2)
