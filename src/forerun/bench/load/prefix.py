"""The time to the first token where a long prefix was computed before, over the first time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.bench.load.asks import Ask
from forerun.bench.load.serving import Clients
from forerun.bench.measure import Interval, bootstrap, ratio
from forerun.bench.report import Columns
from forerun.config import SamplingParams
from forerun.engine import LLM

TAIL = 16
"""Tokens after the prefix, different in each request."""
ANSWER = 4


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """Times to the first token in milliseconds, medians and intervals over the rounds.

    Attributes:
        prefix: tokens that the requests of a round begin with.
        first: of a round's first request.
        repeated: of its second.
        over_first: the ratio within a round.
    """

    prefix: int
    first: Interval
    repeated: Interval
    over_first: Interval


COLUMNS: Columns[PrefixRow] = {
    "prefix": lambda row: str(row.prefix),
    "first time ms": lambda row: f"{row.first:.1f}",
    "repeated ms": lambda row: f"{row.repeated:.1f}",
    "over the first time": lambda row: f"{row.over_first:.3f}",
}


def measure(
    plain: LLM,
    prefixes: Sequence[Sequence[int]],
    tails: Sequence[Sequence[int]],
    say: Callable[[str], None] = lambda _: None,
) -> list[PrefixRow]:
    """One row. Each round has a prefix and a tenant of its own.

    Args:
        prefixes: one for each round, and one more to warm up.
        tails: two for each prefix.
    """
    say(f"a repeated prefix of {len(prefixes[0])} tokens")
    clients = Clients(plain.engine, SamplingParams(temperature=0, ignore_eos=True))
    times: list[list[float]] = [[], []]
    for number, prefix in enumerate(prefixes):
        for turn in (0, 1):
            stream = clients.send(Ask([*prefix, *tails[2 * number + turn]], ANSWER), f"prefix {number}")
            clients.finish()
            assert stream.first_token is not None
            if number:
                times[turn].append(1e3 * stream.first_token)
    first, repeated = times
    return [PrefixRow(len(prefixes[0]), bootstrap(first), bootstrap(repeated), ratio(repeated, first))]
