"""How far ahead weights are asked for: the bits are the same, and the fastest distance is kept."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.kernels.cpu import prefetching
from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import NativeLinear
from kernel_cases import KINDS, drawn, weight_of


class Clock:
    """A library whose products take as long as `cost` says, by rows and distance.

    Attributes:
        tried: distances of the products, in order. set: by kind and rows, the distance.
    """

    instructions = "avx2"

    def __init__(self, cost: dict[int, dict[int, float]]) -> None:
        self.cost = cost
        self.now = 0.0
        self.tried: list[int] = []
        self.set: dict[tuple[int, int], int] = {}

    def set_prefetch_distance(self, kind: int, rows: int, distance: int) -> None:
        self.set[kind, rows] = distance

    def linear(self, struct: Any, x: int, rows: int, residual: None, y: int, threads: int) -> None:
        distance = self.set[struct._obj.kind, rows]
        self.tried.append(distance)
        self.now += self.cost.get(rows, {}).get(distance, 0.01)


@pytest.fixture
def small(library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NativeLinear:
    """A weight that counts as large, and a folder for what is known."""
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    monkeypatch.setenv("FORERUN_COST_CACHE", "1")
    monkeypatch.setattr(prefetching, "_known", {})
    linear = NativeLinear(library, weight_of("int4-groups", 100, 96))
    monkeypatch.setattr(prefetching, "_TRIED_BYTES", linear.nbytes)
    return linear


def run(clock: Clock, layers: list[NativeLinear], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "perf_counter", lambda: clock.now)
    prefetching.choose_distances(clock, layers)  # type: ignore[arg-type]


OWN = prefetching.DISTANCES[0]
COST = {1: {0: 0.005}, 2: {2048: 0.0099}, 4: {16384: 0.009, 8192: 0.0095}}
"""Seconds of a pass, by rows and distance; of others 0.01."""


def test_the_fastest_is_chosen_and_kept_for_other_processes(
    small: NativeLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Clock(COST)
    run(first, [small], monkeypatch)
    # two rows keep their own, over which the other gains too little to be told from noise
    expected = {(small.kind, 1): 0, (small.kind, 2): OWN, (small.kind, 4): 16384}
    assert first.set == expected and set(first.tried) == set(prefetching.DISTANCES)
    prefetching._known.clear()  # another process
    second = Clock({})
    run(second, [small], monkeypatch)
    assert second.set == expected and not second.tried
    other = Clock(COST)
    other.instructions = "avx512"
    run(other, [small], monkeypatch)
    assert other.tried


def test_one_that_is_faster_in_few_rounds_is_not_chosen(small: NativeLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(Clock):
        def linear(self, struct: Any, x: int, rows: int, residual: None, y: int, threads: int) -> None:
            super().linear(struct, x, rows, residual, y, threads)
            if self.set[struct._obj.kind, rows] == 2048 and self.tried.count(2048) % 3 == 0:
                self.now -= 0.009

    noisy = Noisy({})
    run(noisy, [small], monkeypatch)
    assert set(noisy.set.values()) == {OWN}


def test_slow_products_and_weights_on_a_disk_are_not_tried(
    small: NativeLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Clock({1: dict.fromkeys(prefetching.DISTANCES, 0.03)})
    run(slow, [small], monkeypatch)
    assert set(slow.tried) == {OWN} and set(slow.set.values()) == {OWN}
    prefetching._known.clear()
    monkeypatch.setenv("FORERUN_COST_CACHE", "0")
    small.is_on_disk = True
    run(disk := Clock(COST), [small], monkeypatch)
    assert not disk.tried


def test_what_another_process_has_kept_meanwhile_stays(small: NativeLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(COST)
    assert prefetching.known_distances(clock) == {}  # type: ignore[arg-type]
    key = prefetching._key(clock)  # type: ignore[arg-type]
    prefetching.FILE.put(key, {"OTHER": [0, 0, 0]})
    run(clock, [small], monkeypatch)
    assert prefetching.FILE.read()[key].keys() == {"OTHER", "INT4_GROUPS"}


def test_small_models_and_damaged_files(small: NativeLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(COST)
    monkeypatch.setattr(prefetching, "_TRIED_BYTES", small.nbytes + 1)
    run(clock, [small], monkeypatch)
    assert not clock.tried and not clock.set
    for bad in ([1, 2], [0, 0, 1 << 40], [0, -1, 0], ["x", 0, 0]):
        with pytest.raises(ValueError):
            prefetching._restored({"Q4_K": bad})
    assert prefetching._restored({"Q4_K": [0, 64, 128]}) == {"Q4_K": [0, 64, 128]}


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_same_at_any_distance(library: Library, kind: str) -> None:
    linear, x = NativeLinear(library, weight_of(kind, 100, 96)), drawn(9, 96)
    before = {rows: library.prefetch_distance(linear.kind, rows) for rows in (1, 2, 3)}
    expected = linear.forward(x)
    try:
        for distance in (0, 64, 4096, 1 << 20):
            for rows in before:
                library.set_prefetch_distance(linear.kind, rows, distance)
            assert library.prefetch_distance(linear.kind, 9) == distance
            for count in (1, 2, 3, 9):
                assert torch.equal(linear.forward(x[:count]), expected[:count]), (distance, count)
    finally:
        for rows, distance in before.items():
            library.set_prefetch_distance(linear.kind, rows, distance)


def test_memory_is_read_by_all_threads_at_the_fastest_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    memory = [torch.ones(1 << 18), torch.ones(3)]

    class Reads(Clock):
        def read(self, addresses: int, sizes: int, count: int, distance: int, threads: int) -> None:
            assert count == 2 and threads == torch.get_num_threads()
            read.append(distance)
            self.now += 0.5 if distance == 8192 else 1.0

    clock = Reads({})
    monkeypatch.setattr(prefetching, "perf_counter", lambda: clock.now)
    again = prefetching.reader(clock, memory)  # type: ignore[arg-type]
    assert set(read) == set(prefetching.DISTANCES)
    again()
    assert read[-1] == 8192


@pytest.mark.parametrize("size", [0, 63, 255, 256, 16383, 16384, 16700, 1 << 20])
def test_all_of_it_is_read_and_nothing_behind_it(library: Library, size: int, tmp_path: Path) -> None:
    page = mmap.PAGESIZE
    pages = -(-max(size, 1) // page)
    (path := tmp_path / "holes").touch()
    os.truncate(path, (pages + 1) * page)
    with path.open("r+b") as file:
        area = mmap.mmap(file.fileno(), (pages + 1) * page)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    address = memory.data_ptr()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + pages * page), page, 0) == 0  # reading it ends the process
    prefetching.reader(library, [memory[pages * page - size : pages * page]])()
    assert libc.mprotect(ctypes.c_void_p(address + pages * page), page, mmap.PROT_READ) == 0
    is_held = (ctypes.c_ubyte * pages)()  # the system holds pages of a file that were read
    assert libc.mincore(ctypes.c_void_p(address), pages * page, is_held) == 0
    assert [each & 1 for each in is_held] == [size >= 256] * pages
