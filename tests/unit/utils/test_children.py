"""Tasks in child processes: their limits, their end with the caller, and what is kept alive."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forerun.errors import PromptError
from forerun.models import find_tokenizer
from forerun.utils import child_program, children, vocabulary
from forerun.utils.children import Children, TaskError, TaskLimitError, in_thread
from forerun.utils.vocabulary import encode_text
from small_tokenizers import byte_level, sentence_piece

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LIMIT = 60.0


@pytest.fixture
def pool() -> Iterator[Children]:
    made = Children()
    yield made
    made.close()


def render(pool: Children, template: str, seconds: float = 20.0, **given: Any) -> str:
    arguments = {"template": template, "messages": [{"role": "user", "content": "é\ud800"}], "given": given}
    return pool.perform("render", arguments, seconds=seconds)[1].decode("utf-8", "surrogatepass")


def process(pool: Children) -> int:
    """The process of the only idle child."""
    (child,) = pool._idle
    return child._process.pid


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_child_serves_one_task_after_another(pool: Children) -> None:
    assert render(pool, "{{ messages[0].content }}{{ mood }}", mood=["ß"]) == "é\ud800['ß']"
    first = process(pool)
    with pytest.raises(TaskError, match="no such"):
        render(pool, "{{ raise_exception('no such') }}")
    assert render(pool, "{{ messages | length }}") == "1"
    assert process(pool) == first


@pytest.mark.parametrize(
    ("template", "excess"),
    [
        (ENDLESS, "takes more than 0.3 s of processor time"),
        ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(99) }}", "processor time"),
        ("{{ 10 ** 300000000 }}", "takes more than 0.3 s of processor time"),
        ("{{ 'a' * 4000000000 }}", "takes more than 1 GiB of memory"),
        ("{{ messages[0].role | center(70000000) }}", "makes more than 64 MiB"),
    ],
    ids=["nested loops", "calls", "a constant", "memory", "text"],
)
def test_a_task_has_limits(pool: Children, template: str, excess: str) -> None:
    with pytest.raises(TaskLimitError, match=excess):
        render(pool, template, seconds=0.3 if "time" in excess else 20)
    assert not pool._idle
    assert render(pool, "well") == "well"


def test_a_task_that_sleeps_ends_too(pool: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_WALL_SECONDS", 0.2)
    monkeypatch.setattr(children, "_WALL_FACTOR", 0.0)
    pool.start()
    (child,) = pool._idle
    os.kill(child._process.pid, signal.SIGSTOP)
    with pytest.raises(TaskLimitError, match="has not come to an end in time"):
        render(pool, "well")


def test_memory_is_watched_where_the_kernel_does_not_bound_it(pool: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and Windows."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert render(pool, "so") == "so"
    (child,) = pool._idle
    child.most = child.resident // 2
    with pytest.raises(TaskLimitError, match="more than 1 GiB of memory"):
        render(pool, ENDLESS)
    assert not child.is_alive and render(pool, "again") == "again"


def test_what_a_child_asks_of_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = child_program._resident()
    monkeypatch.setattr(child_program, "_STATM", tmp_path / "none")
    assert here / 2 < child_program._resident() < here * 2
    given = list[int]()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", 16384, raising=False)
    monkeypatch.setattr(psutil.Process, "nice", lambda self, value: given.append(value))
    child_program._give_way()
    child_program._limit_memory(1)  # nothing there
    child_program._set_timer(1.0)
    assert given == [16384] and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_task_ends_with_its_caller(pool: Children) -> None:
    render(pool, "ready")
    pid = process(pool)

    async def left() -> None:
        task = asyncio.create_task(in_thread(lambda: render(pool, ENDLESS)))
        await asyncio.sleep(0.2)
        assert not pool._idle
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(left())
    until(lambda: gone(pid))
    assert not pool._idle


def test_whoever_has_left_begins_nothing(pool: Children) -> None:
    failures: list[str] = []
    begin, ended = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait(LIMIT)
        try:
            render(pool, "late")
        except TaskError as failure:
            failures.append(str(failure))

    async def left() -> None:
        task = asyncio.create_task(in_thread(work, None, ended.set))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        begin.set()
        while not ended.is_set():
            await asyncio.sleep(0.01)

    asyncio.run(left())
    assert failures == ["its caller has left"]


def test_only_a_few_run_at_once(pool: Children) -> None:
    threads = [threading.Thread(target=render, args=(pool, "well")) for _ in range(3 * children.MOST_CHILDREN)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert 0 < len(pool._idle) <= children.MOST_CHILDREN


def test_idle_children_end_but_for_one(pool: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_IDLE_SECONDS", 0.05)
    both = [children._Child(), children._Child()]
    for child in both:
        pool._give_back(child, False)
    until(lambda: len(pool._idle) == 1)
    until(lambda: not both[0].is_alive)
    (kept,) = pool._idle
    kept.resident = children._LARGE + 1
    pool._give_back(pool._take(), False)
    until(lambda: not pool._idle)


def test_a_child_that_has_ended_is_replaced(pool: Children) -> None:
    render(pool, "well")
    os.kill(process(pool), signal.SIGKILL)
    until(lambda: not pool._idle[0].is_alive)
    assert render(pool, "well") == "well"


FORKED = """
import os
from forerun.utils.children import RENDERERS
def render():
    arguments = {"template": "{{ messages[0].content }}", "messages": [{"content": os.getpid()}], "given": {}}
    return int(RENDERERS.perform("render", arguments, seconds=20)[1])
assert render() == os.getpid()
if (child := os.fork()) == 0:
    assert render() == os.getpid()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert render() == os.getpid()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_children_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120)


def test_no_child_outlives_its_parent() -> None:
    code = (
        "import os; from forerun.utils.children import RENDERERS; RENDERERS.start(); "
        "print(RENDERERS._idle[0]._process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    until(lambda: gone(int(done.stdout)))


@pytest.mark.parametrize("make", [byte_level, sentence_piece, lambda: find_tokenizer("bundled")])
@pytest.mark.parametrize("special", [False, True])
def test_long_texts_have_the_same_tokens(make: Any, special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|mark|>"]})
    text = "hello wörld! 12345 <|mark|></s>\n" * 30
    expected = encode_text(tokenizer, text, special=special)
    monkeypatch.setattr(vocabulary, "_LONG", 100)
    assert encode_text(tokenizer, text, special=special) == expected


def test_a_text_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_SECONDS", 0.02)
    monkeypatch.setattr(vocabulary, "_SECONDS_PER_CHARACTER", 0.0)
    with pytest.raises(PromptError, match=r"A text of 4,000,000 characters takes more than 0\.02 s of processor time"):
        encode_text(find_tokenizer("bundled"), "words " * 666_666 + "four", special=False)
