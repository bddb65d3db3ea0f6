"""Several drafters for one sequence: a look-up where text repeats, a model where it does not.

As SAM-decoding falls back on a model where its automaton finds too little (2411.10666), and suffix decoding likewise
(2411.04975); here measured acceptance and drafting time decide who is asked, and for how much.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from torch import Tensor

from forerun.config import HYBRID_MODES, HYBRID_SOURCES, MAX_NUM_DRAFT_TOKENS
from forerun.drafters.base import Binding, Drafter, Traits
from forerun.drafters.build import build_drafter
from forerun.drafters.hybrid.merging import Merged, agreement, kept, merge
from forerun.errors import ConfigError, DrafterError, ModelLoadError
from forerun.policy import Acceptance, Probes
from forerun.policy.curve import Curve
from forerun.types import Draft, Needs, Sequence, Step, Verdict


@dataclass(slots=True, eq=False)
class _Source:
    """One of the drafters, and what is known of it."""

    name: str
    drafter: Drafter
    acceptance: Acceptance = field(default_factory=Acceptance)
    cost: Curve = field(default_factory=lambda: Curve(MAX_NUM_DRAFT_TOKENS + 1, flat=False))
    probes: Probes = field(default_factory=Probes)
    whole_draft: int | None = None

    def serves(self, budget: int) -> bool:
        """Whether it can be asked within this budget: less than a whole draft would do it harm."""
        return self.whole_draft is None or budget >= self.whole_draft

    def size(self, nodes: int, budget: int) -> int:
        """The nodes to ask for where so many are wanted, if it serves this budget."""
        return min(nodes, budget) if self.whole_draft is None else self.whole_draft

    def worth(self, sequence: Sequence, nodes: int) -> list[float]:
        """[nodes] the chance that each node of a draft is accepted, given that it is there."""
        gains, chances = self.acceptance.expect([sequence], nodes)
        return [gain / max(chance, 1e-9) for gain, chance in zip(gains[0].tolist(), chances[0].tolist(), strict=True)]

    def best(self, sequence: Sequence, budget: int, rate: float, price: float, sharers: int) -> tuple[int, float]:
        """How many nodes to ask for, and the tokens won by it, less those its time would have given.

        It serves the budget.
        """
        most = self.size(budget, budget)
        gains, chances = self.acceptance.expect([sequence], most)
        net = (gains[0] - price * chances[0]).cumsum() - rate / sharers * self.cost.table()[1 : most + 1]
        best = int(net.argmax()) if self.whole_draft is None else most - 1
        return best + 1, float(net[best])


@dataclass(slots=True, eq=False)
class _Given:
    """What one sequence was given in this step, until it is known what became of it.

    Attributes:
        draft: for the engine.
        asked: source -> nodes asked for, its draft.
        owner: the source whose draft it is; None of a merged tree.
        merged: the tree, where several were merged, of the sources in `asked` in that order.
    """

    draft: Draft
    asked: dict[int, tuple[int, Draft]]
    owner: int | None = None
    merged: Merged | None = None


class Hybrid(Drafter):
    """Drafts with several drafters, each asked where it pays.

    Args:
        sources: drafters in the order in which they are asked, or their texts with + between them.
        mode: "first": a sequence takes the first draft that is worth at least what the sources after it could win;
            "merge": those that pay are merged into one tree by common prefixes.
        names: of the sources, for statistics; None takes their texts or their classes'.
        clock: seconds, for what drafting costs.

    Raises:
        ConfigError: no source, an unknown mode, or two sources that write into the target's cache.
        DrafterError: the texts are not those of different drafters.
    """

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
        self._sources = [_Source(name, drafter) for name, drafter in zip(named, sources, strict=True)]
        writers = [source.name for source in self._sources if source.drafter.traits.writes_cache]
        if len(writers) > 1:  # the draft that is taken would be continued from what the other left
            raise ConfigError(
                f"The sources {' and '.join(writers)} of the hybrid both compute in the target's own cache, where one "
                "would overwrite the other's draft. Take one of them."
            )
        self._see_whole_drafts()
        self._mode = mode
        self._clock = clock
        self._entered: set[Sequence] = set()
        self._given: dict[Sequence, _Given] = {}
        self._last = 0.0  # when drafts were last asked for
        self._tokens = self._seconds = 0.0  # of late
        self._committed = 0

    @property
    def needs(self) -> Needs:
        """What any source needs."""
        needs = Needs()
        for source in self._sources:
            needs |= source.drafter.needs
        return needs

    @property
    def traits(self) -> Traits:
        return Traits.merged(f"{type(self).__name__} {self._mode}", [source.drafter.traits for source in self._sources])

    @property
    def nbytes(self) -> int:
        """Bytes that the sources hold."""
        return sum(source.drafter.nbytes for source in self._sources)

    def bind(self, binding: Binding) -> None:
        """Bind every source. Raises what the source that cannot be bound raises, with its name."""
        for source in self._sources:
            try:
                source.drafter.bind(binding)
            except (DrafterError, ModelLoadError) as error:
                raise type(error)(f"The source {source.name!r} of the hybrid cannot be used: {error}") from error

        self._see_whole_drafts()

    def _see_whole_drafts(self) -> None:
        for source in self._sources:
            source.whole_draft = source.drafter.traits.whole_draft

    def start(self, sequence: Sequence) -> None:
        started: list[_Source] = []
        try:
            for source in self._sources:
                started.append(source)
                source.drafter.start(sequence)
        except Exception:
            for source in started[:-1]:
                source.drafter.stop(sequence)
            raise
        self._entered.add(sequence)

    def stop(self, sequence: Sequence) -> None:
        self._given.pop(sequence, None)
        if sequence not in self._entered:
            return  # one of the sources failed to start, and the others have let it go
        self._entered.remove(sequence)
        for source in self._sources:
            source.acceptance.stop(sequence)
            source.drafter.stop(sequence)

    def draft(self, sequences: Seq[Sequence], budgets: Seq[int], price: float = 0.0) -> list[Draft]:
        rate = self._measure()
        wanted = [
            (sequence, min(budget, MAX_NUM_DRAFT_TOKENS))
            for sequence, budget in zip(sequences, budgets, strict=True)
            if min(budget, sequence.room) > 0
        ]
        for sequence, _ in wanted:
            self._given[sequence] = _Given(_EMPTY, {})
        open_ = list(wanted)
        for number, source in enumerate(self._sources):
            asked = self._choose(number, open_, rate, price)
            if not asked:
                continue
            started = self._clock()
            drafts = source.drafter.draft([own for own, _ in asked], [count for _, count in asked], price)
            source.cost.add(max(count for _, count in asked), self._clock() - started)
            for (sequence, count), draft in zip(asked, drafts, strict=True):
                self._given[sequence].asked[number] = count, draft
            if self._mode == "first":
                open_ = [each for each in open_ if not self._settled(number, *each, rate, price, len(open_))]
        if self._mode == "merge":
            for sequence, budget in wanted:
                self._merge(sequence, budget)
        return [self._given[own].draft if own in self._given else _EMPTY for own in sequences]

    def commit(self, steps: Seq[Step]) -> None:
        given = [self._given.pop(step.sequence, None) for step in steps]
        given = [
            own if own is not None and own.draft is step.draft else None for own, step in zip(given, steps, strict=True)
        ]
        for step, own in zip(steps, given, strict=True):
            if step.draft is not None and step.verdict is not None:
                self._committed += len(step.verdict.path) + 1
                if own is not None:
                    self._learn(step, own)
        needs = self.needs
        for number, source in enumerate(self._sources):
            source.drafter.commit(
                [_part(step, own, number, needs, source.drafter.needs) for step, own in zip(steps, given, strict=True)]
            )

    def _measure(self) -> float:
        """Tokens per second of late; 0 before anything is known."""
        now = self._clock()
        if self._committed:
            elapsed = now - self._last
            self._tokens = 0.95 * self._tokens + self._committed
            self._seconds = 0.95 * self._seconds + elapsed
            for source in self._sources:
                source.probes.earn(elapsed)
        self._last, self._committed = now, 0
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def _choose(
        self, number: int, open_: Seq[tuple[Sequence, int]], rate: float, price: float
    ) -> list[tuple[Sequence, int]]:
        """Who is to ask this source, and for how many nodes: all for whom it pays, or one as a probe."""
        source = self._sources[number]
        open_ = [each for each in open_ if source.serves(each[1])]
        if not source.cost:
            return [(sequence, source.size(budget, budget)) for sequence, budget in open_]
        asked = []
        for sequence, budget in open_:
            nodes, net = source.best(sequence, budget, rate, price, len(open_))
            if net > 0:
                more = source.size(nodes + (nodes + 1) // 2, budget)
                table = source.cost.table()
                if more > nodes and source.probes.due and source.probes.buy(float(table[more] - table[nodes])):
                    nodes = more  # or what lies beyond would never be seen
                asked.append((sequence, nodes))
        if not asked and open_ and source.probes.due:
            sequence, budget = open_[0]
            nodes = source.size(4, budget)
            if source.probes.buy(float(source.cost.table()[nodes])):
                asked.append((sequence, nodes))
        return asked

    def _settled(self, number: int, sequence: Sequence, budget: int, rate: float, price: float, sharers: int) -> bool:
        """Take the source's draft, if it gave one that is better than what there is; whether nobody else is asked."""
        own = self._given[sequence]
        if number not in own.asked or not len(own.asked[number][1]):
            return False
        draft = own.asked[number][1]
        # what was drawn may not be dropped for how it came out, or the rest would not have been drawn from its law
        if (
            own.owner is None
            or draft.laws is not None
            or self._value(number, sequence) > self._value(own.owner, sequence)
        ):
            own.owner = number
            own.draft = self._signed(number, draft)
        if draft.laws is not None:
            return True
        value = self._value(own.owner, sequence) - price * len(own.draft)
        return all(
            not source.serves(budget)
            or (source.cost and source.best(sequence, budget, rate, price, sharers)[1] <= value)
            for source in self._sources[number + 1 :]
        )

    def _merge(self, sequence: Sequence, budget: int) -> None:
        own = self._given[sequence]
        parts = {number: draft for number, (_, draft) in own.asked.items() if len(draft)}
        if len(parts) == 1:
            ((own.owner, draft),) = parts.items()
            own.draft = self._signed(own.owner, draft)
        elif parts:
            own.asked = {number: own.asked[number] for number in parts}
            named = [(self._sources[number].name, draft) for number, draft in parts.items()]
            values = [self._sources[number].worth(sequence, len(draft)) for number, draft in parts.items()]
            own.merged = merge(named, values, budget)
            own.draft = own.merged.draft

    def _value(self, number: int, sequence: Sequence) -> float:
        """Accepted tokens that a source's draft promises."""
        draft = self._given[sequence].asked[number][1]
        return sum(self._sources[number].worth(sequence, len(draft)))

    def _signed(self, number: int, draft: Draft) -> Draft:
        """The source's draft with its name on every node, unless it has names of its own."""
        return draft if draft.sources else replace(draft, sources=(self._sources[number].name,) * len(draft))

    def _learn(self, step: Step, own: _Given) -> None:
        """Every draft is judged by what was committed, the unused ones too, as far as the new tokens reach."""
        assert step.verdict is not None
        new_ids = step.sequence.token_ids[len(step.sequence.token_ids) - len(step.verdict.path) - 1 :]
        for number, (count, draft) in own.asked.items():
            path, judged = agreement(draft, new_ids)
            if number == own.owner:
                path, judged = step.verdict.path, draft.num_candidates
            complete = judged == draft.num_candidates
            self._sources[number].acceptance.observe(step.sequence, count if complete else judged, judged, path)


