"""Finds the tensors of a file that numbers in memory come from, by the numbers themselves."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float32]
_ALIKE = 0.9
"""Cosine of rows that are the same but for rounding or a factor; those of random rows are far below."""
_MOST_RUNS = 6


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:12]


class Sources:
    """The tensors of a file, of rows that are all different.

    Args:
        tensors: by name. Stacks of matrices count as one tensor each.
    """

    def __init__(self, tensors: Mapping[str, Numbers]) -> None:
        self._vectors: dict[str, Numbers] = {}
        matrices: dict[str, Numbers] = {}
        for name, tensor in tensors.items():
            squeezed = tensor.reshape([size for size in tensor.shape if size > 1] or [1])
            if squeezed.ndim < 2:
                self._vectors[name] = squeezed
                if tensor.ndim > 1:  # a matrix of one row
                    matrices[name] = squeezed[None]
            elif squeezed.ndim == 2:
                matrices[name] = squeezed
            else:
                matrices |= {f"{name}[{index}]": each for index, each in enumerate(squeezed)}
        self._rows = _by_row(matrices)
        self._columns = _by_row({f"{name}.T": each.T for name, each in matrices.items()})
        self._sizes = {name: len(each) for name, each in matrices.items()}
        self._sizes |= {f"{name}.T": each.shape[1] for name, each in matrices.items()}
        by_width: dict[int, list[tuple[str, Numbers]]] = defaultdict(list)
        for name, each in matrices.items():
            by_width[each.shape[1]].append((name, each))
        self._matrices = by_width

    def of_matrix(self, numbers: Numbers) -> tuple[str, bool]:
        """Return where the rows come from, and whether they are exactly those."""
        for index, rows, how in (
            (self._rows, numbers, ""),
            (self._columns, numbers, ""),
            (self._rows, numbers.T, "T "),
        ):
            found = _matched(index, rows)
            if found is not None:
                return how + self._text(found), True
        found = self._alike(numbers)
        return ("?" if found is None else f"~ {self._text(found)}"), False

    def of_vector(self, numbers: Numbers) -> str:
        """Return where a few numbers come from: a vector, a part of one, or one to which 1 was added."""
        content = numbers.tobytes()
        for name, each in self._vectors.items():
            place = each.tobytes().find(content)
            if place >= 0:
                first = place // 4
                return name if len(each) == len(numbers) else f"{name}[{first}:{first + len(numbers)}]"
            if len(each) == len(numbers) and np.array_equal(each + 1, numbers):
                return f"{name} + 1"
            if len(each) < len(numbers) and np.array_equal(np.resize(each, len(numbers)), numbers):
                return f"{name} repeated"
        if len(set(numbers.tolist())) == 1:
            return f"all {numbers[0]}"
        return f"numbers {rounded(numbers)}"

    def _alike(self, numbers: Numbers) -> list[tuple[str, int]] | None:
        there = self._matrices.get(numbers.shape[1], [])
        if not there:
            return None
        stacked = np.concatenate([each for _, each in there])
        places = [(name, row) for name, each in there for row in range(len(each))]
        cosines = _normed(numbers) @ _normed(stacked).T
        if cosines.max(1).min() < _ALIKE:
            return None
        return [places[place] for place in cosines.argmax(1)]

    def _text(self, rows: Sequence[tuple[str, int]]) -> str:
        parts = []
        for name, group in groupby(rows, lambda row: row[0]):
            places = [place for _, place in group]
            whole = name != "zeros" and places == list(range(self._sizes[name]))
            parts.append(name if whole else f"{name}[{runs(places)}]")
        return ", ".join(parts)


def runs(places: Any) -> str:
    """Return indices, [n], as slices; where these are many, how many indices there are and their digest."""
    numbers = np.asarray(places, np.int64)
    steps = np.diff(numbers)
    changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    ends = [*changes.tolist(), len(steps)]  # of equal steps
    found: list[tuple[int, int, int]] = []  # first, step, count
    index = 0
    while index < len(numbers) and len(found) <= _MOST_RUNS:
        step, count = 1, 1
        if index < len(steps):
            step = int(steps[index])
            count = ends[bisect_right(ends, index)] - index + 1
        found.append((int(numbers[index]), step, count))
        index += count
    if len(found) > _MOST_RUNS:
        return f"{len(numbers)} by {digest(numbers.tobytes())}"
    parts = (f"{first}:{first + step * count}" + ("" if step == 1 else f":{step}") for first, step, count in found)
    return ", ".join(parts)


def rounded(numbers: Any) -> str:
    """Return a digest of numbers with four digits, which does not depend on the processor."""
    text = " ".join(f"{number:.3e}" for number in np.asarray(numbers, np.float64).reshape(-1))
    return digest(text.encode())


def _by_row(matrices: Mapping[str, Numbers]) -> dict[bytes, list[tuple[str, int]]]:
    found: dict[bytes, list[tuple[str, int]]] = defaultdict(list)
    for name, each in matrices.items():
        for place, row in enumerate(np.ascontiguousarray(each)):
            found[row.tobytes()].append((name, place))
    return found


def _matched(index: Mapping[bytes, list[tuple[str, int]]], rows: Numbers) -> list[tuple[str, int]] | None:
    """Return tensor and row of each, in the tensor of the row before where several have it."""
    found: list[tuple[str, int]] = []
    for place, row in enumerate(np.ascontiguousarray(rows)):
        there = index.get(row.tobytes()) or ([("zeros", place)] if not row.any() else [])
        if not there:
            return None
        found.append(next((each for each in there if found and each[0] == found[-1][0]), there[0]))
    return found


def _normed(rows: Numbers) -> Numbers:
    wide = rows.astype(np.float64)
    wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-30)
    return wide.astype(np.float32)
