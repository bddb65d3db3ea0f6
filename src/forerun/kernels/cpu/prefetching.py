"""How far ahead of the weights that kernels read they ask for others: tried on a model's weights, and kept.

A processor that looks far enough ahead itself, as some do while one row is multiplied, wants no requests; another gains
a quarter from them, and the distance that suits it depends on how much is computed for each line of weights.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.cpu.library import WEIGHT_KINDS, Library, LinearStruct
from forerun.kernels.cpu.linear import NativeLinear
from forerun.utils.files import EntryFile, key_here
from forerun.utils.home import PREFETCHING_STEM
from forerun.utils.machine import model as processor

Distances = dict[str, list[int]]
"""By kind of weights, the bytes for one row, for two and for more."""

DISTANCES = (4096, 0, 2048, 8192, 16384)
"""Bytes that are tried; the first is the kernels' own."""
_MOST = 1 << 20
_ROWS = (1, 2, 4)
"""Of the products that are timed."""
_TRIED_BYTES = 64 << 20
"""Of weights of one kind: more than the caches of most processors hold. Of smaller models they are not tried."""
_ROUNDS = 7
_SECONDS = 0.1
"""After which no third round begins."""
_MOST_SECONDS = 0.02
"""For which one row may read all of these: where it takes longer, arithmetic is what takes the time."""
_GAIN = 0.02
"""Part by which another distance than the kernels' own must be faster, in three of four rounds."""


def _restored(state: Mapping[str, Any]) -> Distances:
    """Raises ValueError, TypeError or AttributeError if it is something else."""
    found = {str(name): [int(distance) for distance in each] for name, each in state.items()}
    for each in found.values():
        if len(each) != len(_ROWS) or min(each) < 0 or max(each) > _MOST:
            raise ValueError(f"{each}: not {len(_ROWS)} distances of up to {_MOST} bytes")
    return found


FILE = EntryFile(PREFETCHING_STEM, 1, "prefetch distances", _restored, dict)

_known: dict[str, Distances] = {}


def known_distances(library: Library) -> Distances:
    """Return what was tried on this machine with this instruction set and number of threads, by this process or
    another."""
    key = _key(library)
    if key not in _known:
        _known[key] = FILE.read().get(key, {})
    return _known[key]


def choose_distances(library: Library, layers: Iterable[NativeLinear]) -> None:
    """Let products with weights of these kinds use the distance that is known as the best here, after trying those on
    these weights of which none is known. That takes a tenth of a second for a kind, half a second where memory is
    slow."""
    known = known_distances(library)
    of_kind = defaultdict[int, list[NativeLinear]](list)
    for layer in layers:
        if not layer.is_on_disk:
            of_kind[layer.kind].append(layer)
    for name, kind in WEIGHT_KINDS.items():
        if name not in known and sum(layer.nbytes for layer in of_kind[kind]) >= _TRIED_BYTES:
            tried = _tried(library, of_kind[kind])
            known.update(FILE.read().get(_key(library), {}))  # of other processes meanwhile
            known[name] = tried
            FILE.put(_key(library), known)
        for rows, distance in zip(_ROWS, known.get(name, ()), strict=False):
            library.set_prefetch_distance(kind, rows, distance)


def reader(library: Library, memory: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function by which the kernels' threads read memory as they read weights, and compute nothing, with the
    distance that suits best. What does not fill 256 bytes at the end of each tensor is left out."""
    held = list(memory)  # as long as the function
    addresses = np.array([each.data_ptr() for each in held], np.uint64)
    sizes = np.array([each.nbytes for each in held], np.int64)
    threads = torch.get_num_threads()

    def read(distance: int) -> None:
        library.read(addresses.ctypes.data, sizes.ctypes.data, len(held), distance, threads)

    def seconds(distance: int) -> float:
        begin = perf_counter()
        read(distance)
        return perf_counter() - begin

    times = {distance: min(seconds(distance) for _ in range(_ROUNDS)) for distance in DISTANCES}
    return partial(read, min(times, key=times.__getitem__))


def _key(library: Library) -> str:
    return key_here((library.instructions, processor(), str(torch.get_num_threads())))


def _tried(library: Library, layers: Sequence[NativeLinear]) -> list[int]:
    """Return the fastest distance for each of _ROWS."""
    structs = list(_first_bytes(layers))
    x = torch.ones(max(_ROWS), max(struct.in_features for struct in structs))
    y = torch.empty(max(_ROWS), max(struct.out_features for struct in structs))
    threads = torch.get_num_threads()
    own, *others = DISTANCES

    def seconds(rows: int, distance: int) -> float:
        library.set_prefetch_distance(structs[0].kind, rows, distance)
        begin = perf_counter()
        for struct in structs:
            library.linear(ctypes.byref(struct), x.data_ptr(), rows, None, y.data_ptr(), threads)
        return perf_counter() - begin

    if min(seconds(1, own), seconds(1, own)) > _MOST_SECONDS:
        return [own] * len(_ROWS)
    chosen = []
    for rows in _ROWS:
        rounds = list[dict[int, float]]()
        while len(rounds) < 2 or (len(rounds) < _ROUNDS and sum(sum(each.values()) for each in rounds) < _SECONDS):
            rounds.append({distance: seconds(rows, distance) for distance in DISTANCES})
        gains = {other: sorted(1 - each[other] / each[own] for each in rounds)[len(rounds) // 4] for other in others}
        best = max(gains, key=gains.__getitem__)
        chosen.append(best if gains[best] > _GAIN else own)
    return chosen


def _first_bytes(layers: Sequence[NativeLinear]) -> Iterable[LinearStruct]:
    """Yield so many layers, of the last as many outputs, that _TRIED_BYTES are read."""
    left = _TRIED_BYTES
    for layer in layers:
        if layer.nbytes > left:
            yield layer.outputs(0, max(1, layer.out_features * left // layer.nbytes // 16) * 16)
            return
        yield layer.struct
        left -= layer.nbytes
