"""Suffix drafting: copies what most often followed the longest suffix of the sequence that occurred before.

The automaton and the length of a copy are those of SAM-decoding (Hu et al., 2411.10666); going on with the most
frequent continuation, and text shared between requests, those of SuffixDecoding (Oliaro et al., 2411.04975).
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from forerun.drafters.base import Traits
from forerun.drafters.lookup.copy_drafter import CopyDrafter
from forerun.errors import ConfigError
from forerun.types import Sequence

# A suffix automaton that grows by a token at a time: every string of the text, and what followed it most often.
#
# Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; for several texts as in Mohri,
# Moreno,
# Weinstein, "General suffix automaton construction algorithm and space bounds", 2009.

ROOT = 0
_COUNTED_LINKS = 8
"""Suffixes of each new token, from the longest down, whose occurrences are counted; other counts are not updated."""


class SuffixAutomaton:
    """All strings of one or more growing texts, in O(1) amortised a token.

    A state stands for the strings that end at the same positions; its link is the state of their longest suffix that
    ends at more. A text is named by the state of all of it, `ROOT` at first, and texts may grow in turn. Of each
    state's continuations the most frequent is at hand, of equally frequent ones the most recent.

    Most states have one continuation, so the best one is held in arrays and only the branching states have a dict.

    Args:
        counted_links: of each new token's suffixes, from the longest down, this many are counted; text without long
            periods has few, and then every count is exact.
    """

    __slots__ = ("_branches", "_count", "_counted_links", "_length", "_link", "_target", "_token", "num_tokens")

    def __init__(self, counted_links: int = _COUNTED_LINKS) -> None:
        self._counted_links = counted_links
        self._link = array("i", [-1])
        self._length = array("i", [0])
        self._count = array("i", [0])
        self._token = array("i", [-1])
        self._target = array("i", [-1])
        self._branches: dict[int, dict[int, int]] = {}
        self.num_tokens = 0
        """Tokens held: those of all texts, what texts have in common from their beginnings counted once."""

    def __len__(self) -> int:
        """States: at most two for each token, and the root."""
        return len(self._link)

    @property
    def nbytes(self) -> int:
        """Return the bytes held; iterates over the branching states."""
        arrays = (self._link, self._length, self._count, self._token, self._target)
        dicts = (self._branches, *self._branches.values())
        return sum(sys.getsizeof(part) for part in (*arrays, *dicts))

    def add(self, end: int, token: int) -> int:
        """Lengthen the text that ends in state `end`, and return the state in which it ends now."""
        following = self.follow(end, token)
        if following < 0:
            new = self._append(end, token)
            self.num_tokens += 1
        elif self._length[following] == self._length[end] + 1:
            new = following  # another text begins in the same way
        else:
            new = self._split(end, token, following)
            self.num_tokens += 1
        self._count_suffixes(end, token)
        return new

    def follow(self, state: int, token: int) -> int:
        """Return the state of a state's strings with one token more; -1 if they do not occur."""
        if self._token[state] == token:
            return self._target[state]
        branches = self._branches.get(state)
        return -1 if branches is None else branches.get(token, -1)

    def match(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest suffix of a string and one more token that occurs in a text, as its state and length.

        Args:
            state, length: the same of the string itself. It may be from before the automaton grew.
        """
        while state > ROOT and length <= self._length[self._link[state]]:
            state = self._link[state]  # the string's state has been split since
        while (following := self.follow(state, token)) < 0:
            state = self._link[state]
            if state < ROOT:
                return ROOT, 0
            length = self._length[state]
        return following, length + 1

    def continued(self, state: int, length: int) -> tuple[int, int]:
        """Return the longest suffix of a string that something follows, as its state and length; at worst (ROOT, 0)."""
        while state > ROOT and self._target[state] < 0:
            state = self._link[state]
            length = self._length[state]
        return (state, length) if state > ROOT else (ROOT, 0)

    def copy(self, state: int, length: int, count: int, min_match: int = 1) -> tuple[list[int], list[int]]:
        """Copy what follows a string, each time by the most frequent continuation; at a text's end its suffixes go on.

        Args:
            state, length: of the string.
            count: tokens at most.
            min_match: a suffix shorter than this is not continued.

        Returns:
            The tokens, and how long the string was that each of them follows.
        """
        token_ids: list[int] = []
        lengths: list[int] = []
        while len(token_ids) < count:
            state, length = self.continued(state, length)
            if length < min_match or state == ROOT:
                break
            token_ids.append(self._token[state])
            lengths.append(length)
            state = self._target[state]
            length += 1
        return token_ids, lengths

    def _append(self, end: int, token: int) -> int:
        """Add a state for a string that has not occurred yet."""
        new = self._new_state(self._length[end] + 1)
        tokens = self._token
        targets = self._target
        links = self._link
        state = end
        while state >= 0:
            if targets[state] < 0:
                tokens[state] = token
                targets[state] = new
            else:
                following = self.follow(state, token)
                if following >= 0:
                    break
                self._set(state, token, new)
            state = links[state]
        if state < 0:
            self._link[new] = ROOT
        elif self._length[following] == self._length[state] + 1:
            self._link[new] = following
        else:
            self._link[new] = self._split(state, token, following)
        return new

    def _split(self, state: int, token: int, following: int) -> int:
        """Split off a state for the strings of `following` that are one token longer than those of `state`."""
        new = self._new_state(self._length[state] + 1)
        for values in (self._link, self._count, self._token, self._target):
            values[new] = values[following]
        if following in self._branches:
            self._branches[new] = self._branches[following].copy()
        self._link[following] = new
        while state >= 0 and self.follow(state, token) == following:
            self._set(state, token, new)
            state = self._link[state]
        return new

    def _count_suffixes(self, end: int, token: int) -> None:
        """Count one more occurrence of every suffix, and update the most frequent continuations."""
        counts = self._count
        tokens = self._token
        targets = self._target
        links = self._link
        state = end
        counted = -1
        for _ in range(self._counted_links):
            if tokens[state] == token:  # most states have no other
                following = targets[state]
                if following != counted:
                    counts[following] += 1
            else:
                following = self._branches[state][token]
                if following != counted:
                    counts[following] += 1
                if counts[following] >= counts[targets[state]]:
                    tokens[state] = token
                    targets[state] = following
            counted = following
            state = links[state]
            if state < 0:
                break

    def _new_state(self, length: int) -> int:
        self._link.append(-1)
        self._length.append(length)
        self._count.append(0)
        self._token.append(-1)
        self._target.append(-1)
        return len(self._link) - 1

    def _set(self, state: int, token: int, target: int) -> None:
        """Set the transition of a token from a state to another."""
        if self._target[state] < 0:
            self._token[state] = token
            self._target[state] = target
            return
        branches = self._branches.get(state)
        if self._token[state] == token:
            self._target[state] = target
        elif branches is None:
            branches = self._branches[state] = {self._token[state]: self._target[state]}
        if branches is not None:
            branches[token] = target


MAX_SHARED_TOKENS = 65_536
"""Tokens of text kept for the requests of one tenant."""
_IDLE_TENANTS = 8
"""Tenants without a running request whose text is kept."""


@dataclass(slots=True, eq=False)
class SuffixPosition:
    """A sequence's longest suffix that occurs in some text.

    Attributes:
        text: where.
        state, length: the suffix.
    """

    text: SuffixAutomaton
    state: int = ROOT
    length: int = 0


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


@dataclass(slots=True, eq=False)
class _SequenceText:
    """The text of one sequence.

    Attributes:
        position: the end of the sequence in its text, which holds nothing else.
        sharer: its part in its tenant's text; None where nothing is shared.
        num_read: its tokens that both hold.
    """

    position: SuffixPosition = field(default_factory=lambda: SuffixPosition(SuffixAutomaton()))
    sharer: Sharer | None = None
    num_read: int = 0


class Suffix(CopyDrafter):
    """Copies from the sequence itself, and with `share`, from other requests of the same tenant. Never drawn.

    The longer the match, the longer the copy.

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
        self._states: dict[Sequence, _SequenceText] = {}

    @property
    def traits(self) -> Traits:
        return Traits(("Suffix", "alone" if self._tenants is None else "shared"), estimates=True, can_sleep=True)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all texts."""
        shared = 0 if self._tenants is None else self._tenants.nbytes
        return shared + sum(own.position.text.nbytes for own in self._states.values())

    def start(self, sequence: Sequence) -> None:
        own = self._states[sequence] = _SequenceText()
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
        text, end, length = self._longest(self._states[sequence])
        return text.copy(end, length, min(count, LENGTH_BASE + LENGTH_FACTOR * length), self._min_match)

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
