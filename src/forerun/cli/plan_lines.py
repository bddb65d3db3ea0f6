"""A plan as `forerun plan` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forerun.cli.output import size_text

if TYPE_CHECKING:
    from forerun.plan.predictor import ChainAcceptance, Predicted
    from forerun.plan.sheet import Plan

_HEADER = ("K", "tokens a step", "ms a step", "speed-up", "break-even acceptance")
_SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
SOURCES = {
    "measured": "steps of these models, measured in the engine on this machine",
    "calibrated": "a roofline, with costs of layers, rows and steps that were measured on this machine",
    "bound": "a bound: the roofline alone. Nothing was measured, and real steps take longer",
}


def lines(made: Plan, chances: ChainAcceptance) -> Iterator[str]:
    """The plan for people."""
    from forerun.bench.report import plain_table

    memory, prediction = made.memory, made.prediction
    drafter = "drafts that are looked up" if made.draft is None else made.draft.name
    yield f"{made.target.name} ({_count(made.target.parameters)}) with {drafter} on {made.machine}"
    yield f"times:      {SOURCES[made.source]}"
    yield f"memory:     {'; '.join(_memory(made))}"
    if memory.available is not None and memory.total > memory.available:
        yield f"            does not fit: {size_text(memory.total)} wanted, {size_text(memory.available)} there"
    least = "at least " if made.source == "bound" else ""
    speed = f"{made.plain_speed:.1f} tokens/s{_money(made, made.plain_speed)}"
    yield f"plain:      {least}{1000 * made.costs.plain:.2f} ms a token{_of_all(made)}, {speed}"
    yield f"acceptance: {', '.join(f'{each:g}' for each in chances.per_position)}, each after the tokens before it"
    shown = [each for each in prediction.by_k if each.num_draft_tokens in _SHOWN or each is prediction.best]
    yield ""
    yield plain_table(_HEADER, list(map(_row, shown)))
    yield ""
    yield _verdict(made)


def _row(each: Predicted) -> list[str]:
    """What is told of one K, under _HEADER."""
    edge = "never" if each.break_even is None else f"{each.break_even:.2f}"
    cells = [f"{each.tokens:.2f}", f"{1000 * each.seconds:.2f}", f"{each.speedup:.2f}", edge]
    return [str(each.num_draft_tokens), *cells]


def _verdict(made: Plan) -> str:
    best, edge = made.prediction.best, made.prediction.break_even
    if best is None:
        from_there = "never" if edge is None else f"from an acceptance of {edge:.2f} on"
        return f"No K is faster than plain decoding here: speculation pays {from_there}."
    speed = made.best_speed
    return (
        f"Best: K={best.num_draft_tokens}, {best.speedup:.2f} times plain decoding, {speed:.1f} tokens/s"
        f"{_money(made, speed)}. It pays from an acceptance of {edge:.2f} on."
    )


def _memory(made: Plan) -> Iterator[str]:
    memory = made.memory
    cache = "keys and values not told" if memory.target_cache is None else f"cache {size_text(memory.target_cache)}"
    yield f"target {size_text(memory.target_weights)}, {cache}"
    if memory.draft_weights is not None:
        beside = "" if memory.draft_cache is None else f", cache {size_text(memory.draft_cache)}"
        yield f"draft {size_text(memory.draft_weights)}{beside} ({100 * memory.draft_share:.1f} % more)"
    if memory.available is not None:
        yield f"there are {size_text(memory.available)}"


def _of_all(made: Plan) -> str:
    return "" if made.batch == 1 else f" of each of {made.batch} sequences"


def _money(made: Plan, speed: float) -> str:
    price = made.per_million(speed)
    return "" if price is None else f", {price:.2f} for a million tokens"


def _count(parameters: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit} parameters"
    return f"{parameters:,} parameters"
