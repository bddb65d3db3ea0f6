"""Suffix drafting: copies what most often followed the longest suffix of the sequence that occurred before.

The automaton and the length of a copy are those of SAM-decoding (Hu et al., 2411.10666); going on with the most
frequent continuation, and text shared between requests, those of SuffixDecoding (Oliaro et al., 2411.04975).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forerun.drafters.base import Binding, Traits
from forerun.drafters.lookup.copy_drafter import COPY_RATES, CopyDrafter, level_of
from forerun.drafters.lookup.suffix_automaton import SuffixAutomaton, SuffixPosition
from forerun.errors import ConfigError
from forerun.speculation import Rates
from forerun.types import Sequence

if TYPE_CHECKING:
    from forerun.drafters.lookup.remembered.remembered_text import RememberedPosition, RememberedText

MAX_SHARED_TOKENS = 65_536
"""Tokens of text kept for the requests of one tenant."""
_IDLE_TENANTS = 8
"""Tenants without a running request whose text is kept."""


class SharedText:
    """The text of one tenant's requests, finished and running.

    An automaton cannot forget, so there are two: new text is written into the young one, and when that holds half
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
        """Return how many tokens may be written now, at least one; the oldest half is dropped if there is no space."""
        if self.young.num_tokens >= self._half:
            self.old = self.young
            self.young = SuffixAutomaton()
            for sharer in self.sharers:
                sharer.turn(self.young)
        return self._half - self.young.num_tokens


class Sharer:
    """One running sequence, writing into its tenant's text and reading from it."""

    __slots__ = ("_reading", "_text", "_writing")

    def __init__(self, text: SharedText) -> None:
        self._text = text
        self._writing = SuffixPosition(text.young)
        self._reading = None if text.old is None else SuffixPosition(text.old)
        text.sharers.add(self)

    def turn(self, young: SuffixAutomaton) -> None:
        """Continue in a new young text; what this sequence wrote into the old one remains its longest match."""
        self._reading = self._writing
        self._writing = SuffixPosition(young)

    def write(self, token_ids: list[int]) -> None:
        """Append the sequence's next tokens."""
        start = 0
        while start < len(token_ids):
            block = token_ids[start : start + self._text.make_room()]
            start += len(block)
            position = self._writing
            reading = self._reading
            for token in block:
                position.state = position.text.add(position.state, token)
                if reading is not None:
                    reading.state, reading.length = reading.text.match(reading.state, reading.length, token)
            position.length += len(block)

    def positions(self) -> list[SuffixPosition]:
        """Return the sequence's suffixes in the shared texts, the newer text first."""
        return [self._writing] if self._reading is None else [self._writing, self._reading]


class Tenants:
    """The shared texts by tenant: of all that have running sequences, and of the last few that had.

    Args:
        max_tokens: kept per tenant.
        max_idle: tenants without a running sequence that are kept, the most recent ones.
    """

    def __init__(self, max_tokens: int = MAX_SHARED_TOKENS, max_idle: int = _IDLE_TENANTS) -> None:
        self._max_tokens = max_tokens
        self._max_idle = max_idle
        self._busy: dict[str, SharedText] = {}
        self._idle: OrderedDict[str, SharedText] = OrderedDict()

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in (*self._busy.values(), *self._idle.values()))

    def enter(self, tenant: str) -> Sharer:
        """Register a sequence of this tenant."""
        text = self._busy.get(tenant)
        if text is None:
            text = self._idle.pop(tenant) if tenant in self._idle else SharedText(self._max_tokens)
            self._busy[tenant] = text
        return Sharer(text)

    def leave(self, tenant: str, sharer: Sharer) -> None:
        """Release a finished sequence."""
        text = self._busy.get(tenant)
        if text is None:
            return
        text.sharers.discard(sharer)
        if not text.sharers:
            self._idle[tenant] = self._busy.pop(tenant)
            while len(self._idle) > self._max_idle:
                self._idle.popitem(last=False)


LENGTH_BASE = 1
LENGTH_FACTOR = 4
"""A copy is this many tokens long for each token of the match it begins with, and LENGTH_BASE more."""
SHARE_FACTORS = (0.5, 0.75, 0.9, 1.0)
"""What a remembered token is less probable than one of the sequence itself that has as long a match, before any trial:
where fewer than half of the places had it, most, the only one, and all of several."""
_LEAST_REMEMBERED = 2
"""Tokens that match at least in what is remembered: a single one occurs everywhere."""
_SURE_MATCH = 32
"""Tokens of a match in the sequence itself beyond which nothing else is searched."""


@dataclass(slots=True, eq=False)
class _SequenceText:
    """The text of one sequence.

    Attributes:
        position: the end of the sequence in its text, which holds nothing else.
        sharer: its part in its tenant's text; None where nothing is shared.
        num_read: its tokens that both hold.
        remembered: its position in the answers of the past; None where none are kept.
    """

    position: SuffixPosition = field(default_factory=lambda: SuffixPosition(SuffixAutomaton()))
    sharer: Sharer | None = None
    num_read: int = 0
    remembered: RememberedPosition | None = None


