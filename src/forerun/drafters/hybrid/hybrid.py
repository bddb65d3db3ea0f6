"""Several drafters for one sequence: a look-up where text repeats, a model where it does not.

As SAM-decoding falls back on a model where its automaton finds too little (2411.10666), and suffix decoding likewise
(2411.04975); here measured acceptance and drafting time decide who is asked, and for how many nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter

from forerun.config import HYBRID_MODES, HYBRID_SOURCES, MAX_NUM_DRAFT_TOKENS
from forerun.drafters.base import Binding, Drafter, Traits
from forerun.drafters.build import build_drafter
from forerun.drafters.hybrid.members import MemberStep, Several, agreement, merge, signed, source_step
from forerun.drafters.validation import ask
from forerun.errors import ConfigError, DrafterError
from forerun.speculation import AcceptanceStats, Probes
from forerun.speculation.cost_model import Curve
from forerun.types import Draft, Sequence, Step

# One drafter of a hybrid: what its drafts are expected to win, what they cost, and for how many nodes it is asked.

PROBE_NODES = 4
"""Nodes of a draft that is asked for only to see whether the source's acceptance has changed."""


@dataclass(slots=True, eq=False)
class Source:
    """A drafter with its measured acceptance and cost.

    Attributes:
        name: for statistics.
        drafter: who drafts.
        acceptance: of its nodes, by their place in the draft.
        cost: seconds of a draft, by the nodes asked for.
        probes: when it may be asked although no gain is expected.
        fixed_length_draft: nodes of its drafts, where fewer would do it harm; None: any number.
    """

    name: str
    drafter: Drafter
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    cost: Curve = field(default_factory=lambda: Curve(MAX_NUM_DRAFT_TOKENS + 1, flat=False))
    probes: Probes = field(default_factory=Probes)
    fixed_length_draft: int | None = None

    def serves(self, budget: int) -> bool:
        """Whether it can be asked within this budget: never for less than a whole draft."""
        return self.fixed_length_draft is None or budget >= self.fixed_length_draft

    def size(self, nodes: int, budget: int) -> int:
        """The nodes to ask for where so many are wanted, if it serves this budget."""
        return min(nodes, budget) if self.fixed_length_draft is None else self.fixed_length_draft

    def accept_probs(self, sequence: Sequence, nodes: int) -> list[float]:
        """[nodes] the chance that each node of a draft is accepted, given that the draft has it."""
        gains, accept_probs = self.acceptance.expect_one(sequence, nodes)
        return [gain / max(accept_prob, 1e-9) for gain, accept_prob in zip(gains, accept_probs, strict=True)]

    def best(
        self, sequence: Sequence, budget: int, rate: float, min_acceptance_prob: float, sharers: int
    ) -> tuple[int, float]:
        """The number of nodes with the largest net gain, for a budget that it serves.

        Args:
            rate: tokens per second that are committed at present.
            min_acceptance_prob: as in `Drafter.draft`, for each node.
            sharers: sequences that share the cost of the draft.

        Returns:
            The nodes, and the expected accepted tokens less the price and the tokens that the time of drafting would
            have given.
        """
        most = self.size(budget, budget)
        gains, accept_probs = self.acceptance.expect_one(sequence, most)
        seconds = self.cost.table(most + 1)[1 : most + 1].tolist()
        tokens, pace, nets = 0.0, rate / sharers, []
        for gain, accept_prob, cost in zip(
            gains, accept_probs, seconds, strict=True
        ):  # lists: arrays so short are slower
            tokens += gain - min_acceptance_prob * accept_prob
            nets.append(tokens - pace * cost)
        best = nets.index(max(nets)) if self.fixed_length_draft is None else most - 1
        return best + 1, nets[best]

    def requests(
        self, candidates: Seq[tuple[Sequence, int]], rate: float, min_acceptance_prob: float
    ) -> list[tuple[Sequence, int]]:
        """Who is to ask it, and for how many nodes: all with a net gain, or one as a probe.

        candidates: sequences and their budgets.
        """
        served = [each for each in candidates if self.serves(each[1])]
        if not self.cost:
            return [(sequence, self.size(budget, budget)) for sequence, budget in served]
        table, asked = self.cost.table(), []
        for sequence, budget in served:
            nodes, net = self.best(sequence, budget, rate, min_acceptance_prob, len(served))
            if net > 0:
                more = self.size(nodes + (nodes + 1) // 2, budget)
                if more > nodes and self.probes.due and self.probes.buy(float(table[more] - table[nodes])):
                    nodes = more  # or the acceptance of later nodes would never be seen
                asked.append((sequence, nodes))
        if not asked and served and self.probes.due:
            sequence, budget = served[0]
            nodes = self.size(PROBE_NODES, budget)
            if self.probes.buy(float(table[nodes])):
                asked.append((sequence, nodes))
        return asked


_RATE_DECAY = 0.95
"""Weight that earlier steps keep at each new one in the rate of committed tokens."""


class Hybrid(Several):
    """Drafts with several drafters, each asked where its expected gain exceeds the cost of its draft.

    Args:
        sources: drafters in the order in which they are asked, or their texts with + between them.
        mode: "first": a sequence takes the first draft whose expected gain is at least what the sources after it could
            win; "merge": the drafts of all that are asked are merged into one tree by common prefixes, without probes.
        names: of the sources, for statistics; None takes their texts or their classes'.
        clock: seconds, for what drafting costs.

    Raises:
        ConfigError: no source, an unknown mode, or two sources that write into the target's cache.
        DrafterError: the texts are not those of different drafters.
    """

    _called = "The source {} of the hybrid"

    def __init__(
        self,
        sources: str | Seq[Drafter] = HYBRID_SOURCES,
        mode: str = HYBRID_MODES[0],
        names: Seq[str] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if isinstance(sources, str):
            names = names or _split(sources)
            sources = [build_drafter(text)[0] for text in _split(sources)]
        if not sources:
            raise ConfigError("A hybrid needs at least one source. Give drafters, or sources=suffix+staged.")
        if mode not in HYBRID_MODES:
            raise ConfigError(f"mode is {mode!r}, but must be one of {', '.join(HYBRID_MODES)}.")
        named = names or [_name_of(drafter) for drafter in sources]
        super().__init__(list(zip(named, sources, strict=True)))
        self._sources = [Source(name, drafter) for name, drafter in self._parts]
        writers = [source.name for source in self._sources if source.drafter.traits.writes_cache]
        if len(writers) > 1:  # the draft that is taken would be continued from what the other left
            raise ConfigError(
                f"The sources {' and '.join(writers)} of the hybrid both compute in the target's own cache, where one "
                "would overwrite the other's draft. Take one of them."
            )
        self._see_fixed_length_drafts()
        self._mode = mode
        self._clock = clock
        self._started: dict[Sequence, list[Source]] = {}  # the sources that have been told of it
        self._given: dict[Sequence, MemberStep] = {}
        self._last = 0.0  # when drafts were last asked for
        self._tokens = self._seconds = 0.0  # committed and passed, earlier ones decayed
        self._committed = 0

    @property
    def traits(self) -> Traits:
        return Traits.merged(f"{type(self).__name__} {self._mode}", [source.drafter.traits for source in self._sources])

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self._see_fixed_length_drafts()

    def _see_fixed_length_drafts(self) -> None:
        for source in self._sources:
            source.fixed_length_draft = source.drafter.traits.fixed_length_draft

    def start(self, sequence: Sequence) -> None:
        started = self._started[sequence] = []
        for source in self._sources:
            started.append(source)
            source.drafter.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        self._given.pop(sequence, None)
        started = self._started.get(sequence, [])
        try:
            while started:  # the one that failed to start, too
                started[-1].acceptance.stop(sequence)
                started[-1].drafter.stop(sequence)
                started.pop()
        except Exception:
            started.pop()
            self.stop(sequence)
            raise
        self._started.pop(sequence, None)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        rate = self._measure()
        wanted = [
            (sequence, min(budget, MAX_NUM_DRAFT_TOKENS))
            for sequence, budget in zip(sequences, num_draft_tokens, strict=True)
            if min(budget, sequence.room) > 0
        ]
        for sequence, _ in wanted:
            self._given[sequence] = MemberStep(Draft.empty(), {})
        unsettled = list(wanted)
        for number, source in enumerate(self._sources):
            asked = source.requests(unsettled, rate, min_acceptance_prob)
            if not asked:
                continue
            started = self._clock()
            drafts = ask(
                source.drafter, [sequence for sequence, _ in asked], [count for _, count in asked], min_acceptance_prob
            )
            source.cost.add(max(count for _, count in asked), self._clock() - started)
            for (sequence, count), draft in zip(asked, drafts, strict=True):
                self._given[sequence].asked[number] = count, draft
            if self._mode == "first":
                count = len(unsettled)
                unsettled = [
                    each for each in unsettled if not self._settled(number, *each, rate, min_acceptance_prob, count)
                ]
        if self._mode == "merge":
            for sequence, budget in wanted:
                self._merge(sequence, budget)
        return [self._given[each].draft if each in self._given else Draft.empty() for each in sequences]

    def commit(self, steps: Seq[Step]) -> None:
        given: list[MemberStep | None] = []
        for step in steps:
            each = self._given.pop(step.sequence, None)
            given.append(each if each is not None and each.draft is step.draft else None)
            if step.draft is not None and step.verdict is not None:
                self._committed += len(step.verdict.path) + 1
                if given[-1] is not None:
                    self._learn(step, given[-1])
        needs = self.needs
        for number, source in enumerate(self._sources):
            source.drafter.commit(
                [
                    source_step(step, each, number, needs, source.drafter.needs)
                    for step, each in zip(steps, given, strict=True)
                ]
            )

    def _measure(self) -> float:
        """Tokens per second, recent steps weighted most; 0 before the first one."""
        now = self._clock()
        if self._committed:
            elapsed = now - self._last
            self._tokens = _RATE_DECAY * self._tokens + self._committed
            self._seconds = _RATE_DECAY * self._seconds + elapsed
            for source in self._sources:
                source.probes.earn(elapsed)
        self._last, self._committed = now, 0
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def _settled(
        self, number: int, sequence: Sequence, budget: int, rate: float, min_acceptance_prob: float, sharers: int
    ) -> bool:
        """Take the source's draft, if it gave one that is better than what there is; whether nobody else is asked."""
        given = self._given[sequence]
        if number not in given.asked or not len(given.asked[number][1]):
            return False
        draft = given.asked[number][1]
        # a drawn draft may not be dropped for how it came out: those that stay would follow another distribution
        if (
            given.owner is None
            or draft.probs is not None
            or self._value(number, sequence) > self._value(given.owner, sequence)
        ):
            given.owner = number
            given.draft = signed(self._sources[number].name, draft)
        if draft.probs is not None:
            return True
        value = self._value(given.owner, sequence) - min_acceptance_prob * len(given.draft)
        return all(
            not source.serves(budget)
            or (source.cost and source.best(sequence, budget, rate, min_acceptance_prob, sharers)[1] <= value)
            for source in self._sources[number + 1 :]
        )

    def _merge(self, sequence: Sequence, budget: int) -> None:
        given = self._given[sequence]
        parts = {number: draft for number, (_, draft) in given.asked.items() if len(draft)}
        if len(parts) == 1:
            ((given.owner, draft),) = parts.items()
            given.draft = signed(self._sources[given.owner].name, draft)
        elif parts:
            given.asked = {number: given.asked[number] for number in parts}
            named = [(self._sources[number].name, draft) for number, draft in parts.items()]
            values = [self._sources[number].accept_probs(sequence, len(draft)) for number, draft in parts.items()]
            given.merged = merge(named, values, budget)
            given.draft = given.merged.draft

    def _value(self, number: int, sequence: Sequence) -> float:
        """Accepted tokens that are expected of a source's draft."""
        draft = self._given[sequence].asked[number][1]
        return sum(self._sources[number].accept_probs(sequence, len(draft)))

    def _learn(self, step: Step, given: MemberStep) -> None:
        """Every draft is judged by what was committed, the unused ones too, as far as the new tokens reach."""
        assert step.verdict is not None
        new_ids = step.sequence.token_ids[len(step.sequence.token_ids) - len(step.verdict.path) - 1 :]
        for number, (count, draft) in given.asked.items():
            path, judged = agreement(draft, new_ids)
            if number == given.owner:
                path, judged = step.verdict.path, draft.num_candidates
            complete = judged == draft.num_candidates
            self._sources[number].acceptance.observe(step.sequence, count if complete else judged, judged, path)


def _split(sources: str) -> list[str]:
    """The texts of a hybrid's sources."""
    texts = [text.strip() for text in sources.split("+")]
    if len(set(texts)) < len(texts) or "hybrid" in texts or "" in texts:
        raise DrafterError(
            f"sources is {sources!r}, but must be different names with + between, and none of them 'hybrid', "
            f"such as {HYBRID_SOURCES}."
        )
    return texts


def _name_of(drafter: Drafter) -> str:
    """DraftModel -> draft-model."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(drafter).__name__.removesuffix("Drafter")).lower()
