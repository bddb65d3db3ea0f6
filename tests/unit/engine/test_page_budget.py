"""The pool's pages: who may take them, and in which order. What is promised to one is not given to another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from doubles import adversaries
from forerun.config import EngineConfig, SamplingParams
from forerun.engine import Engine, StepOutput
from pooled import PAGE, PooledModel

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MANY = 12
"""Draft tokens that take three pages."""


def engine_of(num_pages: int, prompts: list[list[int]] | None = None, k: int = 0, **options: object) -> Engine:
    """An engine whose drafter is right about these prompts; without them there is none."""
    fake = PooledModel(num_pages)
    references = {tuple(prompt): fake.greedy(prompt, 60) for prompt in prompts or []}
    drafter = adversaries(references, fake.vocab_size)["right"] if prompts else None
    return Engine(fake, drafter, config=EngineConfig(num_draft_tokens=k, prefix_reuse="off", **options))


def finished(engine: Engine) -> dict[int, StepOutput]:
    """The last output of each request, none of which has failed."""
    last: dict[int, StepOutput] = {}
    while engine.has_work:
        for output in engine.step():
            last[output.request_id] = output
    assert [output.error for output in last.values() if output.error] == []
    return last


def preemptions(last: dict[int, StepOutput]) -> int:
    return sum(output.choice.stats.num_preemptions for output in last.values() if output.choice is not None)


@pytest.mark.parametrize(("length", "waits"), [(PAGE - 1, False), (PAGE, True)])
def test_who_enters_finds_pages_for_the_prompt_and_the_token_after_it(length: int, waits: bool) -> None:
    """Else the place would be lost in the next step, and the prompt be computed twice."""
    engine = engine_of(3)
    engine.add([1] * 5, replace(GREEDY, max_tokens=4))  # two pages to its end
    engine.step()
    engine.add([2] * length, replace(GREEDY, max_tokens=2))
    engine.step()
    assert len(engine.scheduler.waiting) == waits
    assert preemptions(finished(engine)) == 0


@pytest.mark.parametrize(
    ("prompt", "num_steps", "waits"),
    [(7, 1, True), (7, 2, True), (7, 3, True), (3, 2, True), (2, 1, False)],
    ids=["begun", "half computed", "almost computed", "a full page", "room in the page"],
)
def test_who_enters_takes_no_page_that_another_needs(prompt: int, num_steps: int, waits: bool) -> None:
    """For the rest of its prompt and the token after it; there are two pages."""
    engine = engine_of(2, prefill_chunk=2)
    engine.add([1] * prompt, replace(GREEDY, max_tokens=8 - prompt))
    for _ in range(num_steps):
        engine.step()
    engine.add([2] * 3, replace(GREEDY, max_tokens=5 if waits else 1))
    engine.step()
    assert len(engine.scheduler.waiting) == waits
    assert preemptions(finished(engine)) == 0


def test_drafts_leave_the_pages_of_prompts_beside_them() -> None:
    """One that takes three pages beside a prompt that takes two, where there are four."""
    engine = engine_of(5, [[1, 2, 3], [4] * 8], MANY)
    engine.add([1, 2, 3], GREEDY)
    engine.step()
    engine.add([4] * 8, GREEDY)
    engine.step()
    assert (engine.last_step.reason, engine.last_step.num_rows) == ("no room", 1 + 8)
    finished(engine)


@pytest.mark.parametrize(
    ("num_pages", "length", "asked", "rows"),
    [
        (8, 3, (MANY, MANY), 2 * (1 + MANY)),  # three pages each
        (7, 3, (MANY, MANY), 1 + MANY + 1),  # not for the second
        (7, 3, (MANY, 8), 1 + MANY + 1 + 8),  # exactly: the tokens themselves take none
        (4, 3, (MANY, 8), 1 + 1 + 8),  # the first is left out, and takes nothing from the second
        (4, 4, (3, 3), 2 * (1 + 3)),  # in the pages that the tokens themselves take
        (4, 4, (4, 4), 2),
        (5, 4, (4, 4), 1 + 4 + 1),
    ],
)
def test_drafts_are_made_as_far_as_pages_reach(num_pages: int, length: int, asked: tuple[int, int], rows: int) -> None:
    prompts = [[1, 2, 3, 4][:length], [4, 5, 6, 7][:length]]
    engine = engine_of(num_pages, prompts, MANY)
    for prompt, k in zip(prompts, asked):
        engine.add(prompt, replace(GREEDY, max_tokens=30, num_draft_tokens=k))
    engine.step()
    engine.step()
    assert engine.last_step.num_rows == rows
