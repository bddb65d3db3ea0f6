"""The matrix of Token Recycling: for every token, its most probable successors when the target last computed it."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forerun.errors import DrafterError, IncompatibleDrafterError
from forerun.vocabulary import ids_fingerprint

Matrix = npt.NDArray[np.int32]

STEADY = 4
"""Classes of steadiness: how often in a row a token's most probable successor stayed the same, counted up to three."""


class Successors:
    """The last seen most probable successors of each token; only rows that were seen take memory.

    Args:
        vocab_size: V; there are never more rows than that.
        width: k, successors of a token.
        base: [V, k] rows of tokens not seen yet, -1 where there is none; never written to.
    """

    __slots__ = ("_base", "_leaders", "_rows", "_slots", "_steady", "_vocab_size", "_width")

    def __init__(self, vocab_size: int, width: int, base: Matrix | None = None) -> None:
        self._vocab_size, self._width, self._base = vocab_size, width, base
        self._slots: dict[int, int] = {}
        self._rows: Matrix = np.empty((64, width), np.int32)
        self._leaders: list[int] = []
        self._steady = bytearray()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes held, without the base."""
        return self._rows.nbytes + sys.getsizeof(self._slots) + sys.getsizeof(self._leaders) + len(self._steady)

    def of(self, token_id: int) -> tuple[list[int], int]:
        """A token's successors, most probable first (none if it was never seen), and how steady the first is."""
        slot = self._slots.get(token_id)
        if slot is not None:
            return self._rows[slot].tolist(), self._steady[slot]
        if self._base is None:
            return [], 0
        return [each for each in self._base[token_id].tolist() if each >= 0], 0

    def update(self, token_ids: Seq[int], top: npt.NDArray[Any]) -> None:
        """Take over the target's most probable tokens after each of these.

        top: [n, k], most probable first; of equal token_ids the last counts.
        """
        slots, leaders, steady = self._slots, self._leaders, self._steady
        at: list[int] = []
        for token_id, leader in zip(token_ids, top[:, 0].tolist(), strict=True):
            slot = slots.get(token_id)
            if slot is None:
                slot = slots[token_id] = len(slots)
                leaders.append(leader)
                steady.append(0)
            elif leaders[slot] == leader:
                steady[slot] = min(steady[slot] + 1, STEADY - 1)
            else:
                leaders[slot] = leader
                steady[slot] = 0
            at.append(slot)
        if len(slots) > len(self._rows):
            size = min(max(len(slots), 2 * len(self._rows)), self._vocab_size)
            self._rows = np.concatenate([self._rows, np.empty((size - len(self._rows), self._width), np.int32)])
        self._rows[at] = top

    def dense(self) -> Matrix:
        """[V, k], -1 where nothing was seen."""
        matrix = np.full((self._vocab_size, self._width), -1, np.int32) if self._base is None else self._base.copy()
        matrix[list(self._slots)] = self._rows[: len(self._slots)]
        return matrix


def save_matrix(path: str | Path, matrix: Matrix, tokenizer: Any) -> None:
    """Write a matrix as safetensors, with the fingerprint of the tokenizer whose ids it holds.

    Raises:
        DrafterError: the file cannot be written.
    """
    try:
        save_file({_NAME: np.ascontiguousarray(matrix)}, path, {"tokenizer": ids_fingerprint(tokenizer)})
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"The matrix cannot be written to {str(path)!r}: {error}. Give another path.") from error


def load_matrix(path: str | Path, vocab_size: int, width: int, tokenizer: Any) -> Matrix:
    """Read a saved matrix.

    Returns:
        [vocab_size, width] int32.

    Raises:
        DrafterError: the file cannot be read, or holds something else.
        IncompatibleDrafterError: it was saved for another vocabulary or width.
    """
    remedy = "Give a file that Recycling.save has written, or leave the option out."
    try:
        with safe_open(path, framework="np") as file:
            matrix: Matrix = file.get_tensor(_NAME)
            theirs = (file.metadata() or {}).get("tokenizer", "")
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"matrix is {str(path)!r}, which cannot be read: {error}. {remedy}") from error
    if matrix.dtype != np.int32 or matrix.ndim != 2:
        raise DrafterError(f"matrix is {str(path)!r}, which holds {matrix.dtype} {list(matrix.shape)}. {remedy}")
    other = bool(theirs) and tokenizer is not None and theirs != ids_fingerprint(tokenizer)
    if other or matrix.shape != (vocab_size, width):
        raise IncompatibleDrafterError(
            f"matrix is {str(path)!r}, of {len(matrix)} tokens with {matrix.shape[1]} successors each, and was saved "
            f"for another tokenizer or width than this target's {vocab_size} tokens with {width}. {remedy}"
        )
    if matrix.size and (matrix.min() < -1 or matrix.max() >= vocab_size):
        raise DrafterError(f"matrix is {str(path)!r}, which holds ids outside the vocabulary. {remedy}")
    return matrix


_NAME = "successors"
