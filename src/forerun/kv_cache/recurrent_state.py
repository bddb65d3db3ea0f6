"""What recurrent layers keep of one sequence: the state after its committed tokens, and what its scratch adds to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_RECORDED = 128
"""Scratch rows of which any path can be committed."""
_WHOLE = 16
"""A forward's first rows without logits are committed together or not at all if there are more: they are a prompt's."""


Saved = Any
"""A state that was saved, which only the class that saved it reads."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The sizes of a model's states.

    Attributes:
        state_size: numbers of the state after a row, in all layers; 0: no layer is recurrent.
        record_size: numbers that a row adds to a state, in all layers.
    """

    state_size: int
    record_size: int

    @property
    def nbytes(self) -> int:
        """Return the bytes that a sequence may hold: of its state, of another while a prompt is computed, and of the
        records of 32 rows, in float32."""
        return 4 * (2 * self.state_size + 32 * self.record_size)


class RecurrentState(ABC):
    """The states of one sequence in one model's recurrent layers.

    It follows the scratch of the sequence's keys and values (`SequenceCache`): rows are fed, and then committed along a
    path, or dropped.

    Attributes:
        num_whole: the first rows of the scratch, a chain, that are committed together or not at all.
    """

    def __init__(self) -> None:
        self.num_whole = 0

    def prepare(self, parents: Sequence[int], num_new: int, num_wanted: int) -> None:
        """Prepare for the last `num_new` rows of the scratch, which are going to be computed.

        Args:
            parents: of all rows of the scratch.
            num_wanted: how many of the last rows may be rolled back.

        Raises:
            ValueError: there are more rows than any path can be committed of.
        """
        if num_new == len(parents):
            certain = num_new - min(num_wanted, MOST_RECORDED)
            self.num_whole = certain if certain > _WHOLE or num_new > MOST_RECORDED else 0
        if len(parents) - self.num_whole > MOST_RECORDED:
            raise ValueError(f"{len(parents)} rows have been fed, but a recurrent layer keeps {MOST_RECORDED} apart")
        if list(parents[: self.num_whole]) != list(range(-1, self.num_whole - 1)):
            raise ValueError(f"a tree has {len(parents)} rows, but a recurrent layer keeps {MOST_RECORDED} apart")

    def commit(self, path: Sequence[int]) -> None:
        """Keep these rows of the scratch, root to leaf, and drop the others."""
        if path:
            if list(path[: self.num_whole]) != list(range(self.num_whole)):
                raise ValueError(f"the first {self.num_whole} rows of a prompt can only be committed together")
            self._commit([row - self.num_whole for row in path[self.num_whole :]])
        self.num_whole = 0

    def drop(self, keep: int) -> None:
        """Drop the rows of the scratch but for the first `keep`."""
        self.num_whole = self.num_whole if keep >= self.num_whole else 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes held."""

    @abstractmethod
    def reset(self) -> None:
        """Return to the state before the first token."""

    @abstractmethod
    def saved(self) -> Saved:
        """Return a copy of the state after the committed tokens."""

    @abstractmethod
    def restore(self, saved: Saved) -> None:
        """Take over a state that another sequence of the model has saved."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Return whether the state after the committed tokens is free of NaN and infinity."""

    @abstractmethod
    def _commit(self, rows: Sequence[int]) -> None:
        """Keep the rows that are committed together, and of those behind them these."""


