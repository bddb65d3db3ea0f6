"""What tuning has found: a row for each arm, the verdict, and all of it as a file of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.prompts import Request
from forerun.bench.report import Table, decimal, percent
from forerun.config import NO_DRAFTER
from forerun.files.write import digest
from forerun.results import DrafterFacts, Environment, Figure, PromptFacts, Results, RunRow, TableFacts, TargetFacts
from forerun.results.write import without_folders
from forerun.tune.arms import PLAIN, Arm, Trial
from forerun.tune.ledger import Ledger
from forerun.tune.verdict import Verdict


@dataclass(slots=True)
class Outcome:
    """All that is known, complete or not.

    Attributes:
        search: trials on the prompts by which arms were chosen. report: on the others.
        finalists: what was measured on the others.
        refused: drafter -> why it was not tried.
        start: what budgets begin with afterwards.
        interrupted: Ctrl-C ended it.
    """

    requests: Sequence[Request]
    workload: str
    temperature: float
    search: Ledger = field(default_factory=Ledger)
    report: Ledger = field(default_factory=Ledger)
    finalists: list[Arm] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    start: list[Mapping[str, Any]] = field(default_factory=list)
    verdict: Verdict = field(default_factory=lambda: Verdict("off", PLAIN, "Nothing was measured."))
    interrupted: bool = False

    @property
    def failed(self) -> dict[Arm, str]:
        """Arms that failed while they were tried."""
        return {**self.search.failed, **self.report.failed}

    @property
    def arms(self) -> list[Arm]:
        """All that were tried, the finalists first, then by speed."""
        tried = dict.fromkeys(arm for heat in self.search.heats for arm in heat.trials)
        ranked = self.search.ranked(tried)
        rest = [arm for arm in [*ranked, *self.failed] if arm not in self.finalists]
        return [*self.finalists, *dict.fromkeys(rest)]

    @property
    def left_out(self) -> dict[str, str]:
        """Drafters and arms that were not tried, or failed, with the reason."""
        return {**self.refused, **{str(arm): reason for arm, reason in self.failed.items()}}

    def levels(self) -> list[int]:
        """Levels of load that were measured."""
        return sorted({heat.unit.level for heat in self.report.heats})

    def tables(self) -> list[Table]:
        """For people."""
        levels = self.levels()
        by_level = [f"at {level} requests" for level in levels] if len(levels) > 1 else []
        header = ["arm", "prompts", "choosing", "over plain", *by_level, "tokens a step", "accepted"]
        rows = [self._cells(arm, levels if by_level else []) for arm in self.arms]
        return [Table("Arms, their speed over plain decoding", [*header, "same text"], rows)]

    def _cells(self, arm: Arm, levels: Sequence[int]) -> list[str]:
        trials = [*self.search.trials(arm), *self.report.trials(arm)]
        drafted = sum(trial.num_drafted for trial in trials)
        accepted = sum(trial.num_accepted for trial in trials)
        same = [trial.same_text for trial in trials if trial.same_text is not None]
        name = f"{arm} *" if arm == self.verdict.arm else str(arm)
        if arm in self.failed:
            name = f"{arm} (failed)"
        return [
            name,
            str(len(trials)),
            decimal(self.search.speedup(arm)),
            decimal(self.report.speedup(arm)),
            *(decimal(self.report.speedup(arm, level=level)) for level in levels),
            decimal(_length(trials)),
            percent(accepted / drafted if drafted else None),
            percent(sum(same) / len(same) if same else None),
        ]

    def results(
        self, command: str, target: TargetFacts, environment: Environment, settings: Mapping[str, Any]
    ) -> Results:
        """In the schema of results."""
        every = self.arms
        return Results(
            kind="tune",
            command=command,
            environment=environment,
            target=target,
            settings=settings,
            drafters=_drafters(every),
            prompts=[_prompt(request, without_folders(self.workload)) for request in self.requests],
            rows=[*self._rows(self.search, 0), *self._rows(self.report, len(self.search.heats))],
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
        """The tables with verdict and what was left out, without folders."""
        tables = [Table("Verdict", ["chosen", "why"], [[str(self.verdict.arm), self.verdict.reason]]), *self.tables()]
        if self.left_out:
            tables.append(Table("Left out", ["drafter", "why"], [list(pair) for pair in self.left_out.items()]))
        return [
            TableFacts(each.title, each.header, [list(map(without_folders, row)) for row in each.rows])
            for each in tables
        ]

    def _rows(self, ledger: Ledger, first: int) -> list[RunRow]:
        """The trials of one request at a time; of several at once the seconds are no prompt's own."""
        return [
            _row(heat.unit.prompts[0], arm, trial, first + number, self.temperature)
            for number, heat in enumerate(ledger.heats)
            if heat.unit.level == 1
            for arm, trial in [*((PLAIN, plain) for plain in heat.plain[:1]), *heat.trials.items()]
        ]

    def _figures(self, arm: Arm) -> list[Figure]:
        labels = {"method": without_folders(str(arm)), "drafter": without_folders(arm.drafter)}
        found = []
        for part, ledger in (("choosing", self.search), ("report", self.report)):
            speed = ledger.speedup(arm)
            if speed is not None:
                where = {**labels, "part": part}
                found.append(Figure("over_plain", where, speed.median, speed.low, speed.high, len(ledger.trials(arm))))
        return found


def _row(prompt: int, arm: Arm, trial: Trial, number: int, temperature: float) -> RunRow:
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


def _drafters(arms: Sequence[Arm]) -> list[DrafterFacts]:
    counts: dict[str, list[int | str]] = {}
    for arm in arms:
        counts.setdefault(arm.drafter, []).append(arm.num_draft_tokens)
    return [DrafterFacts(without_folders(text), without_folders(text), each) for text, each in counts.items()]


def _prompt(request: Request, workload: str) -> PromptFacts:
    tokens = repr(request.token_ids).encode()
    return PromptFacts(request.name, workload, request.category, len(request.token_ids), digest(tokens)[:16])


def _length(trials: Sequence[Trial]) -> float | None:
    forwards = sum(trial.num_forwards for trial in trials)
    return sum(trial.num_tokens for trial in trials) / forwards if forwards else None
