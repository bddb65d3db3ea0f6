"""A plan as results, for `forerun bench report`."""

from __future__ import annotations

from forerun.plan.predictor import ChainAcceptance, Predicted
from forerun.plan.sheet import Plan
from forerun.results import Environment, Figure, Results, TableFacts, TargetFacts
from forerun.results.schema import Labels
from forerun.results.write import without_folders

HEADER = ("K", "tokens a step", "ms a step", "speed-up", "break-even acceptance")


def plan_results(plan: Plan, chances: ChainAcceptance, times: str, command: str, environment: Environment) -> Results:
    """The plan in the schema of results.

    times: where its seconds come from, in words.
    """
    drafter = "looked-up drafts" if plan.draft is None else without_folders(plan.draft.name)
    figures, rows = [], []
    for each in plan.prediction.by_k:
        labels: Labels = {"method": drafter, "num_draft_tokens": each.num_draft_tokens}
        figures.append(Figure("over_plain_predicted", labels, each.speedup))
        figures.append(Figure("acceptance_length", labels, each.tokens))
        figures.append(Figure("step", labels, each.seconds))
        if each.break_even is not None:
            figures.append(Figure("break_even", labels, each.break_even))
        rows.append(row(each))
    name = without_folders(plan.target.name)
    return Results(
        kind="plan",
        command=command,
        environment=environment,
        target=TargetFacts(name, num_parameters=plan.target.parameters),
        settings={"machine": plan.machine, "batch": plan.batch, "acceptance": list(chances.per_position)},
        figures=figures,
        tables=[TableFacts(f"{name} with {drafter} on {plan.machine}", HEADER, rows)],
        details={"times": times[0].upper() + times[1:] + ".", "source": plan.source},
    )


def row(each: Predicted) -> list[str]:
    """What is told of one K, under HEADER."""
    edge = "never" if each.break_even is None else f"{each.break_even:.2f}"
    cells = [f"{each.tokens:.2f}", f"{1000 * each.seconds:.2f}", f"{each.speedup:.2f}", edge]
    return [str(each.num_draft_tokens), *cells]
