"""What the target has verified, kept for learning: a bounded ring of segments for each tenant."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from forerun.errors import ModelLoadError
from forerun.types import Sequence, Step

CONTEXT = 64
"""Positions of a prompt, its last ones, that are kept before an answer: what a drafter attends to, and learns nothing
of."""
BEFORE = 128
"""Tokens before these, of which no states are kept: for drafters that read tokens alone."""
OVERLAP = 16
"""The same of the segment before."""
SEGMENT = 128
"""Verified tokens of a segment at most: one piece of learning."""
LEAST = 4
"""The same at least: fewer hold no whole draft."""
MOST_TENANTS = 4
"""Tenants that have a ring: each may have a copy of the drafter's tensors, too."""
JUDGED = 0.1
"""Share of a ring, the newest, that nothing is learnt from."""
_TENSORS = ("token_ids", "states", "before")
_FIRST = "first"


@dataclass(frozen=True, slots=True, eq=False)
class Excerpt:
    """Some tokens of one sequence in a row, as the target has verified them.

    Attributes:
        token_ids: [n + 1] int64.
        states: [n, layers, H] bfloat16, of all but the last.
        before: [m] int64, the tokens before these.
        first: index of the first token that is learnt; those before it are context.
    """

    token_ids: Tensor
    states: Tensor
    before: Tensor
    first: int

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes."""
        return self.token_ids.nbytes + self.states.nbytes + self.before.nbytes

    @property
    def num_tokens(self) -> int:
        """Return how many of its tokens are learnt."""
        return len(self.token_ids) - self.first


@dataclass(slots=True)
class _Open:
    """The segment of a sequence that grows.

    Attributes:
        start: position of the first state. end: one behind the last.
        first: index in the sequence of the first token that is learnt.
    """

    start: int
    end: int
    first: int
    states: list[Tensor] = field(default_factory=list)

    def closed(self, token_ids: Seq[int]) -> Excerpt:
        """Return what it holds."""
        tokens = torch.tensor(token_ids[self.start : self.end + 1])
        before = torch.tensor(token_ids[max(0, self.start - BEFORE) : self.start], dtype=torch.int64)
        return Excerpt(tokens, torch.cat(self.states), before, self.first - self.start)


class Ring:
    """The newest segments of one tenant.

    Attributes:
        num_seen: tokens that have come so far.
        nbytes: of all segments.
    """

    def __init__(self) -> None:
        self._segments: deque[Excerpt] = deque()
        self.num_seen = 0
        self.nbytes = 0  # counted as they come and go: the engine's thread waits for it

    def add(self, segment: Excerpt, most: int) -> None:
        """Add a segment, and forget the oldest ones beyond `most` bytes."""
        self._segments.append(segment)
        self.num_seen += segment.num_tokens
        self.nbytes += segment.nbytes
        self.trim(most)

    def trim(self, most: int) -> None:
        """Forget the oldest segments beyond `most` bytes."""
        while self.nbytes > most:
            self.nbytes -= self._segments.popleft().nbytes

    def __iter__(self) -> Iterator[Excerpt]:
        return iter(self._segments)

    def split(self) -> tuple[list[Excerpt], list[Excerpt]]:
        """Return the older segments, which may be learnt, and the newest, which judge: in order of time. What has
        judged is learnt once it is no longer among the newest."""
        segments = list(self._segments)
        judged = JUDGED * sum(each.num_tokens for each in segments)
        place = len(segments)
        while place and judged > 0:
            place -= 1
            judged -= segments[place].num_tokens
        return segments[:place], segments[place:]


class Rings:
    """Watches a drafter's sequences (`StepWatcher`), and keeps what was verified, for each tenant apart.

    The engine's thread adds, another one reads.

    Args:
        memory: bytes of all rings together, divided equally among their tenants. Beside them, each sequence that is
            computed has at most a segment with its context.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._open: dict[Sequence, _Open] = {}
        self._rings: OrderedDict[str | None, Ring] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rings."""
        with self._lock:
            return sum(each.nbytes for each in self._rings.values())

    def restore(self, tenant: str | None, segments: Seq[Excerpt]) -> None:
        """Begin a tenant's ring with segments that were kept: those that have come meanwhile are newer."""
        with self._lock:
            newer = self._rings.pop(tenant, ())
            for segment in (*segments, *newer):
                self._add(tenant, segment)

    def tenants(self) -> dict[str | None, int]:
        """Return the tenants that have a ring -> the tokens that have come to it."""
        with self._lock:
            return {tenant: ring.num_seen for tenant, ring in self._rings.items()}

    def split(self, tenant: str | None) -> tuple[list[Excerpt], list[Excerpt]]:
        """Return a tenant's segments as `Ring.split` does; none if it has no ring."""
        with self._lock:
            ring = self._rings.get(tenant)
            return ([], []) if ring is None else ring.split()

    def see(self, steps: Seq[Step]) -> None:
        """Keep the states that steps have added, of a prompt the last ones (`StepWatcher.see`)."""
        for step in steps:
            if step.states is None or not len(step.states):
                continue
            sequence = step.sequence
            end = step.num_computed
            states = step.states
            if end <= sequence.num_prompt:
                states = states[-CONTEXT:]
                self._open.pop(sequence, None)
            start = end - len(states)
            known = self._open.get(sequence)
            if known is None or known.end != start:
                self.leave(sequence)
                first = max(sequence.num_prompt, start + 1)
                known = self._open[sequence] = _Open(start, start, first)
            known.states.append(states.to("cpu", torch.bfloat16, copy=True))
            known.end = end
            if end + 1 - known.first >= SEGMENT:
                self.leave(sequence)
                overlap = torch.cat(known.states)[-OVERLAP:]
                self._open[sequence] = _Open(end - len(overlap), end, end + 1, [overlap])

    def leave(self, sequence: Sequence, length: int = 0) -> None:
        """End the segment of a sequence; with a length, forget it (`StepWatcher.leave`)."""
        known = self._open.pop(sequence, None)
        if known is None or length or known.end + 1 - known.first < LEAST:
            return
        segment = known.closed(sequence.token_ids)
        tenant = sequence.params.tenant
        with self._lock:
            self._add(tenant, segment)

    def _add(self, tenant: str | None, segment: Excerpt) -> None:
        ring = self._rings.pop(tenant, None) or Ring()
        self._rings[tenant] = ring  # as the last that was used
        while len(self._rings) > MOST_TENANTS:
            self._rings.popitem(last=False)
        share = self._memory // len(self._rings)
        ring.add(segment, share)
        for each in self._rings.values():
            each.trim(share)


