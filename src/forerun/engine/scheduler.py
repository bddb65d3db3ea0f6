"""The scheduler: it shares batch slots, cache pages, prompt rows and draft tokens among sequences, step by step."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

from forerun.config import EngineConfig
from forerun.engine.kv_cache_manager import KVCacheManager
from forerun.engine.results import StepStats
from forerun.engine.sequence import SequenceState
from forerun.errors import QueueFullError
from forerun.models import LanguageModel
from forerun.speculation import DraftPlan, SpeculationPolicy

MAX_ROWS = 512
"""Most rows of prompts in one step."""
MIN_ROWS = 8
"""Fewest rows of prompts in one step: below, the step's fixed cost is most of what a prompt takes."""
DELAY = 1.2
"""Factor on the duration of a step without prompts, by which prompts may lengthen a step."""
DECAY = 0.8
"""Weight that earlier steps keep."""
STALL = 0.15
"""Seconds by which short prompts may lengthen a step beside answers that are watched: these come at reading speed."""
OLDEST_PART = 4
"""The oldest prompt has at least one row in so many, while shorter ones pass it."""
ENOUGH_ROWS = 64
"""Rows of a step, from which on its duration shows the cost of a row, whatever the fixed cost."""
LEAST_SHARE = 0.2
"""Least share of a step without prompts that counts as its fixed cost."""


