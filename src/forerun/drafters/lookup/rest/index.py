"""Look up what followed a context in a corpus (He et al., REST, 2311.08252)."""

from __future__ import annotations

import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from io import FileIO
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.lookup.rest.index_file import IndexHeader, open_file
from forerun.utils.tree import ROOT, Tree

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Match:
    """Where the last `length` tokens of a context occur in the corpus: rows first..last (exclusive) of the suffixes."""

    length: int
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first


class SortedTokens:
    """Tokens with the high byte first, and all their positions in the order of what follows them.

    Args:
        data: holds the tokens from `start` on, of `width` bytes each.
        suffixes: [n] positions.
    """

    def __init__(self, data: bytes | mmap, start: int, width: int, suffixes: Any) -> None:
        self._data = data
        self._start = start
        self._width = width
        self.suffixes = suffixes

    def _longest(self, encoded: bytes, least: int, most: int) -> Match | None:
        """Find the longest end of some encoded tokens that occurs, of `least` to `most` tokens."""
        width = self._width
        # what a shorter end lacks, a longer one lacks too: the longest is found by bisection
        found = 0
        row = 0
        low = max(least, 1)
        high = min(most, len(encoded) // width)
        while low <= high:
            middle = (low + high) // 2
            at, present = self._first(encoded[-middle * width :])
            if present:
                found = middle
                row = at
                low = middle + 1
            else:
                high = middle - 1
        return self._match(found, row, encoded) if found else None

    def _match(self, length: int, first: int, encoded: bytes) -> Match:
        """Return the rows from `first` on that start with the last `length` tokens."""
        key = encoded[-length * self._width :]
        return Match(length, first, bisect_right(self.suffixes, key, lo=first, key=self._reader(len(key))))

    def _first(self, key: bytes) -> tuple[int, bool]:
        """Return the first row that does not come before the n-gram, and whether it starts with it."""
        read = self._reader(len(key))
        row = bisect_left(self.suffixes, key, key=read)
        return row, row < len(self.suffixes) and read(self.suffixes[row]) == key

    def _reader(self, size: int, offset: int = 0) -> Callable[[Any], bytes]:
        """Return a function from a position to the `size` bytes that start `offset` tokens after it."""
        data = self._data
        width = self._width
        start = self._start + offset * width

        def read(position: Any) -> bytes:
            at = start + int(position) * width
            return data[at : at + size]

        return read


class Index(SortedTokens):
    """A corpus and its suffix array, from one file: a small one is read, of a larger one pages as they are needed.

    A compact one is sorted here: about a second for a million tokens.

    A large file must not be changed in place while it is in use, by `cp NEW FILE` for instance; `forerun index build
    --force` and `mv NEW FILE` replace it. If it has been changed nevertheless, nothing is found
    in it any more, and one warning is logged.

    Args:
        path: the file.
        check: may refuse it by its header, before the data are read.

    Attributes:
        header: the file's description.
        tokens: [n], each document followed by the marker.
        suffixes: [n] positions in the order of what follows them.

    Raises:
        ConfigError: it cannot be read, is no index, is damaged, or is of another version.
    """

    def __init__(self, path: str | Path, check: Callable[[IndexHeader], None] = lambda header: None) -> None:
        self.path = Path(path)
        stored = open_file(self.path, check)
        self.header = stored.header
        super().__init__(stored.data, stored.start, stored.header.token_bytes, stored.suffixes)
        self.tokens = stored.tokens
        self._file = stored.file
        self._changed = False
        self._opened = _version(stored.file)
        self._steps = np.arange(self.header.depth)

    @property
    def nbytes(self) -> int:
        """Return the bytes that may lie in memory: the file's, and the suffix array of a compact one."""
        return self.tokens.nbytes + int(self.suffixes.nbytes)

    def find(self, context: Seq[int], min_ngram: int, max_ngram: int) -> Match | None:
        """Find the longest n-gram at the context's end that the corpus holds inside one document.

        Args:
            context: token ids; of those before one that the vocabulary does not have, nothing is used.
            min_ngram, max_ngram: its length; no longer than the index is deep.

        Returns:
            None if not even the shortest occurs, or the file was changed since it was opened.
        """
        if self._file is not None and not self._unchanged():
            return None
        return self._longest(self._encoded(context[-min(max_ngram, self.header.depth) :]), min_ngram, max_ngram)

    def find_more(self, context: Seq[int], min_ngram: int, match: Match) -> Match | None:
        """Find the longest n-gram at the context's end that is shorter than the match and occurs more often.

        Returns:
            None if even the shortest occurs nowhere else.
        """
        encoded = self._encoded(context[-match.length :])
        width = self.header.token_bytes
        found = None
        low = max(min_ngram, 1)
        high = match.length - 1
        while low <= high:
            middle = (low + high) // 2
            row, _ = self._first(encoded[-middle * width :])
            shorter = self._match(middle, row, encoded)
            if shorter.count > match.count:
                found = shorter
                low = middle + 1
            else:
                high = middle - 1
        return found

    def continuations(self, match: Match, length: int, limit: int) -> NDArray[np.int64]:
        """Return what follows the matches.

        Args:
            length: tokens of each; match.length + length is at most the depth.
            limit: matches that are looked at; of more, so many at even distances.

        Returns:
            [min(limit, match.count), length] int64, rows in lexicographic order. A document's end
            (`header.marker`) and all after it are not part of a continuation.
        """
        if match.count <= limit:
            starts = self.suffixes[match.first : match.last].astype(np.int64)
        else:
            starts = self.suffixes[match.first + np.arange(limit) * match.count // limit].astype(np.int64)
        positions = (starts + match.length)[:, None] + self._steps[:length]
        # the last token of all is a marker, and stands for what lies beyond it
        followed: NDArray[np.int64] = self.tokens[np.minimum(positions, len(self.tokens) - 1)].astype(np.int64)
        return followed

    def _unchanged(self) -> bool:
        """Return whether the mapped file is as it was opened: reading beyond its end would end the process."""
        if not self._changed and _version(self._file) != self._opened:
            self._changed = True
            _log.warning(
                "The index %s was changed while it is in use: nothing is looked up in it any more. Put the right file "
                "in its place by `mv NEW %s`, not `cp`, and start again.",
                self.path,
                self.path,
            )
        return not self._changed

    def _encoded(self, tail: Seq[int]) -> bytes:
        """Encode the tokens as the file does, from after the last one that the vocabulary lacks."""
        tokens = list(tail)
        for at in range(len(tokens) - 1, -1, -1):
            if not 0 <= tokens[at] < self.header.vocab_size:
                del tokens[: at + 1]
                break
        return np.asarray(tokens, dtype=f">u{self.header.token_bytes}").tobytes()


def _version(file: FileIO | None) -> tuple[int, int] | None:
    """Return the size and time of the last change of an open file."""
    if file is None:
        return None
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class ContinuationTree:
    """Prefixes of continuations.

    Attributes:
        tree: [n] the prefixes, the most frequent first, each after its parent.
        counts: [n] continuations that start with the node's path.
        parent_counts: [n] the same of the node above; at the top, all continuations.
    """

    tree: Tree
    counts: NDArray[np.int64]
    parent_counts: NDArray[np.int64]


def best_nodes(rows: NDArray[np.int64], marker: int, limit: int) -> ContinuationTree:
    """Return the `limit` most frequent prefixes; of equally frequent ones the shorter, then those in the rows' order.

    Args:
        rows: [m, depth] in lexicographic order, so that equal prefixes stand together; duplicates are counted.
        marker: ends a row.
    """
    m, depth = rows.shape
    if m == 0 or depth == 0 or limit <= 0:
        none = np.zeros(0, dtype=np.int64)
        return ContinuationTree(Tree(), none, none)
    by_depth = rows.T
    new = np.ones((depth, m), dtype=bool)  # where a prefix occurs for the first time
    np.logical_or.accumulate(by_depth[:, 1:] != by_depth[:, :-1], axis=0, out=new[:, 1:])
    inside = np.logical_and.accumulate(by_depth != marker, axis=0)
    starts = np.flatnonzero(new)  # the first row of every depth is new: runs do not cross depths
    counts = np.diff(starts, append=new.size)
    wanted = np.flatnonzero(inside.ravel()[starts])
    chosen = wanted[_descending(counts[wanted], m)[:limit]]
    return _gathered(by_depth, new, starts, counts, chosen)


def _gathered(
    by_depth: NDArray[np.int64], new: NDArray[Any], starts: NDArray[Any], counts: NDArray[Any], chosen: NDArray[Any]
) -> ContinuationTree:
    """Return the chosen nodes, in their order, with their parents among them."""
    m = by_depth.shape[1]
    node_at = np.cumsum(new.ravel()) - 1  # the node of every cell
    cells = starts[chosen]
    above = node_at[np.maximum(cells - m, 0)]
    top = cells < m
    new_index = np.full(len(starts), -1, dtype=np.int64)
    new_index[chosen] = np.arange(len(chosen))
    tree = Tree(by_depth.ravel()[cells].tolist(), np.where(top, ROOT, new_index[above]).tolist())
    return ContinuationTree(tree, counts[chosen], np.where(top, m, counts[above]))


def _descending(counts: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """Return a stable order, highest first; 16-bit numbers are sorted without comparing them."""
    kind = np.int16 if most < 1 << 15 else np.int64
    return np.argsort((-counts).astype(kind), kind="stable")
