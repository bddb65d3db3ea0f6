"""Servers under load: what a client sees of a server, of the engine in this process, and of what fails."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from forerun.errors import ConfigError
from forerun.lab.bench.serve import load, rows
from forerun.lab.bench.serve.load import DRIVER, PLAIN, Load, LoadWindow, MeasuredLoad, ServingArm, measure_loads
from forerun.lab.bench.serve.requests import EventReader, LoadRequest, Prompts, TimedRequest, error_of
from forerun.lab.bench.serve.servers import InProcessEngine, MeasuredServer, started
from forerun.utils.workloads import Case
from serving import Served, fake_llm, serving

OFF = {"speculative": False}
CASES = {
    "texts": [Case("a", prompt="def one():"), Case("b", prompt="def two():")],
    "chats": [
        Case("c", messages=({"role": "user", "content": "hello"},), category="x"),
        Case("d", turns=("one", "two")),
    ],
}
PROMPTS = Prompts.of(CASES)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(fake_llm()) as made:
        yield made


def requests(**more: Any) -> list[LoadRequest]:
    return PROMPTS.requests(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | more)


def ask_server(url: str, sent: Sequence[LoadRequest], **options: Any) -> list[TimedRequest]:
    async def run() -> list[TimedRequest]:
        async with MeasuredServer(url, **options) as server:
            return [await server.send(request) for request in sent]

    return asyncio.run(run())


def test_prompts_of_workloads_come_in_turn_each_to_its_path() -> None:
    made = requests(temperature=0.5)
    assert [request.path.rpartition("v1/")[2] for request in made] == ["completions", "chat/completions"] * 2
    assert [request.body["max_tokens"] for request in made] == [6, 12, 3, 9]
    assert [request.body["seed"] for request in made] == [1, 2, 3, 4]
    assert made[3].body["messages"] == [{"role": "user", "content": "one"}]
    facts = PROMPTS.facts({0: 5})
    assert [(each.workload, each.category, each.num_tokens) for each in facts[:2]] == [
        ("texts", "", 5),
        ("chats", "x", 0),
    ]
    assert len({each.digest for each in facts}) == len({each.id for each in facts}) == 4


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_events_are_read_however_they_are_cut(cut: int) -> None:
    stream = b'data: {"a": 1}\n\n: ping\n\nevent: x\r\ndata: {"b": 2}\r\n\r\ndata: [DONE]\n\n'
    reader, found = EventReader(), list[bytes]()
    for i in range(0, len(stream), cut):
        found += reader.push(stream[i : i + cut])
    assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_an_answer_is_read_with_its_times() -> None:
    def chunk(**more: Any) -> bytes:
        return json.dumps(more).encode()

    answered = TimedRequest(requests()[0], sent=1.0, ended=3.0)
    answered.read(
        [
            (1.2, chunk(choices=[{"delta": {"role": "assistant", "content": ""}}])),  # no token yet
            (1.5, chunk(choices=[{"delta": {"content": "ab"}}])),
            (2.5, chunk(choices=[{"text": "c"}], usage=None)),
            (2.6, chunk(choices=[], usage={"completion_tokens": 5, "prompt_tokens": 7})),
            (2.6, b"[DONE]"),
        ]
    )
    assert (answered.text, answered.num_tokens, answered.prompt_tokens) == ("abc", 5, 7)
    assert (answered.first_token, answered.seconds, answered.waits) == (0.5, 2.0, [1.0])
    assert answered.per_token == 0.25
    uncounted = TimedRequest(requests()[0], sent=1.0)
    uncounted.read([(2.0, chunk(choices=[{"text": "a"}])), (3.0, chunk(choices=[{"text": "b"}]))])
    assert (uncounted.num_tokens, uncounted.is_counted) == (2, False)
    for body in (b'{"error": {"message": "no"}}', b"{", b"[]"):
        failed = TimedRequest(requests()[0], sent=0)
        failed.read([(1.0, body)])
        assert failed.error
    assert error_of({"detail": "a\n b"}) == "a b"
    assert error_of(None) == "no reason is given"


def test_a_server_and_the_engine_inside_answer_alike(served: Served) -> None:
    sent = requests()
    over_http = ask_server(served.url, sent)

    async def inside() -> list[TimedRequest]:
        with InProcessEngine(fake_llm()) as engine:
            return [await engine.send(request) for request in sent]

    for one, other in zip(over_http, asyncio.run(inside()), strict=True):
        assert one.error is None and other.error is None
        assert (one.text, one.num_tokens, one.prompt_tokens) == (other.text, other.num_tokens, other.prompt_tokens)
    assert [one.num_tokens for one in over_http] == [6, 12, 3, 9]
    for one in over_http:
        assert one.is_counted and one.arrivals and one.sent <= one.arrivals[0] <= one.ended
        assert one.num_forwards


def test_what_a_server_refuses_is_told(served: Served) -> None:
    (refused,) = ask_server(served.url, requests(temperature=-1)[:1])
    assert refused.error is not None and refused.error.startswith("status 400: temperature")
    with pytest.raises(ConfigError, match="gives no answer"):
        ask_server("http://127.0.0.1:9", requests()[:1])
    (unreached,) = ask_server("http://127.0.0.1:9", requests()[:1], model="x")
    assert unreached.error is not None and not unreached.arrivals
    with pytest.raises(ConfigError, match="must begin with http"):
        ask_server("localhost:8000", requests()[:1])


def test_all_arms_get_the_same_requests(served: Served) -> None:
    async def run() -> list[MeasuredLoad]:
        with InProcessEngine(fake_llm()) as inside:
            async with MeasuredServer(served.url) as server:
                arms = [
                    ServingArm("it", "", server.send),
                    ServingArm("it", PLAIN, partial(server.send, **OFF)),
                    ServingArm(DRIVER, "", inside.send),
                ]
                return await measure_loads(arms, [Load(1), Load(3), Load(rate=200.0)], requests(), each=1, rounds=2)

    measured = asyncio.run(run())
    assert [len(each.windows) for each in measured] == [3, 3, 3]
    for each in measured:
        sent = [[answer.request for answer in window.answers] for window in each.windows[next(iter(each.windows))]]
        for windows in each.windows.values():
            assert [[answer.request for answer in window.answers] for window in windows] == sent
    made = rows.rows(measured, {"seconds": 30.0}, DRIVER)
    by_name = {(row.load.name, row.arm.name): row for row in made}
    assert by_name["3 at once", "it, plain"].over_baseline is not None
    assert all(row.failed == 0 and row.goodput == pytest.approx(row.requests) for row in made)
    assert all(row.same_text == 1 for row in made if row.arm.name == "it")
    figures = rows.figures(made)
    assert {"tokens_per_second", "over_plain", "goodput", "first_token_p99"} <= {each.name for each in figures}
    runs = [run for each in measured for run in rows.serve_run_rows(each, 0.0)]
    assert len(runs) == 2 * (3 * 8 + 3 * 8 + 3 * 1)
    assert "it, 3 at once" in {run.method for run in runs}
    assert len(rows.prompt_tokens(measured)) == 4
    table = rows.serve_table("x", made, DRIVER)
    assert "over driver thread" in table.header and "failed" not in table.header


def answered(sent: float, ended: float, **more: Any) -> TimedRequest:
    made = TimedRequest(requests()[0], sent, ended, **more)
    made.is_counted = True
    return made


def test_figures_of_a_window() -> None:
    good = answered(0, 2, arrivals=[1.0, 1.5, 2.0], num_tokens=5, text="x")
    slow = answered(0, 4, arrivals=[3.0, 4.0], num_tokens=5, text="x")
    failed = answered(0, 1, error="no")
    other = answered(0, 1, arrivals=[0.5], num_tokens=1, text="y")
    fast, plain = ServingArm("it", "", None), ServingArm("it", PLAIN, None)  # type: ignore[arg-type]
    windows = {fast: [LoadWindow(4.0, 1.0, [good, slow, failed])], plain: [LoadWindow(8.0, 1.0, [good, other, other])]}
    goal = {"first_token": 1.5, "per_token": 0.5}
    first, second = rows.rows([MeasuredLoad(Load(3), windows)], goal, "it")
    assert (first.speed.median, first.requests, first.goodput, first.client) == (2.5, 0.5, 0.25, 0.25)
    assert first.over_plain is not None and first.over_plain.median == pytest.approx(2.5 / (7 / 8))
    assert (first.failed, first.same_text) == (pytest.approx(1 / 3), 0.5)
    assert first.between.median == pytest.approx(0.5, rel=0.1) and first.first_token.median == 2.0
    assert (second.over_plain, second.same_text, second.over_baseline) == (None, None, None)
    windows[plain] = [LoadWindow(1.0, 1.0, [failed] * 3)]
    assert rows.rows([MeasuredLoad(Load(1), windows)], goal, "it")[0].over_plain is None  # nothing to divide by
    whole = {"seconds": 3.0}
    assert rows.is_kept(whole, good) and not rows.is_kept(whole, slow) and not rows.is_kept({}, failed)


def test_loads_keep_their_pattern() -> None:
    """In a closed loop so many are open, in an open one all that come."""
    open_now, most = 0, 0

    async def send(request: LoadRequest) -> TimedRequest:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.002)
        open_now -= 1
        return answered(0, 1)

    arm = ServingArm("it", "", send)
    assert len(asyncio.run(load.run_window(arm, Load(3), requests() * 5, 0)).answers) == 20
    assert most == 3
    window = asyncio.run(load.run_window(arm, Load(rate=2000.0), requests() * 5, 0))
    assert most > 3 and window.seconds > 0.002


def test_an_interrupt_leaves_the_rounds_that_are_whole() -> None:
    sent = 0

    async def send(request: LoadRequest) -> TimedRequest:
        nonlocal sent
        sent += 1
        if sent > 2 + 2 + 8 * 3:  # in the second round of the second arm
            task.cancel()
        await asyncio.sleep(0)
        return answered(0, 1, num_tokens=1)

    async def run() -> list[MeasuredLoad]:
        nonlocal task
        arms = [ServingArm("one", "", send), ServingArm("two", "", send)]
        task = asyncio.ensure_future(measure_loads(arms, [Load(1), Load(2)], requests(), 1, 5))
        return await task

    task: asyncio.Future[list[MeasuredLoad]] = None  # type: ignore[assignment]
    (found,) = asyncio.run(run())
    assert [len(windows) for windows in found.windows.values()] == [1, 1]


def test_an_arm_that_answers_nothing_is_an_error() -> None:
    async def refused(request: LoadRequest) -> TimedRequest:
        return answered(0, 1, error="status 404: no such model")

    async def empty(request: LoadRequest) -> TimedRequest:
        return answered(0, 1)

    for send, said in ((refused, "no such model"), (empty, "no text")):
        with pytest.raises(ConfigError, match=said):
            asyncio.run(measure_loads([ServingArm("it", "", send)], [Load(1)], requests(), 1, 1))


def test_a_server_that_does_not_come_up_is_told() -> None:
    with pytest.raises(ConfigError, match=r"exit code 2.*--nowhere"), started(["--nowhere"], 1):
        pass


def test_times_of_nothing_are_not_numbers() -> None:
    assert math.isnan(rows.TimeSummary.of([]).median)
