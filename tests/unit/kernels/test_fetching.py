"""How far ahead weights are asked for: the bits are the same, and the fastest distance is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.kernels.cpu import fetching
from forerun.kernels.cpu.library import WEIGHT_KINDS, Library
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

    def set_fetch_distance(self, kind: int, rows: int, distance: int) -> None:
        self.set[kind, rows] = distance

    def linear(self, struct: Any, x: int, rows: int, residual: None, y: int, threads: int) -> None:
        distance = self.set[struct._obj.kind, rows]
        self.tried.append(distance)
        self.now += self.cost[rows].get(distance, 1.0)


@pytest.fixture
def small(library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NativeLinear:
    """A weight that counts as large, and a folder for what is known."""
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    monkeypatch.setenv("FORERUN_COST_CACHE", "1")
    monkeypatch.setattr(fetching, "_known", {})
    linear = NativeLinear(library, weight_of("int4-groups", 100, 96))
    monkeypatch.setattr(fetching, "_TRIED_BYTES", linear.nbytes)
    return linear


def run(clock: Clock, layers: list[NativeLinear], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "perf_counter", lambda: clock.now)
    fetching.choose_distances(clock, layers)  # type: ignore[arg-type]


COST = {1: {0: 0.5}, 2: {2048: 0.995}, 4: {16384: 0.9, 8192: 0.95}}


def test_the_fastest_is_chosen_and_kept_for_other_processes(
    small: NativeLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Clock(COST)
    run(first, [small], monkeypatch)
    own = fetching.DISTANCES[0]  # where another gains less than a part in a hundred
    expected = {(small.kind, 1): 0, (small.kind, 2): own, (small.kind, 4): 16384}
    assert first.set == expected and set(first.tried) == set(fetching.DISTANCES)
    fetching._known.clear()  # another process
    second = Clock({})
    run(second, [small], monkeypatch)
    assert second.set == expected and not second.tried
    other = Clock(COST)
    other.instructions = "avx512"
    run(other, [small], monkeypatch)
    assert other.tried


def test_small_models_and_damaged_files(small: NativeLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(COST)
    monkeypatch.setattr(fetching, "_TRIED_BYTES", small.nbytes + 1)
    run(clock, [small], monkeypatch)
    assert not clock.tried and not clock.set
    name = next(name for name, kind in WEIGHT_KINDS.items() if kind == small.kind)
    for bad in ([1, 2], [0, 0, 1 << 40], [0, -1, 0], ["x", 0, 0]):
        with pytest.raises(ValueError):
            fetching._restored({name: bad})
    assert fetching._restored({name: [0, 64, 128]}) == {name: [0, 64, 128]}


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_same_at_any_distance(library: Library, kind: str) -> None:
    linear, x = NativeLinear(library, weight_of(kind, 100, 96)), drawn(9, 96)
    before = {rows: library.fetch_distance(linear.kind, rows) for rows in (1, 2, 3)}
    expected = linear.forward(x)
    try:
        for distance in (0, 64, 4096, 1 << 20):
            for rows in before:
                library.set_fetch_distance(linear.kind, rows, distance)
            assert library.fetch_distance(linear.kind, 9) == distance
            for count in (1, 2, 3, 9):
                assert torch.equal(linear.forward(x[:count]), expected[:count]), (distance, count)
    finally:
        for rows, distance in before.items():
            library.set_fetch_distance(linear.kind, rows, distance)


def test_memory_is_read_by_all_threads_at_the_fastest_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    memory = [torch.ones(1 << 18), torch.ones(3)]

    class Reads(Clock):
        def read(self, addresses: int, sizes: int, count: int, distance: int, threads: int) -> None:
            assert count == 2 and threads == torch.get_num_threads()
            read.append(distance)
            self.now += 0.5 if distance == 8192 else 1.0

    clock = Reads({})
    monkeypatch.setattr(fetching, "perf_counter", lambda: clock.now)
    again = fetching.reader(clock, memory)  # type: ignore[arg-type]
    assert set(read) == set(fetching.DISTANCES)
    again()
    assert read[-1] == 8192


def test_memory_is_only_read(library: Library) -> None:
    memory = torch.arange(1 << 16, dtype=torch.float32)
    fetching.reader(library, [memory])()
    assert torch.equal(memory, torch.arange(1 << 16, dtype=torch.float32))
