"""The answers that a server has given, by tenant: kept in a file, sorted in memory, and copied from by `suffix`.

As the global tree of suffix decoding (Oliaro et al., 2411.04975; Arctic Inference), which counts what followed a
context in earlier answers. Here what was said until lately is sorted, and what came since is in an automaton; now and
then, at low priority, all is sorted anew, without what the file has forgotten.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from forerun.config import MEMORY_LOG
from forerun.drafters.lookup.remembered.answer_file import NUM_SEGMENTS, AnswerFile
from forerun.drafters.lookup.remembered.sorted_answers import MOST_MATCH, CountedCopy, SortedAnswers
from forerun.drafters.lookup.rest.index_file import token_bytes_for
from forerun.drafters.lookup.suffix_automaton import ROOT, SuffixAutomaton, SuffixPosition
from forerun.utils.files import Closing
from forerun.utils.machine import MIB

_log = logging.getLogger(__name__)
_memory_log = logging.getLogger(MEMORY_LOG)
CONTEXT_TOKENS = MOST_MATCH
"""Tokens of a prompt's end that are kept before the answer, by which its beginning is found."""
_MOST_NEW = 65_536
"""Tokens in automata, after which all is sorted anew, or as large a part of what is sorted as is forgotten at once."""
_DROPPED = 2
"""Where sorting fails, automata are dropped at so many times as many tokens."""
_MOST_TENANTS = 256
"""Tenants whose answers are in memory, the last ones; those of others are sorted when they ask again."""
_PAUSE = 60.0
"""Seconds without writing, or without sorting, after it has failed."""
_NICENESS = 19
_MOST_SECONDS = 10.0
"""That `settle` waits for sorting."""
_SORTING_BYTES = 44
"""Bytes of memory that sorting takes for each token, with what is made of it."""


def sorting_nbytes(num_bytes: int, vocab_size: int) -> int:
    """Return the bytes of memory that a full file of so many bytes takes while all of its answers are sorted anew."""
    width = token_bytes_for(vocab_size)
    return num_bytes // width * (SortedAnswers.bytes_of_token(width) + _SORTING_BYTES)


class _Closed(Exception):
    """Sorting is to end."""


class TenantText:
    """The answers to one tenant.

    Attributes:
        old: those that are sorted; None if there are none.
        new: those since.
        since: those since their sorting began, while they are sorted.
    """

    __slots__ = ("new", "old", "since")

    def __init__(self) -> None:
        self.old: SortedAnswers | None = None
        self.new = SuffixAutomaton()
        self.since: list[list[int]] | None = None

    def add(self, token_ids: list[int]) -> None:
        """Add an answer to the new ones. If this is interrupted, none is left that is half added."""
        new = self.new
        self.new = SuffixAutomaton()
        _add(new, token_ids)
        if self.since is not None:
            self.since.append(token_ids)
        self.new = new


