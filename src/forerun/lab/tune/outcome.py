"""The outcome of tuning: confirmation of the finalists, the verdict, a row for each arm, and the file of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forerun.config import NO_DRAFTER
from forerun.kernels.provenance import Environment
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.bench.recorded import prompt_facts
from forerun.lab.bench.tables import Table, decimal, percent
from forerun.lab.results.files import without_folders
from forerun.lab.results.schema import DrafterFacts, Figure, Results, RunRow, TableFacts, TargetFacts
from forerun.lab.tune.arms import PLAIN, Trial, Trials, TuningArm, Unit
from forerun.lab.tune.ledger import Ledger, exceeds, run_round, stays_below
from forerun.lab.tune.search import can_win

FIXED_MARGIN = 1.02
"""A fixed K is chosen only if its lower bound over the choice of K step by step exceeds this: it cannot adapt to other
prompts than those that were tried."""
_MARGIN = f"{100 * (FIXED_MARGIN - 1):.0f} %"
WORTH = 1.02
"""An arm whose upper bound over plain decoding is below this gains nothing that would be noticed."""
ROUNDS, MOST_ROUNDS = 3, 9
"""Times that each unit is measured at most; and where nothing could be shown till then."""

Answer = Literal["on", "off", "tie"]
"""Speculation is faster; it is not; or a difference could not be shown."""


@dataclass(frozen=True, slots=True)
class TuningVerdict:
    """The choice.

    Attributes:
        answer: whether to speculate.
        arm: what to run: of a "tie" the default, unless it is slower than plain decoding.
        reason: in words.
    """

    answer: Answer
    arm: TuningArm
    reason: str


def confirm(
    trials: Trials,
    ledger: Ledger,
    arms: Sequence[TuningArm],
    units: Sequence[Unit],
    until: float,
    default: TuningArm = PLAIN,
    say: Callable[[str], None] = lambda _: None,
    after: Callable[[TuningArm], None] = lambda _: None,
) -> None:
    """Measure the finalists on the units in turn, until the time is up or none of them can win any more.

    ledger: a fresh one, which takes the trials. default: of `judge`.
    """
    for number in range(MOST_ROUNDS):
        say(f"measuring; drafters: {len(arms)}, other prompts: {len(units)}, round: {number + 1}")
        for unit in units:
            first = not ledger.rounds
            if not run_round(trials, ledger, unit, arms, float("inf") if first else until, after):
                return
        if not can_win(ledger, arms) or (number + 1 >= ROUNDS and judge(ledger, arms, default).answer != "tie"):
            return


def judge(ledger: Ledger, finalists: Sequence[TuningArm], default: TuningArm) -> TuningVerdict:
    """Return the verdict of what was measured: the default, unless another arm is shown to be better.

    Args:
        finalists: in the order of the search.
        default: what runs where nobody chooses; PLAIN where it cannot be tried.
    """
    speeds = {arm: found for arm in finalists if arm not in ledger.failed and (found := ledger.speedup(arm))}
    if not speeds:
        return TuningVerdict("off", PLAIN, "No drafter was measured, so plain decoding is kept.")
    default = default if default in speeds else PLAIN
    over = {arm: found for arm in speeds if arm != default and (found := ledger.speedup(arm, over=default))}
    better = [arm for arm in speeds if exceeds(speeds[arm], 1) and (arm == default or exceeds(over[arm], 1))]
    autos = [*(arm for arm in better if arm.is_auto), default, *(arm for arm in speeds if arm.is_auto)]
    auto = next((arm for arm in autos if arm != PLAIN), None)
    fixed = next((arm for arm in speeds if not arm.is_auto), None)
    between = None if auto is None or fixed is None else ledger.speedup(fixed, over=auto)
    if fixed in better and (between is None or exceeds(between, FIXED_MARGIN)):
        beside = "" if between is None else f" It is faster than {auto} by more than {_MARGIN} ({between:.2f})."
        return TuningVerdict("on", fixed, f"{fixed} is faster than plain decoding: {speeds[fixed]:.2f}.{beside}")
    if auto in better:
        beside = "" if auto == default or default == PLAIN else f" Over the default {default}: {over[auto]:.2f}."
        beside += "" if between is None else f" {fixed} is not faster than that by more than {_MARGIN} ({between:.2f})."
        return TuningVerdict("on", auto, f"{auto} is faster than plain decoding: {speeds[auto]:.2f}.{beside}")
    shown = ", ".join(f"{arm} {found:.2f}" for arm, found in speeds.items()) + " of plain"
    if all(stays_below(found, WORTH) for found in speeds.values()):
        return TuningVerdict("off", PLAIN, f"Do not speculate here: nothing that was tried is faster ({shown}).")
    if default == PLAIN:
        kept = PLAIN
        why = "plain decoding is kept"
    elif stays_below(speeds[default], 1):
        kept = PLAIN
        why = f"plain decoding is kept, which is faster than the default {default}"
    else:
        kept = default
        why = f"the default {default} is kept, which drafts only where it pays"
        shown += "".join(f"; {arm} {found:.2f} of the default" for arm, found in over.items())
    return TuningVerdict(
        "tie", kept, f"No difference could be shown ({shown}): {why}. More prompts would narrow the intervals."
    )


@dataclass(slots=True)
class TuningOutcome:
    """All that is known, complete or not.

    Attributes:
        search: trials on the prompts by which arms were chosen.
        report: trials of the finalists on the other prompts.
        finalists: the arms that were measured there.
        default: what runs where nobody chooses; PLAIN where that cannot be tried.
        refused: drafter -> why it was not tried.
        interrupted: Ctrl-C ended it.
        only_decoding: the time to the first token is not part of the speeds.
    """

    requests: Sequence[BenchPrompt]
    workload: str
    temperature: float
    search: Ledger = field(default_factory=Ledger)
    report: Ledger = field(default_factory=Ledger)
    finalists: list[TuningArm] = field(default_factory=list)
    default: TuningArm = PLAIN
    refused: dict[str, str] = field(default_factory=dict)
    verdict: TuningVerdict = field(default_factory=lambda: TuningVerdict("off", PLAIN, "Nothing was measured."))
    interrupted: bool = False
    only_decoding: bool = False

    @property
    def is_measured(self) -> bool:
        """Return whether any arm was tried."""
        return bool(self.search.rounds or self.report.rounds)

    @property
    def failed(self) -> dict[TuningArm, str]:
        """Return the arms that failed while they were tried."""
        return {**self.search.failed, **self.report.failed}

    @property
    def arms(self) -> list[TuningArm]:
        """Return all arms that were tried, the finalists first, then by speed."""
        tried = dict.fromkeys(arm for round_ in self.search.rounds for arm in round_.trials)
        ranked = self.search.ranked(tried)
        return list(dict.fromkeys([*self.finalists, *ranked, *self.failed]))

    @property
    def left_out(self) -> dict[str, str]:
        """Return the drafters and arms that were not tried, or failed, with the reason."""
        return {**self.refused, **{str(arm): reason for arm, reason in self.failed.items()}}

    def levels(self) -> list[int]:
        """Return the levels of load that were measured."""
        return sorted({len(round_.unit) for round_ in self.report.rounds})

    def tables(self) -> list[Table]:
        """Make the tables that are printed."""
        levels = self.levels()
        by_level = [f"at {level} requests" for level in levels] if len(levels) > 1 else []
        title = "Decoding speed, the first token apart," if self.only_decoding else "Speed"
        header = ["drafter", "tokens/s", "over plain", *by_level, "first token, ms", "answers", "tokens a step"]
        header += ["accepted", "same text"]
        rows = [self._cells(arm, levels if by_level else []) for arm in (PLAIN, *self.arms)]
        return [Table(f"{title} over plain on the same prompts; tokens/s are plain's times that", header, rows)]

    def _cells(self, arm: TuningArm, levels: Sequence[int]) -> list[str]:
        plain = [*self.search.trials(PLAIN), *self.report.trials(PLAIN)]
        ledger = self.report if self.report.trials(arm) else self.search
        trials = plain if arm == PLAIN else ledger.trials(arm)
        speed = ledger.speedup(arm)
        rate = sum(each.num_tokens for each in plain) / max(1e-9, sum(each.seconds for each in plain))
        forwards = sum(each.num_forwards for each in trials)
        drafted = sum(each.num_drafted for each in trials)
        accepted = sum(trial.num_accepted for trial in trials)
        same = [trial.same_text for trial in trials if trial.same_text is not None]
        name = without_folders(str(arm)) + " *" * (arm == self.verdict.arm)
        if arm in self.failed:
            name = f"{without_folders(str(arm))} (failed)"
        return [
            name,
            f"{rate * (1 if arm == PLAIN or speed is None else speed.median):.1f}",
            decimal(None if arm == PLAIN else speed),
            *(decimal(self.report.speedup(arm, level=level)) for level in levels),
            f"{1000 * ledger.first_token(arm):.0f}",
            str(len(trials)),
            decimal(sum(each.num_tokens for each in trials) / forwards if forwards else None),
            percent(accepted / drafted if drafted else None),
            percent(sum(same) / len(same) if same else None),
        ]

    def results(
        self, command: str, target: TargetFacts, environment: Environment, settings: Mapping[str, Any]
    ) -> Results:
        """Convert to the schema of results."""
        every = self.arms
        return Results(
            kind="tune",
            command=command,
            environment=environment,
            target=target,
            settings=settings,
            drafters=_drafters(every),
            prompts=prompt_facts(self.workload, self.requests),
            rows=[*self._rows(self.search, 0), *self._rows(self.report, len(self.search.rounds))],
            figures=[figure for arm in every for figure in self._figures(arm)],
            tables=self._tables_of_file(),
            details={
                "verdict": self.verdict.answer,
                "chosen": str(self.verdict.arm),
                "reason": self.verdict.reason,
                "refused": self.refused,
                "failed": {str(arm): reason for arm, reason in self.failed.items()},
                "interrupted": self.interrupted,
            },
        )

    def _tables_of_file(self) -> list[TableFacts]:
        """Make the tables with verdict and what was left out, without folders."""
        tables = [
            Table("Verdict", ["chosen", "why"], [[str(self.verdict.arm), self.verdict.reason]]),
            *self.tables(),
        ]
        if self.left_out:
            tables.append(Table("Left out", ["drafter", "why"], [list(pair) for pair in self.left_out.items()]))
        return [
            TableFacts(each.title, each.header, [list(map(without_folders, row)) for row in each.rows])
            for each in tables
        ]

    def _rows(self, ledger: Ledger, first: int) -> list[RunRow]:
        """Return the trials of one request at a time; with several at once the seconds belong to no single prompt."""
        return [
            _row(round_.unit[0], arm, trial, first + number, self.temperature)
            for number, round_ in enumerate(ledger.rounds)
            if len(round_.unit) == 1
            for arm, trial in [*((PLAIN, plain) for plain in round_.plain[:1]), *round_.trials.items()]
        ]

    def _figures(self, arm: TuningArm) -> list[Figure]:
        labels = {"method": without_folders(str(arm)), "drafter": without_folders(arm.drafter)}
        found = []
        for part, ledger in (("choosing", self.search), ("report", self.report)):
            speed = ledger.speedup(arm)
            if speed is not None:
                where = {**labels, "part": part}
                found.append(Figure("over_plain", where, speed.median, speed.low, speed.high, len(ledger.trials(arm))))
        return found


def _row(prompt: int, arm: TuningArm, trial: Trial, number: int, temperature: float) -> RunRow:
    return RunRow(
        prompt=prompt,
        method=without_folders(str(arm)),
        drafter="" if arm.drafter == NO_DRAFTER else without_folders(arm.drafter),
        temperature=temperature,
        round=number,
        num_tokens=trial.num_tokens,
        seconds=trial.seconds,
        num_forwards=trial.num_forwards,
        num_drafted=trial.num_drafted,
        num_accepted=trial.num_accepted,
        reached=trial.reached,
        accepted=trial.accepted,
        first_token=trial.first_seconds,
        same_text=trial.same_text,
    )


def _drafters(arms: Sequence[TuningArm]) -> list[DrafterFacts]:
    counts: dict[str, list[int | str]] = {}
    for arm in arms:
        counts.setdefault(arm.drafter, []).append(arm.num_draft_tokens)
    return [DrafterFacts(without_folders(text), without_folders(text), each) for text, each in counts.items()]