class RowStates(RecurrentState):
    """The states after each row, as the PyTorch reference keeps them.

    Attributes:
        committed: by layer, the state after the last committed row; empty before the first.
        rows: by layer, the states after rows of the scratch; of rows that are committed together, after the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.committed: dict[int, Any] = {}
        self.rows: dict[int, dict[int, tuple[Tensor, ...]]] = {}

    def before(self, layer: int, parent: int) -> tuple[Tensor, ...] | None:
        """Return the state that a row changes. parent: the scratch row that it follows; -1: the last committed one."""
        return self.rows[layer][parent] if parent >= 0 else self.committed.get(layer)

    def after(self, layer: int, row: int, state: tuple[Tensor, ...]) -> None:
        """Keep the state after a row of the scratch."""
        rows = self.rows.setdefault(layer, {})
        rows[row] = state
        if 0 < row < self.num_whole:
            rows.pop(row - 1, None)

    @property
    def nbytes(self) -> int:
        """Return the bytes held (`RecurrentState.nbytes`)."""
        states = [*self.committed.values(), *(state for rows in self.rows.values() for state in rows.values())]
        return sum(part.nbytes for state in states for part in state)

    def reset(self) -> None:
        """Return to the state before the first token (`RecurrentState.reset`)."""
        self.committed = {}
        self.rows = {}
        self.num_whole = 0

    def saved(self) -> Saved:
        """Return the committed state (`RecurrentState.saved`). No state is changed in place."""
        return dict(self.committed)

    def restore(self, saved: Saved) -> None:
        """Take over a saved state (`RecurrentState.restore`)."""
        self.committed = dict(saved)

    def is_finite(self) -> bool:
        """Return whether the committed state is finite (`RecurrentState.is_finite`)."""
        return all(bool(part.isfinite().all()) for state in self.committed.values() for part in state)

    def _commit(self, rows: Sequence[int]) -> None:
        last = rows[-1] + self.num_whole if rows else self.num_whole - 1
        self.committed = {layer: states[last] for layer, states in self.rows.items()}
        self.rows = {}

    def drop(self, keep: int) -> None:
        """Drop rows of the scratch (`RecurrentState.drop`)."""
        super().drop(keep)
        for rows in self.rows.values():
            for row in [row for row in rows if row >= keep]:
                del rows[row]


@dataclass(slots=True)
class _Pending:
    """Committed rows that the state is yet to take in.

    Attributes:
        slots: of their records, int32, in order.
        folded: [1] int32, the first layers, whose states have taken them in; the kernel writes it.
    """

    slots: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    folded: NDArray[np.int32] = field(default_factory=lambda: np.zeros(1, np.int32))


class RecordedState(RecurrentState):
    """The state after the committed rows, and the records of rows, as the native kernels keep them.

    A step reads the state once and writes it once: rows that are committed stay pending, and the next forward takes
    them in when it reads the state. So a commit moves nothing.

    Args:
        layout: of states and records.
        num_layers: layers of the model.
    """

    def __init__(self, layout: StateLayout, num_layers: int) -> None:
        super().__init__()
        self._layout = layout
        self._num_layers = num_layers
        self._state: Tensor | None = None
        self._tip: Tensor | None = None
        self._records = torch.empty(0, layout.record_size)
        self._parents = np.empty(0, np.int32)
        self._pending = _Pending()
        self._base = 0  # slot of the first row of the scratch that has a record

    @property
    def nbytes(self) -> int:
        """Return the bytes held (`RecurrentState.nbytes`)."""
        states = [each for each in (self._state, self._tip) if each is not None]
        return sum(each.nbytes for each in (*states, self._records))

    def reset(self) -> None:
        """Return to the state before the first token (`RecurrentState.reset`)."""
        self.__init__(self._layout, self._num_layers)  # type: ignore[misc]

    def saved(self) -> Saved:
        """Return a copy of the committed state (`RecurrentState.saved`)."""
        pending = self._unfolded()
        state = torch.zeros(self._layout.state_size) if self._state is None else self._state.clone()
        return [state, self._records[torch.from_numpy(pending).long()]]

    def restore(self, saved: Saved) -> None:
        """Take over a saved state (`RecurrentState.restore`)."""
        state, records = saved
        self._state = state.clone()
        self._records = records.clone()
        self._pending = _Pending(np.arange(len(records), dtype=np.int32))

    def prepare(self, parents: Sequence[int], num_new: int, num_wanted: int) -> None:
        """Prepare for rows that are going to be computed (`RecurrentState.prepare`)."""
        super().prepare(parents, num_new, num_wanted)
        if self._state is None:
            self._state = torch.zeros(self._layout.state_size)
        if not self.num_whole:
            self._tip = None
        elif self._tip is None:
            self._tip = torch.empty(self._layout.state_size)
        if num_new == len(parents):  # nothing but pending records is kept
            self._base = self._behind_pending()
        count = self._base + len(parents) - self.num_whole
        if not count <= len(self._records) <= 8 * max(8, count):
            records = torch.empty(1 << max(3, (count - 1).bit_length()), self._layout.record_size)
            kept = min(count, len(self._records))
            records[:kept] = self._records[:kept]
            self._records = records
        followed = np.asarray(parents[self.num_whole :], np.int32) - self.num_whole
        self._parents = np.full(count, -1, np.int32)
        self._parents[self._base :] = np.where(followed >= 0, followed + self._base, -1)

    def fields(self, first: int) -> tuple[int, ...]:
        """Return the fields of a forward's `StateStruct`. first: the first row of the scratch that is computed."""
        assert self._state is not None
        pending = self._pending
        is_behind = first >= self.num_whole > 0
        state = self._state
        if is_behind:  # the rows that are committed together have been computed
            assert self._tip is not None
            state = self._tip
        return (
            state.data_ptr(),
            0 if self._tip is None else self._tip.data_ptr(),
            self._records.data_ptr(),
            self._parents.ctypes.data,
            pending.slots.ctypes.data,
            pending.folded.ctypes.data,
            0 if is_behind else len(pending.slots),
            0 if is_behind else self.num_whole,
            self._base + max(0, first - self.num_whole),
            0,
        )

    def _behind_pending(self) -> int:
        """Return the first slot behind the pending records, which are brought to the front now and then."""
        slots = self._pending.slots
        end = int(slots.max(initial=-1)) + 1
        if end <= 2 * len(slots) + 8:
            return end
        records = torch.empty_like(self._records)
        records[: len(slots)] = self._records[torch.from_numpy(slots).long()]
        self._records = records
        self._pending = _Pending(np.arange(len(slots), dtype=np.int32), self._pending.folded)
        return len(slots)

    def is_finite(self) -> bool:
        """Return whether the committed state is finite (`RecurrentState.is_finite`)."""
        return all(bool(part.isfinite().all()) for part in self.saved())

    def _commit(self, rows: Sequence[int]) -> None:
        earlier = self._unfolded()
        if self.num_whole:
            self._state = self._tip
            self._tip = None
            earlier = earlier[:0]
        slots = np.concatenate([earlier, self._base + np.asarray(rows, np.int32)]).astype(np.int32)
        self._pending = _Pending(slots)

    def _unfolded(self) -> NDArray[np.int32]:
        """Return the slots of records that the state is yet to take in. All layers have taken in the same ones."""
        folded = int(self._pending.folded[0])
        if folded not in (0, self._num_layers) and len(self._pending.slots):
            raise ValueError(f"rows are committed that {self._num_layers - folded} layers have not computed")
        return self._pending.slots[:0] if folded else self._pending.slots


@dataclass(frozen=True, slots=True)
class StateMaker:
    """Makes the state of a new sequence.

    Attributes:
        layout: of the model's states.
        num_layers: layers of the model.
        is_native: the native kernels compute it, not the PyTorch reference.
    """

    layout: StateLayout
    num_layers: int
    is_native: bool

    def __call__(self) -> RecurrentState:
        """Return the state before the first token."""
        return RecordedState(self.layout, self.num_layers) if self.is_native else RowStates()
