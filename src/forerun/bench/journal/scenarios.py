"""What a journal's traffic is replayed with: the drafts it had, none, or another drafter's as a tuning saw them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.bench.journal.prices import Prices, Work
from forerun.bench.journal.queue import Replayed, Request, replay
from forerun.config import NO_DRAFTER
from forerun.errors import ConfigError
from forerun.results import Results, RunRow
from forerun.results.write import without_folders
from forerun.traffic.reader import Traffic
from forerun.traffic.records import Answer, Steps

AS_IT_WAS, PLAIN = "as it was", "without speculation"
_TUNE_PLAIN = "plain"
_CHUNK_SHARE = 0.9
"""Of the steps with rows of prompts, by their number: the quantile that stands for the engine's chunk."""
MOST_ANSWERS = 20_000
"""That are replayed, the last ones of each run."""
ALL = ""
"""The category of all answers together."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a drafter does for one category.

    Attributes:
        per_step: tokens that a step gives, after the first token.
        cost: time of a step over that of plain decoding's, for one sequence.
        prompts: that it was measured on.
    """

    per_step: float
    cost: float
    prompts: int


@dataclass(frozen=True, slots=True)
class OtherDrafter:
    """A drafter as a tuning has measured it.

    Attributes:
        name: the arm.
        paces: by category; "" of all of them together.
    """

    name: str
    paces: Mapping[str, Pace]

    @classmethod
    def of(cls, results: Results, arm: str | None) -> OtherDrafter:
        """From the results of `forerun tune --results FILE`.

        arm: as its table names it; None: what it has chosen.

        Raises:
            ConfigError: these are other results, or they have no such arm.
        """
        if results.kind != "tune":
            raise ConfigError(
                f"{results.source}: it holds results of {results.kind!r}, not of a tuning. Give a file that "
                "`forerun tune --results FILE` wrote."
            )
        arms = list(dict.fromkeys(row.method for row in results.rows if row.method != _TUNE_PLAIN))
        wanted = without_folders(arm or str(results.details.get("chosen", "")))
        if wanted not in arms:
            told = "plain decoding won there" if arm is None else f"it has no arm {wanted!r}"
            raise ConfigError(f"{results.source}: {told}. Name one with --arm: {', '.join(map(repr, arms)) or 'none'}.")
        rows = {name: _by_category(results, name) for name in (wanted, _TUNE_PLAIN)}
        paces = {}
        for category, mine in rows[wanted].items():
            step, plain = _step_seconds(mine), _step_seconds(rows[_TUNE_PLAIN].get(category, []))
            if step is not None and plain:
                paces[category] = Pace(_per_step(mine), step / plain, len({row.prompt for row in mine}))
        if ALL not in paces:
            raise ConfigError(f"{results.source}: the arm {wanted!r} has no answers of several tokens. Name another.")
        return cls(wanted, paces)

    def pace(self, category: str) -> Pace:
        """Of a category; where it was not measured, of all together."""
        return self.paces.get(category, self.paces[ALL])


@dataclass(frozen=True, slots=True)
class Scenarios:
    """A journal's traffic, ready to be served again.

    Attributes:
        prices: of its steps.
    """

    traffic: Traffic
    prices: Prices

    @classmethod
    def of(cls, traffic: Traffic) -> Scenarios:
        return cls(traffic, Prices.of(traffic.steps, traffic.begun.drafter != NO_DRAFTER))

    def as_it_was(self) -> list[Replayed]:
        """With the drafts that each answer had, a replay for each run."""

        def request(answer: Answer) -> Request:
            steps = max(answer.forwards - 1, 1)  # the first token comes with the prompt
            share = min(answer.reached[0] / steps, 1.0) if answer.reached else 0.0
            made = _request(answer, max((answer.tokens - 1) / steps, 1e-9), answer.drafted / steps)
            return replace(made, share=share)

        return self._replayed(request, self.prices)

    def plain(self) -> list[Replayed]:
        """A token a step."""
        return self._replayed(lambda answer: _request(answer, 1.0, 0.0), self.prices.plain)

    def other(self, drafter: OtherDrafter) -> list[Replayed]:
        """With another drafter: what its steps take beyond plain ones is added for each sequence."""

        def request(answer: Answer) -> Request:
            pace = drafter.pace(answer.category)
            return _request(answer, pace.per_step, pace.cost - 1.0)

        def price(work: Work) -> float:
            positions = work.positions / max(work.decoding, 1)
            one = self.prices.plain(Work(1, positions=positions)) if work.decoding else 0.0
            return max(self.prices.plain(work) + work.draft_rows * one, 0.0)

        return self._replayed(request, price)

    def _replayed(self, request: Callable[[Answer], Request], price: Callable[[Work], float]) -> list[Replayed]:
        chunk = _chunks(self.traffic.steps)
        batch = self.traffic.begun.max_batch
        return [replay([request(each) for each in run], price, batch, chunk) for run in self.replayed_answers()]

    def replayed_answers(self) -> list[list[Answer]]:
        """Of each run, those that are replayed: the last ones, of which something was computed."""
        return [[each for each in run.answers[-MOST_ANSWERS:] if each.tokens] for run in self.traffic.runs]


def _request(answer: Answer, per_step: float, drafted: float) -> Request:
    owed = max(answer.prompt - answer.cached, 1)
    return Request(answer.at, owed, answer.prompt, answer.tokens, per_step, drafted, answer.category)


def _chunks(steps: Sequence[Steps]) -> Callable[[int], float]:
    """Rows of a prompt in a step, by how many others are decoding: alone, or beside some."""
    alone = _chunk([each for each in steps if not each.decoding])
    beside = _chunk([each for each in steps if each.decoding])
    return lambda decoding: (beside or alone or 1.0) if decoding else (alone or beside or 1.0)


def _chunk(steps: Sequence[Steps]) -> float:
    kinds = sorted((each.prompt_rows / each.count, each.count) for each in steps if each.prompt_rows)
    wanted = _CHUNK_SHARE * sum(count for _, count in kinds)
    seen = 0
    for rows, count in kinds:
        seen += count
        if seen >= wanted:
            return rows
    return 0.0


def _by_category(results: Results, method: str) -> dict[str, list[RunRow]]:
    found: defaultdict[str, list[RunRow]] = defaultdict(list)
    for row in results.rows:
        if row.method == method and row.first_token is not None and row.num_forwards > 1:
            for category in {ALL, results.prompts[row.prompt].category}:
                found[category].append(row)
    return dict(found)


def _per_step(rows: Sequence[RunRow]) -> float:
    return sum(row.num_tokens - 1 for row in rows) / sum(row.num_forwards - 1 for row in rows)


def _step_seconds(rows: Sequence[RunRow]) -> float | None:
    if not rows:
        return None
    return sum(row.seconds - (row.first_token or 0.0) for row in rows) / sum(row.num_forwards - 1 for row in rows)
