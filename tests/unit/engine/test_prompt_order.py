"""The order in which prompts are computed, by a clock that simulates what rows cost."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import fmean

import pytest

from doubles import FakeModel
from forerun.config import EngineConfig, SamplingParams
from forerun.engine import Engine
from forerun.engine.scheduler import DELAY, MAX_ROWS, STALL
from forerun.models import Rows

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CPU = (0.005, 0.0016)
"""Seconds of a step apart from its rows, and of a row."""
GPU = (0.010, 0.00002)


class Clients:
    """Clients that come at given times, of an engine whose steps take as long as their rows say.

    Attributes:
        now: seconds.
        steps: the duration of each step, and the rows of prompts in it.
    """

    def __init__(self, cost: tuple[float, float], *, stream: bool = True) -> None:
        self.now = 0.0
        self.steps: list[tuple[float, int]] = []
        self.fake = FakeModel(context_length=2**14)
        self._fixed, self._row = cost
        self._stream = stream
        self.fake.before_forward = self._pass
        self.engine = Engine(self.fake, None, config=EngineConfig(max_batch=64), clock=lambda: self.now)
        for length in (2, MAX_ROWS):  # the engine learns what steps cost
            self.first_tokens([(self.now, length)])
        self.steps.clear()

    def _pass(self, batch: Seq[Rows]) -> None:
        self.now += self._fixed + self._row * sum(len(rows.token_ids) for rows in batch)

    def first_tokens(self, clients: Seq[tuple[float, int]], num_tokens: int = 8) -> list[float]:
        """Return the seconds that each waits for its first token. clients: time of its coming, length of its prompt."""
        waiting = sorted(range(len(clients)), key=lambda index: clients[index][0])
        names: dict[int, int] = {}
        found: dict[int, float] = {}
        texts: dict[int, list[int]] = {}
        while waiting or self.engine.has_work:
            while waiting and (clients[waiting[0]][0] <= self.now or not self.engine.has_work):
                index = waiting.pop(0)
                self.now = max(self.now, clients[index][0])
                prompt = [index % 11] * clients[index][1]
                params = replace(GREEDY, max_tokens=num_tokens)
                (request,) = self.engine.requests([prompt], params, stream=self._stream, flow=object())
                self.engine.enqueue(request)
                names[request.id] = index
            begun = self.now
            for output in self.engine.step():
                index = names[output.request_id]
                if output.chunk.token_ids:
                    found.setdefault(index, self.now - clients[index][0])
                if output.choice is not None:
                    texts[index] = output.choice.token_ids
            self.steps.append((self.now - begun, self.engine.last_step.num_prompt_rows))
        for index, (_, length) in enumerate(clients):  # whatever the order
            assert texts[index] == self.fake.greedy([index % 11] * length, num_tokens)
        return [found[index] for index in range(len(clients))]


def test_short_prompts_are_computed_one_after_another_where_rows_cost_most_of_a_step() -> None:
    """Together, all eight would wait for all rows."""
    fixed, row = CPU
    clients = Clients(CPU)
    waits = clients.first_tokens([(clients.now, 60)] * 8)
    together = fixed + row * 8 * 60
    assert fmean(waits) < 0.65 * together
    assert max(waits) < 1.3 * together


def test_short_prompts_are_computed_together_where_a_step_costs_more_than_their_rows() -> None:
    clients = Clients(GPU)
    waits = clients.first_tokens([(clients.now, 60)] * 8)
    assert len(set(waits)) == 1 and clients.steps[0][1] == 8 * 60


def test_prompts_that_nobody_watches_are_computed_together() -> None:
    """A batch has no first token, and steps of many rows cost least."""
    clients = Clients(CPU, stream=False)
    clients.first_tokens([(clients.now, 60)] * 8)
    assert clients.steps[0][1] == 8 * 60


def test_eight_at_once_wait_as_if_one_came_after_another() -> None:
    """Also beside the answers of those that came first, which go on at reading speed."""
    fixed, row = CPU
    clients = Clients(CPU)
    waits = clients.first_tokens([(clients.now, 300)] * 8, 48)
    alone = 300 * row
    assert fmean(waits) < 1.25 * fmean(alone * (index + 1) for index in range(8))
    begun = next(index for index, (_, rows) in enumerate(clients.steps) if rows == 0 or rows < 200)
    assert max(seconds for seconds, _ in clients.steps[begun:]) < STALL + 2 * fixed + 16 * row


@pytest.mark.parametrize("length", [60, 300])
def test_a_long_prompt_yields_to_short_ones(length: int) -> None:
    _, row = CPU
    clients = Clients(CPU)
    begun = clients.now
    long, *short = clients.first_tokens([(begun, 6000), *((begun + 1 + 2 * index, length) for index in range(4))])
    longest_step = 256 * row
    assert max(short) < longest_step + 1.6 * length * row + 0.1
    assert long < 1.2 * (6000 + 4 * length) * row


def test_a_long_prompt_is_not_starved_by_short_ones_without_end() -> None:
    """They come as fast as the machine computes them; the oldest has a quarter of each step."""
    _, row = CPU
    clients = Clients(CPU)
    begun = clients.now
    shorts = [(begun + 300 * row * (index + 1), 300) for index in range(60)]
    long, *_ = clients.first_tokens([(begun, 3000), *shorts], 1)
    assert long < 4.4 * 3000 * row < 60 * 300 * row


def test_a_long_prompt_beside_an_answer_lengthens_its_steps_by_so_much_and_no_more() -> None:
    fixed, row = CPU
    clients = Clients(CPU)
    begun = clients.now
    clients.first_tokens([(begun, 4), (begun + 0.01, 2000)], 100)
    beside = [seconds for seconds, rows in clients.steps if 0 < rows < 100][:50]
    assert len(beside) > 30 and max(beside) < (1 + 1.3 * DELAY) * (fixed + row) + 8 * row


def test_of_one_tenant_the_higher_priority_comes_first_however_long_its_prompt() -> None:
    """Nothing is kept for the lower one, though it is older."""
    engine = Engine(FakeModel(), None, config=EngineConfig(prefill_chunk=MAX_ROWS))
    engine.add([2] * 20, GREEDY, stream=True)
    high = engine.add([1] * (3 * MAX_ROWS), replace(GREEDY, priority=1), stream=True)
    begun: list[int] = []
    while not begun:
        begun += [output.request_id for output in engine.step() if output.chunk.token_ids]
    assert begun == [high]
