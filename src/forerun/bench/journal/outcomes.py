"""What became of a journal's traffic, as it was measured and by replays, side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.bench.journal.queue import Replayed, Served
from forerun.bench.journal.scenarios import ALL, AS_IT_WAS, PLAIN, OtherDrafter, Scenarios
from forerun.traffic.records import Answer

MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way to serve the traffic.

    Attributes:
        name: what was different.
        first: seconds to the first token, by category.
        per_token: seconds of an answer after its first token over its further tokens, by category.
        decoding: seconds of all answers after their first tokens, by category.
        busy: seconds of all steps.
        tokens: of all answers.
    """

    name: str
    first: Mapping[str, Sequence[float]]
    per_token: Mapping[str, Sequence[float]]
    decoding: Mapping[str, float]
    busy: float
    tokens: int

    @classmethod
    def of(cls, name: str, served: Sequence[Served | Answer], busy: float) -> Outcome:
        """What answers were, or what replays made of them."""
        first: defaultdict[str, list[float]] = defaultdict(list)
        per_token: defaultdict[str, list[float]] = defaultdict(list)
        decoding: defaultdict[str, float] = defaultdict(float)
        tokens = 0
        for each in served:
            about = each if isinstance(each, Answer) else each.request
            tokens += about.tokens
            for category in {ALL, about.category}:
                first[category].append(each.first)
                decoding[category] += each.seconds - each.first
                if each.per_token is not None:
                    per_token[category].append(each.per_token)
        return cls(name, first, per_token, decoding, busy, tokens)

    @classmethod
    def of_replays(cls, name: str, replays: Sequence[Replayed]) -> Outcome:
        """Of all runs together."""
        served = [each for run in replays for each in run.served]
        return cls.of(name, served, sum(run.busy for run in replays))


@dataclass(frozen=True, slots=True)
class Answers:
    """What the replays say.

    Attributes:
        measured: what happened.
        replayed: the same by replay; by which its error is known.
        plain: without speculation.
        other: with another drafter; None where none was asked about.
        plain_seen: share of the plain replay's seconds in batches whose steps without drafts were frequent.
    """

    measured: Outcome
    replayed: Outcome
    plain: Outcome
    other: Outcome | None
    plain_seen: float

    @classmethod
    def of(cls, scenarios: Scenarios, drafter: OtherDrafter | None) -> Answers:
        """Serve the traffic again, in each way."""
        kept = [each for run in scenarios.replayed_answers() for each in run]
        plain = scenarios.plain()
        seen = whole = 0.0
        for run in plain:
            for decoding, seconds in run.busy_by_batch.items():
                whole += seconds if decoding else 0.0
                seen += seconds if decoding and scenarios.prices.has_plain(decoding) else 0.0
        share = len(kept) / max(len(scenarios.traffic.answers), 1)
        return cls(
            Outcome.of(MEASURED, kept, share * sum(run.busy for run in scenarios.traffic.runs)),
            Outcome.of_replays(AS_IT_WAS, scenarios.as_it_was()),
            Outcome.of_replays(PLAIN, plain),
            None if drafter is None else Outcome.of_replays(drafter.name, scenarios.other(drafter)),
            seen / whole if whole else 0.0,
        )

    def error(self, category: str = ALL) -> float:
        """By how much the replay of what happened misses it: the larger of a category's and of all answers' share."""
        shares = [
            abs(self.replayed.decoding[each] / self.measured.decoding[each] - 1)
            for each in {ALL, category}
            if self.measured.decoding.get(each)
        ]
        return max(shares, default=0.0)

    def over_plain(self, outcome: Outcome, category: str = ALL) -> float | None:
        """Time of answers without speculation over that with these drafts, after the first token; both by replay."""
        seconds = outcome.decoding.get(category)
        return self.plain.decoding[category] / seconds if seconds else None