def _part(step: Step, given: _Given | None, number: int, all_needs: Needs, needs: Needs) -> Step:
    """The step as one source sees it: its own part of the draft, or none. all_needs: of all sources together."""
    top = None if needs.top_tokens == 0 or step.top_tokens is None else step.top_tokens[:, : needs.top_tokens]
    taps = None
    if needs.layers and step.taps is not None:
        taps = step.taps[:, [all_needs.layers.index(layer) for layer in needs.layers]]
    if step.draft is None or step.verdict is None:
        if not needs.prompt_rows:
            top = taps = None
        return Step(step.sequence, None, None, step.num_computed, top, taps)
    path, draft = step.verdict.path, _EMPTY
    ids = step.draft.ids
    new_ids = [*(ids[node] for node in path), step.verdict.next_token]
    if given is not None and given.owner == number:
        return Step(step.sequence, given.asked[number][1], step.verdict, step.num_computed, top, taps)
    own_path: list[int] = []
    rows: list[int] = path
    if given is not None and given.merged is not None and number in given.asked:
        places = given.merged.places[list(given.asked).index(number)]
        draft = kept(given.asked[number][1], [node for node, _ in places])
        own_path = agreement(draft, new_ids[:-1])[0]
        rows = [at for _, at in places]
    verdict = Verdict(own_path, new_ids[len(own_path)] if len(draft) else new_ids[-1])
    n = len(step.draft)
    return Step(step.sequence, draft, verdict, step.num_computed, _rows(top, n, rows), _rows(taps, n, rows))


def _rows(values: Tensor | None, num_nodes: int, nodes: Seq[int]) -> Tensor | None:
    """Of the step's rows those up to the last committed token's, and those of some nodes."""
    if values is None:
        return None
    first = len(values) - num_nodes
    return values[[*range(first), *(first + node for node in nodes)]]


def _split(sources: str) -> list[str]:
    """The texts of a hybrid's sources."""
    texts = [text.strip() for text in sources.split("+")]
    if len(set(texts)) < len(texts) or "hybrid" in texts or "" in texts:
        raise DrafterError(
            f"sources is {sources!r}, but must be different names with + between, and none of them 'hybrid', "
            f"such as {HYBRID_SOURCES}."
        )
    return texts


def _name_of(drafter: Any) -> str:
    """DraftModel -> draft-model."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(drafter).__name__.removesuffix("Drafter")).lower()


_EMPTY = Draft.empty()
