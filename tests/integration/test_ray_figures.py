r"""What replicas on Ray cost and give, printed as rows of docs/scaling.md:

    FORERUN_RAY_PYTHON=ENV/bin/python make test-all ARGS='-s tests/integration/test_ray_figures.py'

Leave the machine alone meanwhile. Each engine has one thread.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from forerun.utils.workloads import load_workload
from ray_served import MISSING, PYTHON, Served, served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason=MISSING)]

ROUNDS = int(os.environ.get("FORERUN_RAY_ROUNDS", "3"))
REQUESTS, CLIENTS = 96, 16
SINGLE = 40
CHATS, TURNS, ANSWER = 4, 8, 32
SMOLLM2 = Path.home() / ".cache" / "forerun" / "models" / "smollm2"
RAY = ("--ray", "--replica-threads", "1")


@dataclass
class Load:
    """What a load took. engines, others: CPU seconds of the server's processes; client: of this one."""

    seconds: float
    num_tokens: int
    engines: float
    others: float
    client: float

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds


def bodies(count: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    cases = load_workload("code")
    return [
        {"prompt": rng.choice(cases).prompt[:400] + f"# {number}\n", "max_tokens": 64, "ignore_eos": True}
        | {"temperature": 0}
        for number in range(count)
    ]


def under_load(servers: Sequence[Served], *, stream: bool, requests: int = REQUESTS) -> Load:
    """Every client sends its next request when the one before is answered."""
    clients = [httpx.Client(base_url=server.url, timeout=300) for server in servers]
    before = [server.seconds() for server in servers]
    own, start = time.process_time(), time.perf_counter()

    def one(sent: tuple[dict[str, Any], httpx.Client]) -> int:
        body, client = sent
        if not stream:
            return int(client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"])
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert response.status_code == 200
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        return int(body["max_tokens"])

    with ThreadPoolExecutor(CLIENTS) as pool:
        tokens = sum(pool.map(one, zip(bodies(requests), cycle(clients), strict=False)))
    seconds, own = time.perf_counter() - start, time.process_time() - own
    after = [server.seconds() for server in servers]
    engines, others = (sum(b[part] - a[part] for a, b in zip(before, after)) for part in (0, 1))
    return Load(seconds, tokens, engines, others, own)


def line(name: str, loads: Sequence[Load]) -> str:
    found = [median(each) for each in zip(*((x.speed, x.engines, x.others, x.client) for x in loads))]
    speeds = ", ".join(f"{each.speed:.0f}" for each in loads)
    return f"| {name} | {found[0]:.0f} ({speeds}) | {found[1]:.1f} | {found[2]:.1f} | {found[3]:.1f} |"


def first_tokens(server: Served) -> list[float]:
    """Milliseconds to the first event of a stream, one request at a time."""
    found = []
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for body in bodies(SINGLE):
            start = time.perf_counter()
            asked = {**body, "max_tokens": 2, "stream": True}
            with http.stream("POST", "/v1/completions", json=asked) as response:
                lines = response.iter_lines()
                next(lines)
                found.append(1e3 * (time.perf_counter() - start))
                for _ in lines:  # to its end
                    pass
    return found


def test_throughput() -> None:
    with ExitStack() as stack:
        bare = [stack.enter_context(served("bundled")) for _ in range(2)]
        two = stack.enter_context(served("bundled", *RAY, "--replicas", "2"))
        loads: dict[str, list[Load]] = {}
        for servers in (bare, [two]):
            under_load(servers, stream=False, requests=CLIENTS)  # their first requests
        for _ in range(ROUNDS):
            loads.setdefault("two bare servers", []).append(under_load(bare, stream=False))
            loads.setdefault("Ray, two replicas", []).append(under_load([two], stream=False))
        for _ in range(ROUNDS):
            loads.setdefault("two bare servers, streamed", []).append(under_load(bare, stream=True))
            loads.setdefault("Ray, two replicas, streamed", []).append(under_load([two], stream=True))
        times = {"a bare server": first_tokens(bare[0]), "Ray": first_tokens(two)}
    with served("bundled", *RAY, "--replicas", "1") as one:
        under_load([one], stream=True, requests=CLIENTS)
        loads["Ray, one replica, streamed"] = [under_load([one], stream=True) for _ in range(ROUNDS)]
    print("\n| load | tokens/s: median (all) | CPU s: engines | others | client |\n|---|---|---|---|---|")
    for name, each in loads.items():
        print(line(name, each))
    speeds = {name: median(load.speed for load in each) for name, each in loads.items()}
    ratio = speeds["Ray, two replicas"] / speeds["two bare servers"]
    over_one = speeds["Ray, two replicas, streamed"] / speeds["Ray, one replica, streamed"]
    print(f"over two bare servers, not streamed: {ratio:.3f}; two replicas over one, streamed: {over_one:.3f}")
    middle = {name: median(each) for name, each in times.items()}
    part = 1 - middle["a bare server"] / middle["Ray"]
    print(f"first token, ms (median): {middle}; Ray's part {part:.2f}")
    assert 0 < ratio < 1.5


def message(number: int, rng: random.Random) -> dict[str, str]:
    """What a user says next."""
    words = [f"{rng.choice(('river', 'house', 'number', 'letter', 'winter', 'music'))} {number}" for _ in range(12)]
    return {"role": "user", "content": f"Tell me something about {', '.join(words)}."}


def recomputed(routing: str, *, session: bool = False) -> tuple[int, int]:
    """(tokens of prompts that were computed, all of them) of chats of 8 turns, in a random order of their turns."""
    rng = random.Random(5)
    more = ("--replicas", "2", "--routing", routing, "--drafter", "none")
    with served(str(SMOLLM2), *RAY, *more) as running, httpx.Client(base_url=running.url, timeout=300) as http:
        said: list[list[dict[str, Any]]] = [[] for _ in range(CHATS)]
        order = [number for number in range(CHATS) for _ in range(TURNS)]
        rng.shuffle(order)
        computed = total = 0
        for number in order:
            said[number].append(message(number, rng))
            body = {"messages": said[number], "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
            headers = {"x-session-id": f"chat {number}"} if session else {}
            made = http.post("/v1/chat/completions", json=body, headers=headers).json()
            said[number].append({"role": "assistant", "content": made["choices"][0]["message"]["content"]})
            tokens = made["usage"]["prompt_tokens"]
            total += tokens
            computed += tokens - made["usage"]["prompt_tokens_details"]["cached_tokens"]
    return computed, total


@pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not fetched: forerun fetch smollm2")
def test_prompts_are_not_computed_twice() -> None:
    found = {
        "at random": recomputed("balanced"),  # with equal queues, Ray's own router takes one of two at random
        "prefix": recomputed("prefix"),
        "session (consistent hash)": recomputed("session", session=True),
    }
    print("\n| routing | prompt tokens computed | of | over random |\n|---|---|---|---|")
    for name, (computed, total) in found.items():
        print(f"| {name} | {computed} | {total} | {computed / found['at random'][0]:.3f} |")
    assert found["prefix"][0] <= 0.65 * found["at random"][0]
