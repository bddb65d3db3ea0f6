"""Plain decoding, fixed K and `auto` at several numbers of outstanding requests, by measured costs of a step's parts.

Wall-clock differences of a few per cent are smaller than the noise of a shared machine. These runs are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.echo import EchoModel
from forerun.bench.load.asks import Ask, in_turn
from forerun.bench.load.loop import LEAST_REQUESTS, REQUESTS
from forerun.bench.load.priced import PricedBudget, PricedDrafter, PricedTarget
from forerun.bench.load.replay_costs import DrafterCosts, TargetCosts
from forerun.bench.load.serving import Clients, Window, closed_loop
from forerun.bench.priced_run import VirtualClock
from forerun.bench.report import Columns, percent
from forerun.config import AUTO, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import LLM
from forerun.engine.engine import Engine
from forerun.models import LanguageModel
from forerun.policy import Budget, FixedBudget, automatic_budget

TIMED_TOKENS = 24
"""Of each answer from which a drafter's costs are measured."""


@dataclass(frozen=True, slots=True)
class Priced:
    """What is replayed.

    Attributes:
        plain: an engine of the target alone.
        make: a fresh drafter, bound to the target.
        target: seconds of forwards.
        drafter: seconds of drafting, and of the engine.
    """

    plain: LLM
    make: Callable[[], Drafter]
    target: TargetCosts
    drafter: DrafterCosts


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One drafter at one number of outstanding requests.

    Attributes:
        outstanding: requests that are open at any time.
        drafter: its name.
        plain: tokens per second without a drafter.
        fixed: by K.
        auto: with K chosen automatically, learning from nothing included.
        mean_num_draft_tokens: nodes that auto proposed in a step of a sequence.
        idle: share of these steps in which it did not draft.
    """

    outstanding: int
    drafter: str
    plain: float
    fixed: dict[int, float]
    auto: float
    mean_num_draft_tokens: float
    idle: float

    @property
    def best(self) -> str:
        """The fastest fixed choice; K = 0 is plain decoding."""
        best = max(self.fixed, key=lambda k: self.fixed[k], default=0)
        return f"K={best}" if best and self.fixed[best] > self.plain else "plain"

    @property
    def best_over_plain(self) -> float:
        """Ratio of speeds."""
        return max([self.plain, *self.fixed.values()]) / self.plain

    @property
    def auto_over_plain(self) -> float:
        """Ratio of speeds."""
        return self.auto / self.plain

    @property
    def auto_over_best(self) -> float:
        """Ratio of speeds."""
        return self.auto_over_plain / self.best_over_plain


COLUMNS: Columns[ReplayRow] = {
    "outstanding, drafter": lambda row: f"{row.outstanding}, {row.drafter}",
    "plain tokens/s": lambda row: f"{row.plain:.1f}",
    "best": lambda row: row.best,
    "over plain": lambda row: f"{row.best_over_plain:.3f}",
    "auto over plain": lambda row: f"{row.auto_over_plain:.3f}",
    "auto / best": lambda row: f"{row.auto_over_best:.3f}",
    "nodes": lambda row: f"{row.mean_num_draft_tokens:.2f}",
    "idle": lambda row: percent(row.idle),
}


def measure(
    priced: Priced,
    name: str,
    asks: Sequence[Ask],
    params: SamplingParams,
    outstanding: Sequence[int],
    counts: Sequence[int],
    say: Callable[[str], None] = lambda _: None,
) -> list[ReplayRow]:
    """A row for every number of outstanding requests.

    Args:
        name: of the drafter.
        params: of all requests but for their length.
        counts: the fixed values of K.
    """
    drafter = priced.make()
    texts = [] if drafter.needs.rows or drafter.traits.writes_cache else answers(priced.plain, asks, params)
    rows = []
    for number in outstanding:
        say(f"replaying {name}, {number} outstanding")
        part = in_turn(asks, 0, max(REQUESTS * number, LEAST_REQUESTS))

        def run(budget: Budget, part: Sequence[Ask] = part, number: int = number) -> tuple[float, PricedBudget]:
            return _run(priced, budget, texts, part, params, number)

        plain, _ = _run(priced, None, texts, part, params, number)
        fixed = {k: run(FixedBudget(k))[0] for k in counts}
        auto, seen = run(automatic_budget(whole_draft=drafter.traits.whole_draft, cost_key=None))
        steps = max(seen.num_steps, 1)
        rows.append(ReplayRow(number, name, plain, fixed, auto, seen.num_nodes / steps, seen.num_idle / steps))
    return rows


def answers(plain: LLM, asks: Sequence[Ask], params: SamplingParams) -> list[list[int]]:
    """Prompts with the target's answers."""
    each = [replace(params, max_tokens=ask.max_tokens) for ask in asks]
    generations: Any = plain.generate([list(ask.token_ids) for ask in asks], each)
    return [[*ask.token_ids, *answer.token_ids] for ask, answer in zip(asks, generations, strict=True)]


def _run(
    priced: Priced,
    budget: Budget | None,
    texts: Sequence[Sequence[int]],
    asks: Sequence[Ask],
    params: SamplingParams,
    outstanding: int,
) -> tuple[float, PricedBudget]:
    """Tokens per second, and what the budget did. budget: None decodes plainly, without a drafter."""
    clock, plain = VirtualClock(), priced.plain
    model: LanguageModel = EchoModel(plain.target, texts) if texts else plain.target
    target = PricedTarget(model, priced.target, clock)
    drafter = None if budget is None else PricedDrafter(priced.make(), priced.drafter, clock)
    watched = PricedBudget(budget or FixedBudget(0), target, drafter, priced.drafter, clock)
    config = EngineConfig(seed=0, max_batch=outstanding, num_draft_tokens=AUTO)
    engine = Engine(target, drafter, tokenizer=plain.tokenizer, config=config, budget=watched, clock=clock)
    window = closed_loop(Clients(engine, params, "replay", clock), asks, outstanding)
    return steady_speed(window, target, asks), watched


def steady_speed(window: Window, target: PricedTarget, asks: Sequence[Ask]) -> float:
    """Tokens per second as it would be in a window without end.

    At the end of this one many answers are under way whose prompts have been computed, and how far they are differs
    from run to run by more than what is compared. So prompts are counted in proportion to answers as in all requests.
    """
    prompts, answers = sum(len(ask.token_ids) - 1 for ask in asks), sum(ask.max_tokens for ask in asks)
    each = target.prompt_seconds / target.prompt_rows if target.prompt_rows else 0.0
    return 1 / ((window.seconds - target.prompt_seconds) / window.num_tokens + each * prompts / answers)
