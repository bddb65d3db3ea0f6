"""The answers that a server has given, by tenant: kept in a file, sorted in memory, and copied from by `suffix`.

As the global tree of suffix decoding (Oliaro et al., 2411.04975; Arctic Inference), which counts what followed a
context in earlier answers. Here what was said until lately is sorted, and what came since is in an automaton; now and
then, at low priority, all is sorted anew, without what the file has forgotten.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

from forerun.drafters.lookup.remembered.answer_file import TENANT_BYTES, AnswerFile
from forerun.drafters.lookup.remembered.sorted_answers import MOST_MATCH, CountedCopy, SortedAnswers
from forerun.drafters.lookup.suffix_automaton import ROOT, SuffixAutomaton, SuffixPosition
from forerun.utils.files import Closing, digest

_log = logging.getLogger(__name__)
CONTEXT_TOKENS = MOST_MATCH
"""Tokens of a prompt's end that are kept before the answer, by which its beginning is found."""
_MOST_NEW = 65_536
"""Tokens in automata, after which all is sorted anew; and what is sorted while the file is opened."""
_MOST_TENANTS = 256
"""Tenants whose answers are in memory, the last ones; those of others are sorted when they ask again."""
_PAUSE = 60.0
"""Seconds without writing after it has failed."""
_NICENESS = 19
_MOST_SECONDS = 10.0
"""That `settle` waits for sorting."""


class _Closed(Exception):
    """Sorting is to end."""


class TenantText:
    """The answers to one tenant.

    Attributes:
        old: those that are sorted; None if there are none.
        new: those since.
    """

    __slots__ = ("new", "num_new", "old")

    def __init__(self) -> None:
        self.old: SortedAnswers | None = None
        self.new = SuffixAutomaton()

    def add(self, token_ids: Iterable[int]) -> None:
        """Add an answer to the new ones."""
        end = ROOT
        for token in token_ids:
            end = self.new.add(end, token)


