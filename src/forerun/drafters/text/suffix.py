"""Suffix drafting: what most often followed the longest suffix of the sequence that stood somewhere before.

The automaton and the length of a copy are those of SAM-decoding (Hu et al., 2411.10666); going on with the most
frequent continuation, and text shared between requests, those of SuffixDecoding (Oliaro et al., 2411.04975).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.drafters.base import Traits
from forerun.drafters.text.copy_drafter import CopyDrafter
from forerun.drafters.text.shared_text import MAX_SHARED_TOKENS, Place, Sharer, Tenants
from forerun.drafters.text.suffix_automaton import SuffixAutomaton
from forerun.errors import ConfigError
from forerun.types import Sequence

LENGTH_BASE = 1
LENGTH_FACTOR = 4
"""A copy is this many tokens long for each token of the match it begins with, and LENGTH_BASE more."""


@dataclass(slots=True, eq=False)
class _Held:
    """What is held for one sequence.

    Attributes:
        place: the end of the sequence in its text, which holds nothing else.
        sharer: its part in its tenant's text; None where nothing is shared.
        num_read: its tokens that both hold.
    """

    place: Place = field(default_factory=lambda: Place(SuffixAutomaton()))
    sharer: Sharer | None = None
    num_read: int = 0


class Suffix(CopyDrafter):
    """Copies from the sequence itself, and if it is told to, from other requests of the same tenant. Never drawn.

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
        self._states: dict[Sequence, _Held] = {}

    @property
    def traits(self) -> Traits:
        return Traits((type(self).__name__, "alone" if self._tenants is None else "shared"))

    @property
    def nbytes(self) -> int:
        """Memory of all texts, in bytes."""
        shared = 0 if self._tenants is None else self._tenants.nbytes
        return shared + sum(held.place.text.nbytes for held in self._states.values())

    def start(self, sequence: Sequence) -> None:
        held = self._states[sequence] = _Held()
        if self._tenants is not None and sequence.params.tenant is not None:
            held.sharer = self._tenants.enter(sequence.params.tenant)

    def stop(self, sequence: Sequence) -> None:
        super().stop(sequence)
        held = self._states.pop(sequence, None)
        if self._tenants is None or held is None or held.sharer is None:
            return
        held.sharer.write(sequence.token_ids[held.num_read :])
        tenant = sequence.params.tenant
        assert tenant is not None
        self._tenants.leave(tenant, held.sharer)

    def reset(self) -> None:
        if self._tenants is not None:
            self._tenants = Tenants(self._max_shared_tokens)

    def _copy(self, sequence: Sequence, count: int) -> tuple[list[int], list[int]]:
        self._read(sequence, len(sequence.token_ids))
        text, end, length = self._longest(self._states[sequence])
        return text.copy(end, length, min(count, LENGTH_BASE + LENGTH_FACTOR * length), self._min_match)

    def _read(self, sequence: Sequence, end: int) -> None:
        held = self._states[sequence]
        if end <= held.num_read:
            return
        token_ids = sequence.token_ids[held.num_read : end]
        held.num_read = end
        place = held.place
        for token in token_ids:
            place.state = place.text.add(place.state, token)
        place.length += len(token_ids)
        if held.sharer is not None:
            held.sharer.write(token_ids)

    def _longest(self, held: _Held) -> tuple[SuffixAutomaton, int, int]:
        """The longest suffix that something follows: in the sequence's text first, then in its tenant's."""
        text = held.place.text
        state, length = text.continued(held.place.state, held.place.length)
        for place in held.sharer.places() if held.sharer is not None else ():
            other, other_length = place.text.continued(place.state, place.length)
            if other_length > length:
                text, state, length = place.text, other, other_length
        return text, state, length