class RememberedText(Closing):
    """Answers of the past. One thread, the engine's, may call this; another sorts, from `start` on.

    Args:
        path: the file. num_bytes: that it takes; None: as many as it has, else `default_bytes`.
        vocab_size, fingerprint: of the target's tokenizer.

    Raises:
        ConfigError: as `AnswerFile`.
    """

    def __init__(
        self, path: Path, num_bytes: int | None, vocab_size: int, fingerprint: str, *, default_bytes: int
    ) -> None:
        self._file = AnswerFile(path, num_bytes, vocab_size, fingerprint, default_bytes=default_bytes)
        self._tenants: dict[bytes, TenantText] = {}  # those of the newest answers last
        self._due = dict.fromkeys(self._file.tenants())  # of whom something is written, forgotten, or asked for since
        self._lock = threading.Lock()  # of all these, against the thread that sorts
        self._sorter: threading.Thread | None = None
        self._is_asked = False  # to sort
        self._is_closed = False
        self._writes_again = 0.0  # when that is tried again
        self._sorts_again = 0.0
        header = self._file.header
        most = header.num_bytes // header.token_bytes
        _memory_log.info(
            "remember %s: %s tokens of answers, at most %s, which take %.0f MiB, and while sorted %.0f",
            path,
            f"{self._file.num_tokens:,}",
            f"{most:,}",
            most * SortedAnswers.bytes_of_token(header.token_bytes) / MIB,
            sorting_nbytes(header.num_bytes, vocab_size) / MIB,
        )

    def start(self) -> None:
        """Sort what the file holds, in the other thread; where that is little, wait some seconds for it."""
        with self._lock:
            self._sort_soon()
        if self._file.num_tokens <= _MOST_NEW:
            self.settle()

    def position(self, tenant: str | None) -> RememberedPosition:
        """Return the position of a new sequence of this tenant, or of one that names none."""
        name = self._file.header.hashed(tenant)
        if name not in self._tenants and any(name in held for held in self._file.segments):
            with self._lock:
                self._due[name] = None
                self._sort_soon()
        return RememberedPosition(self._tenants, name)

    def write(self, token_ids: Sequence[int], num_prompt: int, tenant: str | None) -> None:
        """Remember an answer, and the end of its prompt. What cannot be written is a line in the log.

        token_ids: of both; num_prompt: those of the prompt.
        """
        if len(token_ids) == num_prompt or time.monotonic() < self._writes_again:
            return
        try:
            with self._lock:
                self._add(self._file.header.hashed(tenant), list(token_ids[max(num_prompt - CONTEXT_TOKENS, 0) :]))
        except Exception as failure:  # of no memory, or of a file that is closed, too: requests go on
            self._writes_again = time.monotonic() + _PAUSE
            _log.warning(
                "Answers are not remembered for %.0f seconds: %s cannot be written: %s.",
                *(_PAUSE, self._file.path, _reason(failure)),
            )

    def settle(self) -> None:
        """Wait until what is to be sorted is, for some seconds at most."""
        if (sorter := self._sorter) is not None:
            sorter.join(_MOST_SECONDS)

    def close(self) -> None:
        """Close the file, and let other processes open it. Nothing is remembered any more."""
        self._is_closed = True
        self._file.close()

    def _add(self, name: bytes, token_ids: list[int]) -> None:
        """Write an answer, and add it to those of its tenant. `_lock` is held."""
        self._due[name] = None
        forgotten = self._file.forgotten
        try:
            self._file.append(name, token_ids)
        finally:
            is_due = self._is_asked or bool(forgotten)
            self._due.update(dict.fromkeys(forgotten & self._tenants.keys()))
            forgotten.clear()
        self._kept(name, is_newest=True).add(token_ids)
        texts = self._tenants.values()
        num_new = sum(text.new.num_tokens for text in texts)
        num_old = sum(text.old.num_tokens for text in texts if text.old is not None)
        most = max(_MOST_NEW, num_old // NUM_SEGMENTS)
        if num_new > _DROPPED * most:
            for text in texts:
                text.new = SuffixAutomaton()
                text.since = None if text.since is None else []
        if is_due or num_new > most:
            self._sort_soon()

    def _kept(self, name: bytes, *, is_newest: bool = False) -> TenantText:
        """Return the text of a tenant, and drop those of whom there was no answer for longest. `_lock` is held."""
        text = self._tenants.get(name) or TenantText()
        if is_newest:
            self._tenants.pop(name, None)
        self._tenants[name] = text
        while len(self._tenants) > _MOST_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return text

    def _sort_soon(self) -> None:
        """Sort in the other thread. `_lock` is held."""
        self._is_asked = True
        if self._sorter is None and time.monotonic() >= self._sorts_again:
            sorter = threading.Thread(target=self._sort_behind, name="remember", daemon=True)
            with suppress(RuntimeError):  # Python ends, or there are too many
                sorter.start()
                self._sorter = sorter

    def _sort_behind(self) -> None:
        _lower_priority()
        while True:
            with self._lock:
                if self._is_closed or not self._is_asked or time.monotonic() < self._sorts_again:
                    self._sorter = None
                    return
                self._is_asked = False
            try:
                self._sort()
            except _Closed:
                pass
            except Exception as error:  # of no memory, too: then what was sorted before stays
                with self._lock:
                    self._is_asked = True
                    self._sorts_again = time.monotonic() + _PAUSE
                _log.warning("What is remembered is not sorted: %s.", _reason(error))

    def _sort(self) -> None:
        """Sort the answers of the last tenants of whom some are new or forgotten, or who ask again."""
        with self._lock:
            names = list(self._due)[-_MOST_TENANTS:]
            self._due = {}
            texts = {name: self._kept(name) for name in names}
            for text in texts.values():
                text.since = []
            end = self._file.number
        try:
            answers: dict[bytes, list[bytes]] = {}
            for name, tokens in self._file.answers(texts.keys(), end):
                answers.setdefault(name, []).append(tokens)
            for name in reversed(names):
                found = answers.pop(name, [])
                old = SortedAnswers(found, self._file.header.token_bytes, self._tick) if found else None
                self._exchange(name, texts[name], old)
        except BaseException:
            with self._lock:
                self._due = dict.fromkeys(names) | self._due
                for text in texts.values():
                    text.since = None
            raise

    def _exchange(self, name: bytes, text: TenantText, old: SortedAnswers | None) -> None:
        """Put what has been sorted in place of what was; what came since then is new."""
        new = SuffixAutomaton()
        num_added = 0
        while True:
            with self._lock:
                since = (text.since or [])[num_added:]
                if not since:
                    text.old = old
                    text.new = new
                    text.since = None
                    if old is None and not num_added and self._tenants.get(name) is text:
                        del self._tenants[name]
                    return
            num_added += len(since)
            for token_ids in since:
                _add(new, token_ids)

    def _tick(self, share: float) -> None:
        if self._is_closed:
            raise _Closed


class RememberedPosition:
    """Where one sequence is in what is remembered for its tenant.

    Args:
        tenants: the texts. name: of the tenant among them.
    """

    __slots__ = ("_length", "_name", "_new", "_num_read", "_old", "_tenants")

    def __init__(self, tenants: Mapping[bytes, TenantText], name: bytes) -> None:
        self._tenants = tenants
        self._name = name
        self._num_read = 0  # tokens of the sequence
        self._new = SuffixPosition(SuffixAutomaton())
        self._old: SortedAnswers | None = None
        self._length = 0  # of the match in `_old`

    def copies(self, token_ids: Sequence[int], least: int, most: Callable[[int], int]) -> list[CountedCopy]:
        """Copy what followed the longest end of a sequence.

        Args:
            token_ids: of the sequence.
            least: tokens that match at least.
            most: the length of a copy by that of its match.

        Returns:
            A copy of what was said lately and one of what was said before, as far as either has a match.
        """
        text = self._tenants.get(self._name)
        if text is None:
            return []
        num_unread = len(token_ids) - self._num_read
        self._num_read = len(token_ids)
        made = (
            self._copy_new(text.new, token_ids, num_unread, least, most),
            self._copy_old(text.old, token_ids, num_unread, least, most),
        )
        return [each for each in made if each is not None and each.token_ids]

    def _copy_new(
        self, new: SuffixAutomaton, token_ids: Sequence[int], num_unread: int, least: int, most: Callable[[int], int]
    ) -> CountedCopy:
        position = self._new
        if position.text is not new or num_unread > MOST_MATCH:
            position = self._new = SuffixPosition(new)
            num_unread = MOST_MATCH
        for token in token_ids[-num_unread:] if num_unread else ():
            position.state, position.length = new.match(position.state, position.length, token)
        copied = CountedCopy([], [], [], [])
        state, length = new.continued(position.state, position.length)
        for _ in range(most(length)):
            state, length = new.continued(state, length)
            if length < least:
                break
            token, following, count, total = new.best(state)
            copied.add([token], length, count, total)
            state = following
            length += 1
        return copied

    def _copy_old(
        self,
        old: SortedAnswers | None,
        token_ids: Sequence[int],
        num_unread: int,
        least: int,
        most: Callable[[int], int],
    ) -> CountedCopy | None:
        if old is None:
            return None
        expected = self._length + num_unread if old is self._old else MOST_MATCH
        self._old = old
        match = old.find(token_ids, least, expected)
        self._length = least - 1 if match is None else match.length
        return None if match is None else old.copy(match, most(match.length))


def _add(automaton: SuffixAutomaton, token_ids: Iterable[int]) -> None:
    """Add an answer."""
    end = ROOT
    for token in token_ids:
        end = automaton.add(end, token)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _lower_priority() -> None:
    """Let the thread that sorts take what others leave, where threads have numbers as processes have."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
