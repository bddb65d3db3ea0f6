"""What the demo has measured: rows by method, by category too, as tables and for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.bench.compare import Row, Run, compare
from forerun.bench.measure import Timed, describe, machine
from forerun.bench.report import Columns, Table, decimal, percent
from forerun.cli.demo_prompts import Plan
from forerun.cli.output import plain
from forerun.config import NumDraftTokens

if TYPE_CHECKING:
    from forerun.engine import LLM

PLAIN = "plain"
"""The method that the others are compared with."""

COLUMNS: Columns[Row] = {
    "method": lambda row: row.method,
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "speedup": lambda row: _speedup(row),
    "mean acceptance length": lambda row: decimal(row.mean_acceptance_length),
    "acceptance rate": lambda row: percent(row.acceptance_rate),
    "identical": lambda row: "yes" if row.identical else "no",
}


@dataclass(frozen=True, slots=True)
class Results:
    """The rows of all complete rounds.

    Attributes:
        plan: what was generated.
        rows: one per method; empty if no round is complete.
        categories: category -> the rows of its prompts; empty if not asked for, or if there are none.
    """

    plan: Plan
    rows: Sequence[Row]
    categories: Mapping[str, Sequence[Row]]

    @classmethod
    def of(cls, plan: Plan, runs: Mapping[str, Sequence[Timed[Run]]], by_category: bool) -> Results:
        """From runs in the order of the plan: prompt after prompt, each as often as there are rounds."""
        if not runs[PLAIN]:
            return cls(plan, [], {})
        found: dict[str, dict[str, list[Timed[Run]]]] = {}
        for name, timed in runs.items() if by_category else ():
            for number, run in enumerate(timed):
                category = plan.cases[number // plan.rounds].category
                found.setdefault(category, {}).setdefault(name, []).append(run)
        categories = {category: compare(each, PLAIN) for category, each in found.items()}
        return cls(plan, compare(runs, PLAIN), categories if any(categories) else {})

    def tables(self) -> list[Table]:
        """For people."""
        overall = Table.of("", COLUMNS, self.rows)
        return [overall, self._category_table()] if self.categories else [overall]

    def as_object(self) -> dict[str, Any]:
        """For programs."""
        found: dict[str, Any] = {"results": _as_objects(self.rows), "prompts": len(self.plan.cases)}
        if self.categories:
            found["categories"] = {name: _as_objects(rows) for name, rows in self.categories.items()}
        return found

    def _category_table(self) -> Table:
        """A row per category: plain decoding's speed, and the speedup of each drafter."""
        rows = []
        for category, (base, *others) in self.categories.items():
            same = "yes" if all(row.identical for row in others) else "no"
            rows.append([category, f"{base.tokens_per_second:.1f}", *(_speedup(row) for row in others), same])
        names = [row.method for row in self.rows if row.method != PLAIN]
        return Table("", ["category", f"{PLAIN}, tokens/s", *names, "identical"], rows)


def closing_line(llm: LLM, num_draft_tokens: NumDraftTokens, plan: Plan) -> str:
    """What the tables stand on. llm: one that decodes plainly."""
    from forerun.models import number_format

    promise = (
        "Exact: a self-test found the target's logits bit-identical with and without speculation."
        if llm.exact
        else "Not exact here: rounding may differ between plain and speculative runs, so texts may part at a near-tie."
    )
    length = "tokens an answer at most" if plan.chats else "tokens each"
    how = (
        f"{number_format(llm.target)}, greedy, K={num_draft_tokens}, "
        f"{plan.sampling.max_tokens} {length}; prompts: {len(plan.cases)} of "
        f"{plan.available}, interleaved rounds: {plan.rounds}; medians over both."
    )
    return f"{promise}\n{how}\n{describe(machine())}"


def _speedup(row: Row) -> str:
    return f"{row.speedup.median:.2f}×"


def _as_objects(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**plain(row), "speedup": row.speedup.median} for row in rows]
