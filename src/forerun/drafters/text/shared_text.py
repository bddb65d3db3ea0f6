"""Text that the requests of one tenant share, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from forerun.drafters.text.suffix_automaton import ROOT, SuffixAutomaton

MAX_SHARED_TOKENS = 65_536
"""Tokens of text kept for the requests of one tenant."""
_IDLE_TENANTS = 8
"""Tenants without a running request whose text is kept."""


@dataclass(slots=True, eq=False)
class Place:
    """A sequence's longest suffix that stands in some text.

    Attributes:
        text: where.
        state, length: the suffix.
    """

    text: SuffixAutomaton
    state: int = ROOT
    length: int = 0


class SharedText:
    """The text of one tenant's requests, finished and running.

    An automaton cannot forget, so there are two: what comes is written into the young one, and when that holds half
    of what is allowed, it becomes the old one, and the old one is dropped.
    """

    def __init__(self, max_tokens: int) -> None:
        self._half = max_tokens // 2
        self.old: SuffixAutomaton | None = None
        self.young = SuffixAutomaton()
        self.sharers: set[Sharer] = set()

    @property
    def num_tokens(self) -> int:
        return self.young.num_tokens + (self.old.num_tokens if self.old else 0)

    @property
    def nbytes(self) -> int:
        return self.young.nbytes + (self.old.nbytes if self.old else 0)

    def make_room(self) -> int:
        """How many tokens may be written now, at least one."""
        if self.young.num_tokens >= self._half:
            self.old, self.young = self.young, SuffixAutomaton()
            for sharer in self.sharers:
                sharer.turn(self.young)
        return self._half - self.young.num_tokens


class Sharer:
    """One running sequence, writing into its tenant's text and reading from it."""

    __slots__ = ("_reading", "_text", "_writing")

    def __init__(self, text: SharedText) -> None:
        self._text = text
        self._writing = Place(text.young)
        self._reading = None if text.old is None else Place(text.old)
        text.sharers.add(self)

    def turn(self, young: SuffixAutomaton) -> None:
        """The young text has become the old one; what this sequence wrote there remains its longest match."""
        self._reading, self._writing = self._writing, Place(young)

    def write(self, token_ids: list[int]) -> None:
        """The sequence's next tokens."""
        start = 0
        while start < len(token_ids):
            block = token_ids[start : start + self._text.make_room()]
            start += len(block)
            place, reading = self._writing, self._reading
            for token in block:
                place.state = place.text.add(place.state, token)
                if reading is not None:
                    reading.state, reading.length = reading.text.match(reading.state, reading.length, token)
            place.length += len(block)

    def places(self) -> list[Place]:
        """Where the sequence stands in the shared texts, the newer first."""
        return [self._writing] if self._reading is None else [self._writing, self._reading]

    def leave(self) -> None:
        """The sequence is finished; its text stays."""
        self._text.sharers.discard(self)


class Tenants:
    """The shared texts by tenant: of all that have running sequences, and of the last few that had.

    Args:
        max_tokens: kept per tenant.
        max_idle: tenants without a running sequence that are kept, the most recent ones.
    """

    def __init__(self, max_tokens: int = MAX_SHARED_TOKENS, max_idle: int = _IDLE_TENANTS) -> None:
        self._max_tokens, self._max_idle = max_tokens, max_idle
        self._busy: dict[str, SharedText] = {}
        self._idle: OrderedDict[str, SharedText] = OrderedDict()

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in (*self._busy.values(), *self._idle.values()))

    def enter(self, tenant: str) -> Sharer:
        """A sequence of this tenant starts."""
        text = self._busy.get(tenant)
        if text is None:
            text = self._idle.pop(tenant) if tenant in self._idle else SharedText(self._max_tokens)
            self._busy[tenant] = text
        return Sharer(text)

    def leave(self, tenant: str, sharer: Sharer) -> None:
        """It is finished."""
        sharer.leave()
        text = self._busy.get(tenant)
        if text is not None and not text.sharers:
            self._idle[tenant] = self._busy.pop(tenant)
            while len(self._idle) > self._max_idle:
                self._idle.popitem(last=False)
