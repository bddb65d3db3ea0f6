"""Ranks: messages, what they must have in common, and what is said of one that is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.config import RANK_TIMEOUT_VARIABLE
from forerun.errors import ConfigError, RankError
from forerun.ranks.facts import compare, first_difference
from forerun.ranks.joining import join_by_file, launched_rank
from forerun.ranks.orders import FIRST, packed, receive, send, unpacked
from forerun.ranks.peers import Peers, rank_timeout
from forerun.ranks.process_state import Process, end_stopped, told
from thread_ranks import connected


def together(*calls: Any) -> list[Any]:
    """What each call returns or raises, all of them at once."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("count", [2, 3])
def test_parts_come_in_rank_order(count: int) -> None:
    every = connected(count)
    parts = [torch.full((2, 3), float(rank)) for rank in range(count)]
    for found in together(*(lambda r=r: every[r].exchange(parts[r]) for r in range(count))):
        assert [float(part[0, 0]) for part in found] == list(range(count))
    found = together(*(lambda r=r: every[r].to_leader(parts[r]) for r in range(count)))
    assert [float(part[0, 0]) for part in found[0]] == list(range(count))
    assert found[1:] == [None] * (count - 1)
    assert all(peers.moved.gathers == 2 for peers in every)


def test_all_must_agree() -> None:
    one, two = connected(2)
    assert together(lambda: one.agree(True), lambda: two.agree(False)) == [False, False]
    assert together(lambda: one.agree(True), lambda: two.agree(True)) == [True, True]


def test_a_real_group_moves_bytes_and_nothing_else(tmp_path: Path) -> None:
    """By gloo. What a collective reduction would need is not asked for: the wrapper refuses it."""

    class OnlyMoves:
        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def __getattr__(self, name: str) -> Any:
            assert name in ("send", "recv"), f"{name} is not among what ranks may ask of each other"
            return getattr(self._backend, name)

    def rank(number: int) -> Any:
        peers = join_by_file(tmp_path / "store", number, 2)
        peers._backend = OnlyMoves(peers._backend)
        compare(peers, {"torch": torch.__version__})
        found = peers.exchange(torch.full((8,), float(number)))
        if number == 0:
            send(peers, {"kind": "test"}, [torch.ones(3, dtype=torch.bfloat16)])
            return found
        return found, receive(peers)

    leader, (follower, (order, tensors)) = together(lambda: rank(0), lambda: rank(1))
    assert [float(part[0]) for part in leader] == [float(part[0]) for part in follower] == [0.0, 1.0]
    assert order == {"kind": "test"}
    assert torch.equal(tensors[0], torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("size", [0, 5, 9000])
def test_orders_are_what_was_sent(size: int) -> None:
    tensors = [torch.randn(size), torch.arange(4)[:, None], torch.randn(2, 3).bfloat16()]
    data = packed({"a": [1, None, "x"]}, tensors)
    assert len(data) >= FIRST
    order, found = unpacked(data)
    assert order == {"a": [1, None, "x"]}
    assert all(torch.equal(a, b) for a, b in zip(tensors, found, strict=True))


def test_a_silent_rank_is_lost() -> None:
    peers = connected(2, timeout=0.05)[0]
    peers.processes = [Process.here(), Process.here()]
    lost: list[RankError] = []
    peers.when_lost.append(lost.append)
    with pytest.raises(RankError, match=r"Rank 1 .* did not answer for 0.05 s") as caught:
        peers.exchange(torch.ones(1))
    assert caught.value.rank == 1
    assert lost == [caught.value]
    with pytest.raises(RankError, match="did not answer"):  # from now on, and at once
        peers.exchange(torch.ones(1))


def test_a_rank_is_told_by_its_last_words() -> None:
    here = [Process.here()] * 2
    assert told(0, here, lambda rank: "no memory" if rank else None, "Connection closed by peer", 5) == (
        1,
        f"Rank 1 (process {os.getpid()} on {here[0].host}) has ended: no memory",
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "has ended without a word"), (signal.SIGSTOP, "stopped")]
)
def test_a_rank_is_told_by_its_process(number: signal.Signals, words: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        child.send_signal(number)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        processes = [Process.here(), Process(Process.here().host, child.pid)]
        rank, sentence = told(0, processes, lambda rank: None, "Timed out waiting 5000ms", 5)
        assert rank == 1
        assert words in sentence
        end_stopped(processes)
        assert child.wait(10) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_ranks_that_differ_are_named() -> None:
    alike = {"torch": "2.13.0", "the kernels": "native avx512"}
    assert first_difference([alike, alike]) is None
    assert first_difference([alike, alike, {**alike, "the kernels": "reference"}]) == (
        2,
        "Rank 2 has the kernels reference, but rank 0 has native avx512.",
    )
    assert first_difference([alike, {"torch": "2.13.0"}]) == (
        1,
        "Rank 1 has the kernels None, but rank 0 has native avx512.",
    )
    one, two = connected(2)
    for error in together(lambda: compare(one, alike), lambda: compare(two, {**alike, "torch": "2.12"})):
        assert isinstance(error, RankError)
        assert "Rank 1 has torch 2.12, but rank 0 has 2.13.0" in str(error)
        assert error.rank == 1


@pytest.mark.parametrize("text", ["0", "soon", "nan", "100000"])
def test_the_time_limit_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_TIMEOUT_VARIABLE, text)
    with pytest.raises(ConfigError, match=RANK_TIMEOUT_VARIABLE):
        rank_timeout()


def test_a_launchers_variables_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_rank() is None
    for name, value in {"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="numbers"):
        launched_rank()
    monkeypatch.setenv("RANK", "1")
    assert launched_rank() == (1, 2)


def test_a_missing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.ranks import joining

    monkeypatch.setattr(joining, "ARRIVAL_TIMEOUT", 0.2)
    with pytest.raises(RankError, match="Rank 1 has not started"):
        join_by_file(tmp_path / "store", 0, 2)


def test_what_a_group_has_lost_it_says_once() -> None:
    peers = Peers(None, 0, 2, 1.0)
    first = peers.break_off("It was cut short.")
    assert peers.break_off("Another.") is first