class RememberedText(Closing):
    """Answers of the past. One thread, the engine's, may call this; another sorts.

    Args:
        path: the file. num_bytes: that it takes; None: as many as it has, else `default_bytes`.
        vocab_size, fingerprint: of the target's tokenizer.

    Attributes:
        is_read: a drafter has asked for it.

    Raises:
        ConfigError: as `AnswerFile`.
    """

    def __init__(
        self, path: Path, num_bytes: int | None, vocab_size: int, fingerprint: str, *, default_bytes: int
    ) -> None:
        self.is_read = False
        self._file = AnswerFile(path, num_bytes, vocab_size, fingerprint, default_bytes=default_bytes)
        self._tenants: dict[bytes, TenantText] = {}
        self._new: list[tuple[int, bytes, list[int]]] = []  # number, tenant and tokens of the answers in automata
        self._due: set[bytes] = set()  # tenants who ask, or of whom something is forgotten since it was sorted
        self._lock = threading.Lock()  # of all these, against the thread that sorts
        self._sorter = ThreadPoolExecutor(1, "remember", _lower_priority)
        self._is_sorting = False
        self._is_closed = False
        self._resumes = 0.0  # when writing is tried again
        stored = [each for segment in self._file.stored for each in segment]
        self._known = dict.fromkeys(each.tenant for each in reversed(stored))  # tenants of the file, and perhaps more
        self._due.update(islice(self._known, _MOST_TENANTS))
        if self._file.num_tokens <= _MOST_NEW:
            self._sort()
        else:
            self._sort_soon()
        _log.info("remember %s: %s answers, %s tokens", path, f"{len(stored):,}", f"{self._file.num_tokens:,}")

    @property
    def nbytes(self) -> int:
        """Return the bytes in memory."""
        with self._lock:
            texts = list(self._tenants.values())
        return sum(text.new.nbytes + (0 if text.old is None else text.old.nbytes) for text in texts)

    def of(self, tenant: str | None) -> TenantText | None:
        """Return what is remembered for a tenant, or for all requests that name none; None if nothing is."""
        return self._tenants.get(_name(tenant))

    def position(self, tenant: str | None) -> RememberedPosition:
        """Return the position of a new sequence of this tenant."""
        name = _name(tenant)
        if name not in self._tenants and name in self._known:
            with self._lock:
                self._due.add(name)
            self._sort_soon()
        return RememberedPosition(self, tenant)

    def write(self, token_ids: Sequence[int], num_prompt: int, tenant: str | None) -> None:
        """Remember an answer, and the end of its prompt. What cannot be written is a line in the log.

        token_ids: of both; num_prompt: those of the prompt.
        """
        if self._is_closed or len(token_ids) == num_prompt or time.monotonic() < self._resumes:
            return
        token_ids = list(token_ids[max(num_prompt - CONTEXT_TOKENS, 0) :])
        name = _name(tenant)
        with self._lock:
            try:
                if not self._file.is_whole:
                    raise OSError(0, "it was cut short while it was in use")
                forgotten = self._file.append(name, token_ids)
            except OSError as failure:
                self._resumes = time.monotonic() + _PAUSE
                _log.warning(
                    "Answers are not remembered for %.0f seconds: %s cannot be written: %s.",
                    *(_PAUSE, self._file.path, failure.strerror or failure),
                )
                return
            self._due.update(each.tenant for each in forgotten if each.tenant in self._tenants)
            self._known[name] = None
            self._new.append((self._file.stored[-1][-1].number, name, token_ids))
            text = self._tenants.pop(name) if name in self._tenants else TenantText()
            self._tenants[name] = text  # the last one in their order
            text.add(token_ids)
            is_due = bool(forgotten) or sum(len(each) for _, _, each in self._new) > _MOST_NEW
        if is_due:
            self._sort_soon()

    def reset(self) -> None:
        """Drop what an interrupted `write` may have left half written; it is sorted instead."""
        with self._lock:
            for _, name, _ in self._new:
                self._tenants.setdefault(name, TenantText()).new = SuffixAutomaton()
        self._sort_soon()

    def settle(self) -> None:
        """Wait until what is to be sorted is, for some seconds at most."""
        with suppress(TimeoutError, RuntimeError):
            self._sorter.submit(int).result(_MOST_SECONDS)

    def close(self) -> None:
        """Close the file, and let other processes open it. Nothing is remembered any more."""
        self._is_closed = True
        self._sorter.shutdown()
        self._file.close()

    def _sort_soon(self) -> None:
        """Sort in the other thread, unless it is about to."""
        if not self._is_sorting:
            with suppress(RuntimeError):  # Python ends, and takes no more work
                self._is_sorting = True
                self._sorter.submit(self._sort_behind)

    def _sort_behind(self) -> None:
        try:
            self._sort()
        except _Closed:
            pass
        except Exception as error:  # of no memory, too: then what was sorted before stays
            _log.warning("What is remembered is not sorted: %s", error)
        finally:
            self._is_sorting = False

    def _sort(self) -> None:
        """Sort the answers of each tenant of which some are new or forgotten, and of those who ask again."""
        with self._lock:
            changed = self._due | {name for _, name, _ in self._new}
            self._due = set()
            if not self._file.is_whole:
                return
            last = max((number for number, _, _ in self._new), default=0)
            answers: dict[bytes, list[bytes]] = {}
            self._known = {}
            for segment in self._file.stored:
                for stored in segment:
                    self._known[stored.tenant] = None
                    if stored.tenant in changed:
                        answers.setdefault(stored.tenant, []).append(self._file.tokens(stored))
        for name in sorted(changed):
            found = answers.pop(name, [])
            old = SortedAnswers(found, self._file.header.token_bytes, self._tick) if found else None
            with self._lock:
                text = self._tenants.setdefault(name, TenantText())
                since = [ids for number, own, ids in self._new if own == name and number > last]
                fresh = TenantText()
                for token_ids in since:
                    fresh.add(token_ids)
                text.old = old
                text.new = fresh.new
                self._new = [each for each in self._new if each[1] != name or each[0] > last]
                if old is None and not since:
                    del self._tenants[name]
                while len(self._tenants) > _MOST_TENANTS:
                    del self._tenants[next(iter(self._tenants))]

    def _tick(self, share: float) -> None:
        if self._is_closed:
            raise _Closed


class RememberedPosition:
    """Where one sequence is in what is remembered for its tenant."""

    __slots__ = ("_length", "_new", "_num_read", "_old", "_tenant", "_text")

    def __init__(self, text: RememberedText, tenant: str | None) -> None:
        self._text = text
        self._tenant = tenant
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
        text = self._text.of(self._tenant)
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


def _name(tenant: str | None) -> bytes:
    """Return the hash of a tenant's name, which no text of the file tells."""
    return bytes.fromhex(digest((tenant or "").encode("utf-8", "surrogatepass")))[:TENANT_BYTES]


def _lower_priority() -> None:
    """Let the thread that sorts take what others leave, where threads have priorities of their own."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