def excerpts_file(segments: Seq[Excerpt]) -> bytes:
    """Return segments as a file."""
    parts = {f"{number}.{name}": getattr(each, name) for number, each in enumerate(segments) for name in _TENSORS}
    firsts = torch.tensor([each.first for each in segments], dtype=torch.int64)
    return save({name: part.contiguous() for name, part in parts.items()} | {_FIRST: firsts})


def read_excerpts(content: bytes, like: tuple[int, int], vocab_size: int) -> list[Excerpt]:
    """Return what `excerpts_file` was given.

    Args:
        like: layers and width of the states.

    Raises:
        ModelLoadError: it is damaged, or holds the states of another target.
    """
    try:
        parts = load(content)
        firsts: list[int] = parts[_FIRST].tolist()
        every = [
            Excerpt(parts[f"{number}.token_ids"], parts[f"{number}.states"], parts[f"{number}.before"], first)
            for number, first in enumerate(firsts)
        ]
        if all(_is_whole(each, like, vocab_size) for each in every):
            return every
    except (SafetensorError, KeyError, TypeError, ValueError):
        pass
    raise ModelLoadError("What was kept to learn from is damaged, or of another target. Remove it.")


def _is_whole(segment: Excerpt, like: tuple[int, int], vocab_size: int) -> bool:
    tokens = torch.cat([segment.token_ids, segment.before])
    shape = (len(segment.token_ids) - 1, *like)
    is_known = tokens.dtype == torch.int64 and bool(((tokens >= 0) & (tokens < vocab_size)).all())
    return is_known and segment.states.shape == shape and 0 < segment.first <= len(segment.token_ids) - LEAST