class PromptShare:
    """Limits the rows of prompts in a step, so that a long prompt does not stall the answers of other sequences.

    A step is taken to last `fixed + row * rows`: rows of prompts and of answers cost about the same, and a
    large batch is measured by both together, since it seldom has a step without any prompt.

    Args:
        adaptive: False: always `MAX_ROWS`, so that a step's rows do not depend on time.
    """

    def __init__(self, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._fixed = 0.0  # seconds of a step, apart from its rows
        self._row = 0.0  # seconds that a row adds

    @property
    def _is_known(self) -> bool:
        """Return whether costs are known, and may decide."""
        return self._adaptive and self._fixed > 0 and self._row > 0

    def rows(self, num_answering: int, is_watched: bool, *, is_short: bool = False) -> int:
        """Return the rows of prompts that the next step may hold.

        Args:
            num_answering: sequences that are being answered.
            is_watched: some answer is streamed.
            is_short: the rows are of prompts that have no more than `MAX_ROWS` left, and so hold up answers for long
                only where many come.
        """
        if not (self._is_known and is_watched):
            return MAX_ROWS
        seconds = DELAY * (self._fixed + self._row * num_answering)
        seconds = max(seconds, STALL) if is_short else seconds
        return min(max(int(seconds / self._row), MIN_ROWS), MAX_ROWS)

    def ends_before(self, num_rows: int, num_ahead: int, num_left: int) -> bool:
        """Return whether the first tokens of prompts come sooner in the mean if a step ends before further rows.

        These rows delay the prompts ahead by what they cost; without them, those left wait for another step's start.

        Args:
            num_ahead: prompts of which the step holds rows already.
            num_left: prompts that it does not hold yet.
        """
        return self._is_known and num_ahead * num_rows * self._row > num_left * self._fixed

    def observe(self, stats: StepStats) -> None:
        """Learn from a step's duration."""
        if stats.num_prompt_rows:
            if self._fixed or stats.num_rows >= ENOUGH_ROWS:
                self._row = _smoothed(self._row, max(stats.time_total - self._fixed, 0.0) / stats.num_rows)
        elif stats.num_rows:
            fixed = stats.time_total - self._row * stats.num_rows
            self._fixed = _smoothed(self._fixed, max(fixed, LEAST_SHARE * stats.time_total))


def _smoothed(old: float, new: float) -> float:
    return DECAY * old + (1 - DECAY) * new if old else new


class WaitingQueue:
    """Orders waiting sequences: flows of which nothing runs; then preempted ones, then the flow that has been given
    least (self-clocked fair queueing: Golestani, 1994), first come first. A priority delays those of lower priority in
    its own scope alone.

    A sequence counts for its flow as the tokens of its prompt and its max_tokens. Requests without a flow count as one.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[Hashable, int, Hashable], deque[SequenceState]] = {}  # by scope, priority and flow
        self._resuming: deque[SequenceState] = deque()
        self._given: dict[Hashable, int] = {}  # tokens, by flow that waits
        self._level = 0  # the most that a flow was given when it was served, with which a flow that comes begins

    def __len__(self) -> int:  # counted every time: an interrupt may come between a queue and its count
        return len(self._resuming) + sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[SequenceState]:
        yield from chain(self._resuming, *self._queues.values())

    def push(self, state: SequenceState) -> None:
        """Append a sequence behind those of its flow."""
        self._given.setdefault(state.request.flow, self._level)
        self._queues.setdefault(_queue_of(state), deque()).append(state)

    def push_back(self, state: SequenceState) -> None:
        """Put a sequence before all others of its priority, unless it is there already."""
        if state not in self._resuming:
            self._resuming.appendleft(state)

    def first(self, running: Iterable[SequenceState]) -> SequenceState | None:
        """Return the sequence that is next beside the running ones; None if none waits."""
        if not self._queues and not self._resuming:
            return None
        # `remove` may have been interrupted between a last state and its queue
        fresh = [states[0] for states in self._queues.values() if states]
        heads = [*self._resuming, *sorted(fresh, key=lambda state: self._given[state.request.flow])]
        highest: dict[Hashable, int] = {}
        for state in heads:
            scope = state.request.scope
            priority = state.request.params.priority
            highest[scope] = max(highest.get(scope, priority), priority)
        heads = [state for state in heads if state.request.params.priority == highest[state.request.scope]]
        busy = {state.request.flow for state in running}
        return next((state for state in heads if state.request.flow not in busy), heads[0] if heads else None)

    def take(self, state: SequenceState) -> None:
        """Remove a sequence that is admitted."""
        flow = state.request.flow
        if state not in self._resuming:
            given = self._given[flow] + state.sequence.max_length
            self._given[flow] = given
            self._level = max(self._level, given)
        self.remove(state)

    def remove(self, state: SequenceState) -> None:
        """Remove a sequence, if it is there."""
        key = _, _, flow = _queue_of(state)
        if state in self._resuming:
            self._resuming.remove(state)
        elif state in self._queues.get(key, ()):
            self._queues[key].remove(state)
            if not self._queues[key]:
                del self._queues[key]
                if not any(other == flow for _, _, other in self._queues):
                    self._given.pop(flow, None)


def _queue_of(state: SequenceState) -> tuple[Hashable, int, Hashable]:
    return state.request.scope, state.request.params.priority, state.request.flow


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The sequences of the next step; empty where no sequence finds a page.

    Attributes:
        undrafted: those within their prompts, without a drafter all; each with the number of its committed tokens that
            the target computes, beginning at the cache's length.
        drafting: those that may draft.
        plan: the policy's plan for them, in their order.
    """

    undrafted: list[tuple[SequenceState, int]]
    drafting: list[SequenceState]
    plan: DraftPlan

    @property
    def states(self) -> list[SequenceState]:
        """Return the sequences of the step."""
        return [*(state for state, _ in self.undrafted), *self.drafting]

    def split(self) -> Iterator[Schedule]:
        """Yield a schedule for every sequence alone."""
        for turn in self.undrafted:
            yield Schedule([turn], [], DraftPlan([]))
        for index, (state, k) in enumerate(zip(self.drafting, self.plan.num_draft_tokens, strict=True)):
            own = {0: self.plan.reason_of(index)}
            yield Schedule([], [state], replace(self.plan, num_draft_tokens=[k], own_reasons=own))


class Scheduler:
    """Holds waiting and running sequences. A running sequence stays until it finishes, unless memory runs out or a
    request of higher priority waits: then the lowest in rank is preempted, and computed again later.

    Priorities are compared within a scope alone: what one tenant gives its requests takes nothing from another's. In
    rank, those come first above which their scope runs no priority, then those above which it runs one, and so on;
    among these, who came first.

    Args:
        target: whose pool the sequences' pages come from.
        memory: where it has sequences share pages, choices of one request wait until the first of them has computed
            their prompt.

    Attributes:
        share: learns from the steps how many rows of prompts the next one may hold.
    """

    def __init__(self, config: EngineConfig, target: LanguageModel, memory: KVCacheManager) -> None:
        self._max_batch, self._max_queue, self._chunk = config.max_batch, config.max_queue, config.prefill_chunk
        self._pool, self._memory = target.pool, memory
        self.share = PromptShare(adaptive=target.exactness.exact)
        self.waiting = WaitingQueue()
        self.running: list[SequenceState] = []
        self._followers: dict[SequenceState, list[SequenceState]] = {}  # by the choice that computes their prompt

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + sum(map(len, self._followers.values()))

    def __iter__(self) -> Iterator[SequenceState]:
        yield from chain(self.waiting, self.running, *self._followers.values())

    def add(self, states: Seq[SequenceState]) -> None:
        """Queue the choices of one request.

        Raises:
            QueueFullError: the queue is full.
        """
        free = None if self._max_queue is None else self._max_batch + self._max_queue - len(self)
        if free is not None and len(states) > free:
            raise QueueFullError(
                f"{len(self)} sequences run or wait, and the request has {len(states)}, but with max_batch "
                f"{self._max_batch} and max_queue {self._max_queue} there is room for {max(free, 0)}. Send it again "
                "later, or raise max_queue."
            )
        first = states[0]
        if self._memory.reuses and len(states) > 1:
            self._followers[first] = list(states[1:])
            for state in states[1:]:
                state.leader = first
            states = states[:1]
        for state in states:
            self.waiting.push(state)

    def computed_prompts(self) -> dict[int, int]:
        """Return of each running request the tokens of its prompt that are computed or were in memory, by its id. Any
        thread may call this, also in the middle of a step."""
        found: dict[int, int] = {}
        for state in [*self.running]:  # copied at once: the engine's thread may change it
            length = 0 if (cache := state.cache) is None else min(cache.length, state.sequence.num_prompt)
            found[state.request.id] = max(length, found.get(state.request.id, 0))
        return found

    def admit(self) -> None:
        """Admit waiting sequences while slots are free. An interrupt leaves none out: for a moment it is in both."""
        while (state := self.waiting.first(self.running)) is not None and self._can_start(state):
            if state not in self.running:
                self.running.append(state)
            self.waiting.take(state)

    def preempted(self) -> SequenceState | None:
        """Return the sequence to preempt before the next step, because memory runs out, a waiting request has a higher
        priority, or nothing of its flow runs and more than one sequence of another; None if there is none."""
        if len(self.running) > 1 and self._is_short():
            return max(self.running, key=self._ranks().__getitem__)
        first = self.waiting.first(self.running)
        if not self.running or first is None or self._can_start(first):
            return None
        rank = self._ranks().__getitem__
        scope, priority = first.request.scope, first.request.params.priority
        last = max((state for state in self.running if state.request.scope == scope), key=rank, default=None)
        if last is not None and priority > last.request.params.priority:
            return last
        flows = Counter(state.request.flow for state in self.running)
        ((flow, count),) = flows.most_common(1)
        if first.request.flow in flows or count == 1:
            return None
        victim = max((state for state in self.running if state.request.flow == flow), key=rank)
        return victim if victim.request.scope != scope or victim.request.params.priority <= priority else None

    def requeue(self, state: SequenceState) -> None:
        """Put a preempted sequence back into the queue."""
        self.waiting.push_back(state)
        self.running.remove(state)

    def prompt_computed(self, state: SequenceState) -> None:
        """Queue the other choices of the request, which may fork the computed prompt."""
        for follower in reversed(self._followers.get(state, ())):
            self.waiting.push_back(follower)
        self._followers.pop(state, None)

    def remove(self, state: SequenceState) -> None:
        """Remove a sequence, if it is there."""
        if state in self.running:
            self.running.remove(state)
        self.waiting.remove(state)
        for followers in self._followers.values():
            if state in followers:
                followers.remove(state)
        if waiting := self._followers.get(state):  # it left before it had computed the prompt
            first, *following = waiting
            for follower in following:
                follower.leader = first
            if following:
                self._followers[first] = following
            self.waiting.push_back(first)
        self._followers.pop(state, None)

    def plan(self, policy: SpeculationPolicy | None) -> Schedule:
        """Schedule the next step of the running sequences whose caches are there.

        Args:
            policy: decides how much is drafted; None without a drafter.
        """
        ready = [state for state in self.running if state.num_uncomputed_tokens == 1]
        left = math.inf
        if self._pool is not None:
            left = self._pool.num_available - sum([state.pages_wanted(1) for state in ready])
        turns: list[tuple[SequenceState, int]] = []
        if any(state.cache is not None and state.num_uncomputed_tokens > 1 for state in self.running):
            turns = self._prompts(ready, left)
        left -= sum([state.pages_wanted(num_scheduled_tokens) for state, num_scheduled_tokens in turns])
        if policy is None or not ready:
            return Schedule([*turns, *((state, 1) for state in ready)], [], DraftPlan([]))
        sequences = [state.sequence for state in ready]
        plan = policy.beside_prompts(sequences) if turns else policy.plan(sequences)
        if any(plan.num_draft_tokens):
            plan = _limit_to_requests(plan, ready)
            plan = plan if self._pool is None else _limit_to_pages(plan, ready, left)
        return Schedule(turns, ready, plan)

    def _prompts(self, ready: Seq[SequenceState], pages: float) -> list[tuple[SequenceState, int]]:
        """Return the next chunks of prompts beside the sequences that are being answered, as far as rows and pages
        suffice. The order is that of `_by_turn`, but some rows are kept for the oldest prompt, so that it is computed
        however many shorter ones come."""
        turns: list[tuple[SequenceState, int]] = []
        states = self._by_turn()
        is_watched = any(state.request.stream for state in ready)
        may_end = any(state.request.stream for state in states)
        oldest = self._oldest(states)
        kept = 0
        if states[0] is not oldest:
            kept = self.share.rows(len(ready), is_watched, is_short=True) // OLDEST_PART
            states.remove(oldest)
            states.append(oldest)
        taken = 0
        for place, state in enumerate(states):
            is_short = state.num_uncomputed_tokens <= MAX_ROWS
            most = self.share.rows(len(ready), is_watched, is_short=is_short) - taken - kept
            least = 0
            if kept and state is oldest:
                least = min(kept, max(taken // (OLDEST_PART - 1), MIN_ROWS))
                most = max(most + kept, least)
            most = min(state.num_uncomputed_tokens, self._chunk, most)
            if turns and may_end and self.share.ends_before(most, len(turns), len(states) - place):
                most = min(most, least)
            num_tokens = self._memory.chunk(state, most) if most > 0 else 0
            while num_tokens and state.pages_wanted(num_tokens) > pages:
                num_tokens //= 2
            if num_tokens:
                pages -= state.pages_wanted(num_tokens)
                taken += num_tokens
                turns.append((state, num_tokens))
        return turns

    def _by_turn(self) -> list[SequenceState]:
        """Return the sequences within their prompts. Scopes take turns; within one, higher priority comes first, then a
        flow's second sequence after the first of every other. Among equals, fewest tokens are left to compute for the
        first, so that the mean time to the first token is the least."""
        states = sorted(self.running, key=attrgetter("num_uncomputed_tokens", "sequence.id"))
        rests = {state: place for place, state in enumerate(states)}
        states.sort(key=attrgetter("request.params.priority"), reverse=True)
        places = _places(states, lambda state: (state.request.scope, state.request.flow))
        states.sort(key=lambda state: (-state.request.params.priority, places[state]))
        places = _places(states, lambda state: state.request.scope)
        states.sort(key=lambda state: (places[state], rests[state]))
        return [state for state in states if state.cache is not None and state.num_uncomputed_tokens > 1]

    def _oldest(self, states: Seq[SequenceState]) -> SequenceState:
        """Return the sequence that came first of those above which their scope has no priority."""
        highest: dict[Hashable, int] = {}
        for state in states:
            scope = state.request.scope
            priority = state.request.params.priority
            highest[scope] = max(highest.get(scope, priority), priority)
        first = [state for state in states if state.request.params.priority == highest[state.request.scope]]
        return min(first, key=attrgetter("sequence.id"))

    def _ranks(self) -> dict[SequenceState, tuple[int, int]]:
        """Return the rank of every running sequence."""
        scopes: dict[Hashable, set[int]] = {}
        for state in self.running:
            scopes.setdefault(state.request.scope, set()).add(state.request.params.priority)
        ranks = {}
        for state in self.running:
            priority, others = state.request.params.priority, scopes[state.request.scope]
            ranks[state] = sum(each > priority for each in others), state.sequence.id
        return ranks

    def _can_start(self, state: SequenceState) -> bool:
        """Return whether the sequence can start beside the running ones, with pages for the tokens of all."""
        if len(self.running) >= self._max_batch:
            return False
        if self._pool is None or not self.running:
            return True
        promised = sum(
            other.pages_wanted(other.num_uncomputed_tokens + 1) for other in self.running if other.cache is not None
        )
        lengths = [len(each.sequence.token_ids) for each in (state, *self.running) if each.cache is None]
        entering = sum(self._memory.pages_for(length + 1) for length in lengths)
        return promised + entering <= self._pool.num_available

    def _is_short(self) -> bool:
        """Return whether pages are missing for the next token of some running sequence, or for any."""
        if self._pool is None:
            return False
        entered = [state for state in self.running if state.cache is not None]
        ready = [state for state in entered if state.num_uncomputed_tokens == 1]
        if not ready and entered:
            ready = [min(entered, key=self._ranks().__getitem__)]
        return sum(state.pages_wanted(1) for state in ready) > self._pool.num_available


def _limit_to_requests(plan: DraftPlan, ready: Seq[SequenceState]) -> DraftPlan:
    """Limit the plan to the draft tokens that each request allows."""
    if all(state.most_drafted is None for state in ready):
        return plan
    limited = [
        k if state.most_drafted is None else min(k, state.most_drafted)
        for state, k in zip(ready, plan.num_draft_tokens, strict=True)
    ]
    return replace(plan, num_draft_tokens=limited, reason=plan.reason if any(limited) else "request")


def _limit_to_pages(plan: DraftPlan, ready: Seq[SequenceState], pages: float) -> DraftPlan:
    """Drop the drafts from the plan for which there are no pages."""
    num_draft_tokens = list(plan.num_draft_tokens)
    reasons = dict(plan.own_reasons)
    for index, (state, k) in enumerate(zip(ready, plan.num_draft_tokens, strict=True)):
        wanted = state.pages_wanted(1 + k) - state.pages_wanted(1) if k else 0
        if wanted > pages:
            num_draft_tokens[index] = 0
            reasons[index] = "no room"
        else:
            pages -= wanted
    if num_draft_tokens == plan.num_draft_tokens:
        return plan
    reason = plan.reason if any(num_draft_tokens) else "no room"
    return replace(plan, num_draft_tokens=num_draft_tokens, reason=reason, own_reasons=reasons)


def _places(states: Iterable[SequenceState], group_of: Callable[[SequenceState], Hashable]) -> dict[SequenceState, int]:
    """Return for each sequence the number of those before it in its group."""
    counts, places = Counter[Hashable](), dict[SequenceState, int]()
    for state in states:
        group = group_of(state)
        places[state] = counts[group]
        counts[group] += 1
    return places