class Suffix(CopyDrafter):
    """Copies from the sequence itself, and with `share`, from other requests of the same tenant. Never drawn.

    The longer the match, the longer the copy. Where answers are remembered (`LLM(..., remember=FILE)`), it copies from
    those of the tenant too, if more of such a copy is likely to be accepted: by what has become of copies after as long
    a match of which as large a share of the places had the token.

    Args:
        min_match: tokens that must match at least (1 or more).
        share: requests that name the same tenant (`SamplingParams.tenant`) copy from each other's prompts and outputs,
            also after they are finished. How fast tokens come may tell a client what those hold; a request without
            a tenant shares nothing.
        max_shared_tokens: tokens of text kept per tenant; the oldest half goes first (2 or more).

    Raises:
        ConfigError: min_match below 1, max_shared_tokens below 2.
    """

    def __init__(
        self,
        min_match: int = 1,
        share: bool = False,
        max_shared_tokens: int = MAX_SHARED_TOKENS,
    ) -> None:
        if min_match < 1:
            raise ConfigError(f"min_match is {min_match}, but at least 1 token must match.")
        if max_shared_tokens < 2:
            raise ConfigError(
                f"max_shared_tokens is {max_shared_tokens}, but must be at least 2. Leave out share to share no text."
            )
        super().__init__()
        self._min_match = min_match
        self._max_shared_tokens = max_shared_tokens
        self._tenants = Tenants(max_shared_tokens) if share else None
        self._remembered: RememberedText | None = None
        self._states: dict[Sequence, _SequenceText] = {}

    @property
    def traits(self) -> Traits:
        reads = ("alone" if self._tenants is None else "shared", *(("remembered",) if self._remembered else ()))
        return Traits(("Suffix", *reads), estimates=True, can_sleep=True, remembers=True)

    def bind(self, binding: Binding) -> None:
        self._remembered = binding.remembered
        if self._remembered is not None:
            remembered = [rate * factor for rate in COPY_RATES for factor in SHARE_FACTORS]
            self._rates = Rates((*COPY_RATES, *remembered))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all texts."""
        shared = 0 if self._tenants is None else self._tenants.nbytes
        return shared + sum(own.position.text.nbytes for own in self._states.values())

    def start(self, sequence: Sequence) -> None:
        own = self._states[sequence] = _SequenceText()
        if self._remembered is not None:
            own.remembered = self._remembered.position(sequence.params.tenant)
        if self._tenants is not None and sequence.params.tenant is not None:
            own.sharer = self._tenants.enter(sequence.params.tenant)

    def stop(self, sequence: Sequence) -> None:
        super().stop(sequence)
        own = self._states.pop(sequence, None)
        if self._tenants is None or own is None or own.sharer is None:
            return
        own.sharer.write(sequence.token_ids[own.num_read :])
        tenant = sequence.params.tenant
        assert tenant is not None
        self._tenants.leave(tenant, own.sharer)

    def reset(self) -> None:
        if self._tenants is not None:
            self._tenants = Tenants(self._max_shared_tokens)

    def _copy(self, sequence: Sequence, count: int) -> tuple[list[int], list[int]]:
        self._read(sequence, len(sequence.token_ids))
        own = self._states[sequence]
        text, end, length = self._longest(own)
        token_ids, lengths = text.copy(end, length, min(count, _longest_copy(length)), self._min_match)
        levels = [level_of(each) for each in lengths]
        if own.remembered is None or length >= _SURE_MATCH:
            return token_ids, levels
        least = max(self._min_match, _LEAST_REMEMBERED)
        found = own.remembered.copies(sequence.token_ids, least, lambda match: min(count, _longest_copy(match)))
        best = self._expected(levels) if found else 0.0
        for copied in found:
            others = [*map(_remembered_level, copied.lengths, copied.counts, copied.totals)]
            if (expected := self._expected(others)) > best:
                best = expected
                token_ids = copied.token_ids
                levels = others
        return token_ids, levels

    def _expected(self, levels: list[int]) -> float:
        """Return how many tokens of a copy are accepted, on average."""
        expected = 0.0
        accept_prob = 1.0
        for level in levels:
            accept_prob *= self._rates.rate(level)
            expected += accept_prob
        return expected

    def _read(self, sequence: Sequence, end: int) -> None:
        own = self._states[sequence]
        if end <= own.num_read:
            return
        token_ids = sequence.token_ids[own.num_read : end]
        own.num_read = end
        position = own.position
        for token in token_ids:
            position.state = position.text.add(position.state, token)
        position.length += len(token_ids)
        if own.sharer is not None:
            own.sharer.write(token_ids)

    def _longest(self, own: _SequenceText) -> tuple[SuffixAutomaton, int, int]:
        """Return the longest suffix that something follows: in the sequence's text first, then in its tenant's."""
        text = own.position.text
        state, length = text.continued(own.position.state, own.position.length)
        for position in own.sharer.positions() if own.sharer is not None else ():
            other, other_length = position.text.continued(position.state, position.length)
            if other_length > length:
                text = position.text
                state = other
                length = other_length
        return text, state, length


def _longest_copy(length: int) -> int:
    """Return how many tokens are copied after a match of this length."""
    return LENGTH_BASE + LENGTH_FACTOR * length


def _remembered_level(length: int, count: int, total: int) -> int:
    """Return the level of a remembered token after a match of this length, which came at `count` of `total` places."""
    share = int(2 * count >= total)
    if count == total:
        share = 2 if total == 1 else 3
    return len(COPY_RATES) + len(SHARE_FACTORS) * level_of(length) + share
