"""Greedy and drawn requests have costs of their own, in memory and in what is stored."""

from __future__ import annotations

import json

import pytest

from forerun.speculation import CostModel

SECONDS = {("greedy", 1): 1.0, ("drawn", 1): 3.0, ("greedy", 4): 2.0, ("drawn", 4): 7.0}


def learned() -> CostModel:
    costs = CostModel()
    for (kind, batch), seconds in SECONDS.items():
        for _ in range(3):  # too few to move the pace
            costs.add_target(kind, batch, 50 * batch, batch, seconds)
    return costs


def restored(costs: CostModel) -> CostModel:
    return CostModel.restored(json.loads(json.dumps(costs.state())))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("kind", "batch"), SECONDS)
def test_each_kind_and_batch_has_its_own(kind: str, batch: int, again: bool) -> None:
    costs = restored(learned()) if again else learned()
    table = costs.target(kind, batch, 50 * batch)
    assert table is not None and table[batch] == pytest.approx(SECONDS[kind, batch], rel=0.05)


@pytest.mark.parametrize("again", [False, True])
def test_a_batch_never_seen_borrows_from_its_own_kind(again: bool) -> None:
    """Rather from a batch of another size than from the other kind."""
    costs = CostModel()
    for _ in range(3):
        costs.add_target("greedy", 1, 10, 1, 1.0)
        costs.add_target("drawn", 8, 10, 8, 50.0)
    costs = restored(costs) if again else costs
    greedy, drawn = costs.target("greedy", 8, 10), costs.target("drawn", 1, 10)
    assert greedy is not None and drawn is not None
    assert greedy[1] == pytest.approx(1.0, rel=0.05) and drawn[8] == pytest.approx(50.0, rel=0.05)
