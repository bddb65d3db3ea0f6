"""Several drafters for one sequence: n-gram drafts where text repeats, a model where it does not.

As SAM-decoding falls back on a model where its automaton finds too little (2411.10666), and suffix decoding likewise
(2411.04975); here what copies drafts first, and prices decide whether, and for which sequences, one that takes time
drafts in its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import replace
from time import perf_counter

from forerun.config import HYBRID_MODES, HYBRID_SOURCES, MAX_NUM_DRAFT_TOKENS
from forerun.drafters.base import Binding, Drafter, Traits
from forerun.drafters.build import build_drafter
from forerun.drafters.hybrid.members import (
    CompositeDrafter,
    MemberStep,
    agreement,
    merge,
    source_step,
    with_source,
    without_given,
)
from forerun.drafters.parse_text import source_texts
from forerun.drafters.validation import checked_drafts
from forerun.errors import ConfigError, DrafterError
from forerun.models import identity
from forerun.speculation import CostModel, DraftOutcome, drafter_costs
from forerun.speculation.choose_k import PLAN_STEPS, best_cut
from forerun.types import Draft, Needs, Sequence, Step, Verdict


class Hybrid(CompositeDrafter):
    """Drafts with several drafters, each where tokens per second are the higher for it.

    Sources that copy draft in every step. Of the others, the one that promises the highest rate drafts for those
    sequences where its drafts are worth more than the copies; where none promises more than the copies alone, none
    runs. A fixed K leaves out prices: it drafts where its drafts are worth more.

    Args:
        sources: drafters in the order in which they are tried, or their texts with + between them; a text that holds
            plus signs or commas in double quotes.
        mode: "first": a sequence has the draft of one source; "merge": the drafts of all that draft are merged into one
            tree by common prefixes, without probes.
        names: of the sources, for statistics; None takes their texts or their classes'.

    Raises:
        ConfigError: no source, an unknown mode, or two sources that write into the target's cache.
        DrafterError: the texts are not those of different drafters.
    """

    _kind = "Hybrid"
    _name_in_errors = "The source {} of the hybrid"

    def __init__(
        self,
        sources: str | Seq[Drafter] = HYBRID_SOURCES,
        mode: str = HYBRID_MODES[0],
        names: Seq[str] | None = None,
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
        writers = [name for name, drafter in self._parts if drafter.traits.writes_cache]
        if len(writers) > 1:  # the draft that is taken would be continued from what the other left
            raise ConfigError(
                f"The sources {' and '.join(writers)} of the hybrid both compute in the target's own cache, where one "
                "would overwrite the other's draft. Take one of them."
            )
        self._mode = mode
        self._started: dict[Sequence, list[Drafter]] = {}  # the sources that started it
        self._given: dict[Sequence, MemberStep] = {}
        self._prices: Seq[float] | None = None  # of the next step
        self._plain = 0.0  # seconds of the last step without drafts
        self._is_priced = False  # the last step was
        self._refusing: list[Sequence] = []  # the sequences for which sources refused to draft last
        self._refused: dict[int, int] = {}  # source -> steps for which its refusal stands
        self._asked: tuple[int, int, int, int] | None = None  # source, sequences, largest K, tokens to be followed
        self.use_costs({})

    def use_costs(self, costs: dict[str, CostModel]) -> None:
        """Choose by these costs of the sources that do not copy, by their names; unknown ones cost nothing. They stay
        as they are."""
        self._learns_costs = False
        self._choosers = {
            number: traits.chooser(costs.get(name))
            for number, (name, drafter) in enumerate(self._parts)
            if not (traits := drafter.traits).estimates
        }
        self._awake = list(range(len(self._parts)))

    @property
    def drafting_seconds(self) -> float:
        """Return what the sources' drafts of the last step are expected to have cost."""
        seconds = sum([float(chooser.costs.draft(1, 0)[0]) for chooser in self._choosers.values()])
        if self._asked is not None:
            number, count, longest, lag = self._asked
            costs = self._choosers[number].costs
            draft = costs.draft(count, longest)
            seconds += float(draft[-1] - draft[0]) + costs.follow(lag)
        return seconds

    @property
    def needs(self) -> Needs:
        """Return the union of the needs of those sources that are told of the present step."""
        first, *others = [self._parts[number][1].needs for number in self._awake] or [Needs()]
        for needs in others:
            first |= needs
        return first

    @property
    def traits(self) -> Traits:
        parts = [drafter.traits for _, drafter in self._parts]
        merged = Traits.merged(f"{self._kind} {self._mode}", parts)
        return replace(merged, fixed_length_draft=None, estimates=True)

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        target = identity(binding.target)
        paid = ((name, drafter.traits) for name, drafter in self._parts if not drafter.traits.estimates)
        self.use_costs({name: drafter_costs((target, *traits.cost_key)).costs for name, traits in paid})
        self._learns_costs = True

    def see_prices(self, prices: Seq[float]) -> None:
        self._prices = prices

    def start(self, sequence: Sequence) -> None:
        started = self._started[sequence] = []
        for _, drafter in self._parts:
            started.append(drafter)
            drafter.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        self._given.pop(sequence, None)
        for chooser in self._choosers.values():
            chooser.stop(sequence)
        started = self._started.get(sequence, [])
        try:
            while started:  # the one that failed to start, too
                started[-1].stop(sequence)
                started.pop()
        except Exception:
            started.pop()
            self.stop(sequence)
            raise
        self._started.pop(sequence, None)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        prices = self._prices
        self._prices = None
        drafting = [
            (sequence, min(most, MAX_NUM_DRAFT_TOKENS))
            for sequence, most in zip(sequences, num_draft_tokens, strict=True)
            if min(most, sequence.room) > 0
        ]
        for sequence, _ in drafting:
            self._given[sequence] = MemberStep(Draft.empty(), {})
        for number in range(len(self._parts)):
            if number not in self._choosers:
                self._ask(number, drafting, min_acceptance_prob)
        self._asked = None
        asked = self._wanted(drafting, prices)
        for number, counts in asked.items():
            wanted = [(sequence, k) for (sequence, _), k in zip(drafting, counts, strict=True) if k]
            if prices is None:
                self._ask(number, wanted, min_acceptance_prob)
            else:
                self._ask_timed(number, wanted)
        self._is_priced = prices is not None
        self._wake()
        for index, (sequence, most) in enumerate(drafting):
            self._settle(sequence, most)
            if prices is not None and any(counts[index] for counts in asked.values()):
                self._weigh(self._given[sequence], prices)
        return [self._given[each].draft if each in self._given else Draft.empty() for each in sequences]

    def commit(self, steps: Seq[Step]) -> None:
        given: list[MemberStep | None] = []
        for step in steps:
            each = self._given.pop(step.sequence, None)
            given.append(None if each is None else each.of(step.draft))
        self._learn(steps, given)
        needs = self.needs
        for number in self._awake:
            drafter = self._parts[number][1]
            drafter.commit(
                [source_step(step, each, number, needs, drafter.needs) for step, each in zip(steps, given, strict=True)]
            )
        if self._is_priced:
            self._wake()  # as in the next step none may be asked

    def _wake(self) -> None:
        """Choose the sources that are told of the next step to come."""
        self._awake = [
            number
            for number in range(len(self._parts))
            if not (self._is_priced and number in self._choosers and self._choosers[number].is_asleep)
        ]

    def _ask(self, number: int, wanted: Seq[tuple[Sequence, int]], least: float) -> None:
        """Let a source draft."""
        if not wanted:
            return
        sequences = [sequence for sequence, _ in wanted]
        counts = [count for _, count in wanted]
        drafts = checked_drafts(self._parts[number][1], sequences, counts, least)
        for sequence, count, draft in zip(sequences, counts, drafts, strict=True):
            self._given[sequence].drafts[number] = count, draft

    def _ask_timed(self, number: int, wanted: Seq[tuple[Sequence, int]]) -> None:
        """Let a source draft that takes time, and learn how much."""
        chooser = self._choosers[number]
        started = perf_counter()
        self._ask(number, wanted, chooser.min_acceptance_prob)
        seconds = perf_counter() - started
        longest = 1
        for sequence, _ in wanted:
            given = self._given[sequence]
            length = len(given.drafts[number][1])
            given.num_given = min(given.num_given, length)  # its model may have no room for more
            longest = max(longest, length - given.num_given)
        if self._learns_costs and self._asked is not None:
            _, count, _, lag = self._asked
            chooser.learn_cost(count, longest, lag, seconds)

    def _wanted(self, drafting: Seq[tuple[Sequence, int]], prices: Seq[float] | None) -> dict[int, list[int]]:
        """Return the sources that are to draft although it takes time, with each sequence's number of nodes."""
        if not drafting or not self._choosers:
            return {}
        if prices is not None:
            self._plain = prices[0]
            if all(chooser.is_asleep for chooser in self._choosers.values()):
                return {}
        sequences = [sequence for sequence, _ in drafting]
        found = [self._best_found(sequence)[1] for sequence in sequences]
        if prices is None:
            return self._worth_more(drafting, found)
        if len(self._choosers) == len(self._parts):  # nothing copies
            found = []
        num_chained = self._num_chained(drafting)
        best: tuple[float, int, list[int]] | None = None
        for number, chooser in self._choosers.items():
            steps = self._refused.get(number, 0)
            if steps and self._refusing == sequences:
                self._refused[number] = steps - 1
                continue
            counts = chooser.choose(sequences, prices, found, num_chained)
            if not any(counts):
                self._refused[number] = PLAN_STEPS - 1
            rate = 0.0 if chooser.is_trying else chooser.rate
            counts = [min(k, most) for k, (_, most) in zip(counts, drafting, strict=True)]
            if any(counts) and (best is None or rate > best[0]):
                best = rate, number, counts
        self._refusing = sequences
        if best is None:
            return {}
        _, number, counts = best
        self._count_asked(number, sequences, counts)
        self._begin(number, sequences[0])
        return {number: counts}

    def _num_chained(self, drafting: Seq[tuple[Sequence, int]]) -> int:
        """Return how many of the first nodes of the only sequence's copy are a chain below which a draft may go on; 0
        for several sequences, and where drafts are merged."""
        sequence, most = drafting[0]
        number = self._best_found(sequence)[0]
        if len(drafting) > 1 or number is None or self._mode == "merge":
            return 0
        parents = self._given[sequence].drafts[number][1].parents[: most - 1]
        return next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))

    def _begin(self, number: int, sequence: Sequence) -> None:
        """Let the draft of a source begin with the part of the best copy that its chooser has found sure."""
        num_given = self._choosers[number].num_given
        copy = self._best_found(sequence)[0]
        if num_given and copy is not None:
            given = self._given[sequence]
            given.num_given = num_given
            given.copied = self._parts[copy][0]
            self._parts[number][1].begin_with({sequence: given.drafts[copy][1].first(num_given)})

    def _worth_more(self, drafting: Seq[tuple[Sequence, int]], found: Seq[Seq[float]]) -> dict[int, list[int]]:
        """Return what `_wanted` returns where drafts cost nothing."""
        wanted: dict[int, list[int]] = {}
        for index, ((sequence, most), probs) in enumerate(zip(drafting, found, strict=True)):
            worth = {
                number: sum(chooser.gains(sequence, min(most, chooser.places)))
                for number, chooser in self._choosers.items()
                if most >= (chooser.fixed_length or 1)
            }
            best = max(worth, key=worth.__getitem__, default=None)
            for number in worth:
                if self._mode == "merge" or (number == best and worth[number] > sum(probs)):
                    counts = wanted.setdefault(number, [0] * len(drafting))
                    counts[index] = self._choosers[number].fixed_length or most
        for number, counts in wanted.items():
            self._count_asked(number, [sequence for sequence, _ in drafting], counts)
        return wanted

    def _count_asked(self, number: int, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        lags = [self._choosers[number].lag(sequence) for sequence, k in zip(sequences, counts, strict=True) if k]
        self._asked = number, len(lags), max(counts) - self._choosers[number].num_given, sum(lags)

    def _best_found(self, sequence: Sequence) -> tuple[int | None, Seq[float]]:
        """Return the source whose copies of this step are worth most, and their probabilities."""
        drafts = self._given[sequence].drafts
        probs = {number: draft.accept_probs for number, (_, draft) in drafts.items() if number not in self._choosers}
        best = max(probs, key=lambda number: sum(probs[number]), default=None)
        return best, () if best is None else probs[best]

    def _weigh(self, given: MemberStep, prices: Seq[float]) -> None:
        """Settle the draft of a sequence for which a source took its time: that is no search, and all of it is kept
        unless the source gave nothing, so that the draft is a copy."""
        if given.merged is not None:
            return
        draft = given.draft
        if given.owner is not None and given.owner not in self._choosers:
            draft = draft.first(best_cut([draft.accept_probs], prices)[0][0])
        given.draft = replace(draft, is_settled=True)

    def _settle(self, sequence: Sequence, most: int) -> None:
        """Make the sequence's draft of its sources'."""
        given = self._given[sequence]
        parts = {number: draft for number, (_, draft) in given.drafts.items() if len(draft)}
        for number, draft in parts.items():
            if number in self._choosers:
                copied = self._best_found(sequence)[1][: given.num_given]
                above = copied[-1] if copied else 1.0
                gains = self._choosers[number].gains(sequence, len(draft) - len(copied))
                draft.accept_probs = [*copied, *(above * gain for gain in gains)]
        if not parts:
            return
        if len(parts) > 1 and self._mode == "merge":
            given.drafts = {number: given.drafts[number] for number in parts}
            named = [(self._parts[number][0], draft) for number, draft in parts.items()]
            given.merged = merge(named, [draft.accept_probs for draft in parts.values()], most)
            given.draft = given.merged.draft
            return
        paid = next((number for number in parts if number in self._choosers), None)
        # copies are not weighed against a draft that was drawn: it would count for how it came out
        given.owner = self._best_found(sequence)[0] if paid is None else paid
        assert given.owner is not None
        draft = parts[given.owner]
        if given.num_given:
            names = [given.copied] * given.num_given + [self._parts[given.owner][0]] * (len(draft) - given.num_given)
            draft = replace(draft, sources=tuple(names))
        given.draft = with_source(self._parts[given.owner][0], draft)

    def _learn(self, steps: Seq[Step], given: Seq[MemberStep | None]) -> None:
        """Report to the choosers how far the committed tokens bear out each source's draft, verified or not."""
        for number, chooser in self._choosers.items():
            if chooser.is_asleep:
                chooser.rest(self._plain)
                continue
            outcomes = []
            for step, each in zip(steps, given, strict=True):
                if each is None or step.verdict is None:
                    continue
                count, draft = each.drafts.get(number, (0, Draft.empty()))
                new_ids = step.sequence.token_ids[len(step.sequence.token_ids) - len(step.verdict.path) - 1 :]
                path, judged = agreement(draft, new_ids)
                if number == each.owner:
                    path = step.verdict.path
                    judged = draft.num_candidates
                count = count if judged == draft.num_candidates else judged
                outcome = DraftOutcome(step.sequence, count, draft.first(judged), Verdict(path, new_ids[-1]))
                if number == each.owner and each.num_given:
                    chooser.follow(step.sequence)
                    outcome = without_given(outcome, each.num_given)
                outcomes.append(outcome)
            chooser.observe(outcomes, self._plain, None)


def _split(sources: str) -> list[str]:
    """Split the texts of a hybrid's sources."""
    texts = source_texts(sources)
    if len(set(texts)) < len(texts) or "hybrid" in texts or "" in texts:
        raise DrafterError(
            f"sources is {sources!r}, but must be different names with + between, and none of them 'hybrid', "
            f"such as {HYBRID_SOURCES}. One that holds plus signs or commas stands in double quotes: "
            'suffix+"/c++/model".'
        )
    return texts


def _name_of(drafter: Drafter) -> str:
    """Return the name of a drafter's class in the table's style: DraftModel -> draft-model."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(drafter).__name__.removesuffix("Drafter")).lower()
