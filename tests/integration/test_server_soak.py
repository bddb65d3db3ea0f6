"""Requests of mixed kinds through HTTP, with clients that leave, read slowly or send nonsense.

No answer is lost or mixed up, also when SIGTERM comes amid 64 streams, and when nobody is there nothing has grown. And
a server that was killed starts again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.server.options import ServerOptions
from forerun.server.run import bound_socket, share_one_arena
from mixed_requests import COMPLETIONS, DRAFTERS, Answer, Asked, load, mixed
from pool_integrity import check_integrity
from serving import LIMIT, Served, serving, until
from soaking import LONG, SEND_TIMEOUT, STREAMS, drive

NUM_REQUESTS, ROUND, SETTLED_AFTER = 2000, 250, 1000
"""Requests; between two looks; after which memory may grow by 1 % at most. Until then, caches fill."""
NUM_DISTINCT = 500
"""Requests that have a twin: each is sent several times, by clients of several kinds."""
EVERY = 0.1
"""Seconds between two times that freed memory is given back."""


share_one_arena()  # before any test, as the command does before it has threads: arenas of other tests would count


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tables(served: Served) -> tuple[Any, ...]:
    """What is held while nobody is there: pages of sequences, the drafters' bytes, entries of tables."""
    llm, thread = served.llm, served.service.engine.thread
    assert llm.target.pool is not None and llm.drafter is not None
    pools = (llm.target.pool, *llm.drafter.pools)
    for each in pools:
        check_integrity(each)
    held = tuple(each.num_taken - each.num_published for each in pools)  # type: ignore[attr-defined]
    engine = llm.engine
    counts = (
        len(engine.scheduler),
        len(engine.outputs),
        len(thread._jobs),
        len(thread._inside),
    )
    return held, counts, len(llm.shared._inboxes), llm.drafter.nbytes


def small(options: ServerOptions) -> socket.socket:
    """A listening socket that lets little wait for a reader."""
    made = bound_socket(options)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return made


Answered = list[tuple[int, Answer]]
"""By the place of what was asked."""


def check(asked: list[Asked], answers: Answered, parts: Answered) -> None:
    """Each answer is its twin's, and each part the beginning of it."""
    plain = load(drafter=None, max_batch=1)
    twins = {place: asked[place].twin(plain) for place in {place for place, _ in answers + parts}}
    for place, answer in answers:
        assert answer == twins[place], asked[place]
    for place, part in parts:
        for (text, _), (whole, _) in zip(part, twins[place], strict=True):
            assert whole.startswith(text), asked[place]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_nothing_is_lost_and_nothing_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.bound_socket", small)
    monkeypatch.setattr("forerun.server.run._EVERY", EVERY)
    llm = load(drafter=[*DRAFTERS], max_batch=6, seed=0)
    pool, rng = llm.target.pool, random.Random(11)
    assert pool is not None and llm.drafter is not None
    pool.limit(9)  # too few for a full batch of the longer ones
    for each in llm.drafter.pools:
        each.limit(48)  # what is kept for later prompts is then full long before memory is looked at
    asked = [mixed(rng, llm) for _ in range(NUM_DISTINCT)]
    looks, preemptions, counts = [], 0, Counter[str]()
    answers: Answered = []
    parts: Answered = []
    with (
        serving(llm, send_timeout=SEND_TIMEOUT) as served,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients,
    ):
        record = served.service.record

        def counted(output: Any, *rest: Any) -> None:
            nonlocal preemptions
            preemptions += output.choice.stats.num_preemptions
            record(output, *rest)

        monkeypatch.setattr(served.service, "record", counted)
        for begin in range(0, NUM_REQUESTS, ROUND):
            soak = clients.submit(drive, served.url, asked, begin, begin + ROUND).result()
            served.settle()
            gc.collect()
            time.sleep(20 * EVERY)  # until what was freed has been given back
            answers, parts, counts = answers + soak.answers, parts + soak.parts, counts + soak.counts
            looks.append((begin + ROUND, tables(served), resident()))
            print(*looks[-1], dict(counts), f"{preemptions} preemptions", flush=True)
        last = clients.submit(drive, served.url, asked, NUM_REQUESTS, NUM_REQUESTS + STREAMS)
        until(lambda: served.server._middleware.num_active >= STREAMS * 3 // 4)
        num_begun = served.server._middleware.num_active
        served.server.handle_exit(signal.SIGTERM, None)
        soak = last.result()
        print(f"SIGTERM amid {num_begun} of {STREAMS} streams:", dict(soak.counts))
        assert num_begun <= len(soak.answers) == STREAMS - soak.counts["refused"]
        answers += soak.answers
    settled = next(memory for number, _, memory in looks if number >= SETTLED_AFTER)
    print(f"{settled} bytes resident after {SETTLED_AFTER} requests, {looks[-1][2]} at the end")
    check(asked, answers, parts)
    print(f"{len(answers)} answers are their twins', {len(parts)} parts their beginnings")
    assert len({held for _, held, _ in looks}) == 1
    assert preemptions and counts["cut"] and counts["leaves"] >= 200 and counts["slow"] >= 20
    assert counts.total() == NUM_REQUESTS and not counts["refused"]
    assert max(memory for number, _, memory in looks if number >= SETTLED_AFTER) < 1.01 * settled


def started(port: int) -> tuple[subprocess.Popen[bytes], float]:
    """A server of the bundled model that answers, and the seconds until it did."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun", "serve", "bundled", "--port", str(port)], stderr=subprocess.DEVNULL
    )
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0}
    while True:
        assert process.poll() is None and time.monotonic() < begun + 2 * LIMIT
        try:
            assert httpx.post(f"http://127.0.0.1:{port}{COMPLETIONS}", json=body, timeout=LIMIT).status_code == 200
            return process, time.monotonic() - begun
        except httpx.TransportError:
            time.sleep(0.02)


@pytest.mark.slow
def test_a_server_that_was_killed_starts_again() -> None:
    with bound_socket(ServerOptions(port=0)) as free:
        port = free.getsockname()[1]
    process, first = started(port)
    try:
        for _ in range(2):
            with httpx.stream("POST", f"http://127.0.0.1:{port}{COMPLETIONS}", json=LONG, timeout=LIMIT) as response:
                next(response.iter_bytes())
                process.send_signal(signal.SIGKILL)
                process.wait(LIMIT)
            process, again = started(port)
            print(f"first answer {first:.1f} s after the start, {again:.1f} s after a SIGKILL and a start")
            assert again < 1.5 * first + 1
    finally:
        process.kill()
        process.wait(LIMIT)
