"""How far `forerun tune` is from the best of a whole grid, in replay at measured costs.

python benchmarks/tune_grid.py costs MODEL COSTS [COST_OF]      what steps take (timed: leave the machine alone)
python benchmarks/tune_grid.py grid MODEL WORKLOAD COSTS GRID   every drafter at every K on every prompt, replayed
python benchmarks/tune_grid.py regret GRID...                   tuning in a tenth of each grid's time, twenty times;
                                                                a grid may be packed by gzip

A grid holds the seconds that each answer takes: real drafts and verdicts, priced by the costs. Tuning then runs as it
does on a machine, its trials being looked up in the grid, with noise and drift on each of them; what it chooses is
compared with the best arm of the grid on the prompts that had no part in the choice.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forerun.bench.priced_run import PricedAnswer, Setting, VirtualClock, priced_run
from forerun.bench.prompts import prepare
from forerun.bench.replay import answers, fresh, priced, sources_of
from forerun.config import AUTO, OFF, SamplingParams
from forerun.plan.step_times import CostCurve, DrafterCosts, drafter_costs, target_costs
from forerun.policy import FixedBudget, automatic_budget
from forerun.tune.arms import PLAIN, Arm, ArmFailedError, Trial, Unit
from forerun.tune.candidates import is_tree, probe
from forerun.tune.ledger import Ledger
from forerun.tune.promising import promising
from forerun.tune.search import search
from forerun.tune.tuning import FIRST_SHARE, MOST_AT_FIRST, REPORT_SHARE, SELECTION_SHARE
from forerun.tune.verdict import confirm, judge
from forerun.workloads import categories_in_turn, load

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
TREE_COUNTS = (4, 8, 16, 32)
PROMPTS, TOKENS = 16, 64
SHARE = 0.1
"""Of the grid's time that tuning is given."""
NOISE, DRIFT = 0.05, 0.1
"""Spread of one trial's time, and of the machine's speed over time."""
SEEDS = 20
CONTEXT = 256
DRAFTERS: Mapping[str, Sequence[str]] = {
    "bundled": (
        "draft-model", "draft-tree", "staged", "eagle", "recycling", "prompt-lookup", "suffix", "lookahead",
        "early-exit", "draft-model:quantize=int8",
    ),
    "smollm2": ("eagle", "recycling", "prompt-lookup", "suffix"),
}  # fmt: skip
HYBRIDS: Mapping[str, Sequence[str]] = {
    "bundled": [
        f"hybrid:sources={copying}+{other}{mode}"
        for copying in ("suffix", "prompt-lookup")
        for other in ("draft-model", "staged", "eagle")
        for mode in ("", ",mode=merge")
    ],
    "smollm2": [
        f"hybrid:sources={copying}+eagle{mode}"
        for copying in ("suffix", "prompt-lookup")
        for mode in ("", ",mode=merge")
    ],
}


def opened(model: str) -> Any:
    """The target alone."""
    from forerun.engine import LLM

    return LLM(model, drafter=None, prefix_reuse=OFF)


def texts_of(model: str) -> str:
    """Which of the lists of drafters is a model's: padded targets have the bundled one's."""
    return model if model in DRAFTERS else "bundled"


def measure_costs(model: str, path: Path, cost_of: str | None = None) -> None:
    """Time the target's forward, and every drafter on one prompt."""
    from forerun.models import load_model
    from forerun.results.machine import describe, machine

    plain = opened(model)
    workload = "questions" if getattr(plain.tokenizer, "chat_template", None) else "code"
    request = prepare(plain, {"w": load(workload, 1)}, TOKENS)["w"][0]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    timed = plain.target if cost_of is None else load_model(cost_of)
    found: dict[str, Any] = {"model": model, "cost_of": cost_of, "machine": describe(machine())}
    found["target"] = asdict(target_costs(timed, CONTEXT, 8))
    found["drafters"] = {}
    for text in DRAFTERS[texts_of(model)]:
        counts = TREE_COUNTS if is_tree(text) else (1, 2, 4, 8, 16)
        make = partial(fresh, plain, text)
        costs = drafter_costs(plain.target, plain.tokenizer, make, counts, request.token_ids, params)
        found["drafters"][text] = asdict(costs)
        print(text, f"{1000 * costs.draft(4):.2f} ms for 4", file=sys.stderr)
    path.write_text(json.dumps(rounded(found)) + "\n", encoding="utf-8")


def curve(found: Mapping[str, Any]) -> CostCurve:
    """Of its object."""
    return CostCurve(found["counts"], found["seconds"])


def costs_of(found: Mapping[str, Any]) -> dict[str, DrafterCosts]:
    """Of all drafters of a file."""
    return {
        text: DrafterCosts(curve(each["draft"]), each["idle"], curve(each["rest"]), each["taps"])
        for text, each in found["drafters"].items()
    }


def arms_of(model: str) -> list[Arm]:
    """The grid."""
    found: list[Arm] = []
    for text in DRAFTERS[texts_of(model)]:
        counts: Sequence[int] = TREE_COUNTS if is_tree(text) else COUNTS
        found += [Arm(text, AUTO), *(Arm(text, k) for k in counts)]
    return [*found, *(Arm(text, AUTO) for text in HYBRIDS[texts_of(model)])]


def make_grid(model: str, workload: str, costs_path: Path, path: Path) -> None:
    """Replay every arm on every prompt."""
    plain = opened(model)
    file = json.loads(costs_path.read_text(encoding="utf-8"))
    target, costs = curve(file["target"]), costs_of(file)
    cases = categories_in_turn(load(workload))[:PROMPTS]
    prompts = [request.token_ids for request in prepare(plain, {workload: cases}, TOKENS)[workload]]
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=i) for i in range(len(prompts))]
    whole = answers(plain, prompts, params)
    found: dict[str, list[list[float]]] = {}
    for arm in arms_of(model):
        sources = sources_of(arm.drafter)[0]
        rest = max((costs[each].rest for each in sources), key=lambda each: len(each.counts))
        taps = max(costs[each].taps for each in sources)
        setting = Setting(plain, partial(priced, plain, arm.drafter, costs), target, rest, taps=taps)
        reader = fresh(plain, arm.drafter)
        texts = [] if reader.needs.rows or reader.traits.writes_cache or reader.needs.layers else whole
        is_whole = setting.make(VirtualClock()).traits.whole_draft
        budget = (
            automatic_budget(whole_draft=is_whole, cost_key=None)
            if arm.is_auto
            else FixedBudget(int(arm.num_draft_tokens))
        )
        told: list[PricedAnswer] = []
        # An automatic K has learnt from one prompt before, as in tuning.
        first = 1 if arm.is_auto else 0
        order = [0] * first + list(range(len(prompts)))
        of = ([prompts[i] for i in order], [params[i] for i in order], [texts[i] for i in order] if texts else [])
        priced_run(setting, budget, str(arm), *of, told.append)
        found[str(arm)] = [row_of(each) for each in told[first:]]
        seconds = sum(each.seconds for each in told[first:])
        plain_seconds = TOKENS * len(prompts) / setting.plain_speed
        print(f"{arm}: {plain_seconds / seconds:.3f}", file=sys.stderr, flush=True)
    facts = {"model": model, "workload": workload, "costs": file, "tokens": TOKENS}
    head = json.dumps(facts)[:-1]
    lines = ",\n".join(f'  "{name}": {json.dumps(rounded(each))}' for name, each in found.items())
    path.write_text(f'{head}, "arms": {{\n{lines}\n }}}}\n', encoding="utf-8")


def row_of(answer: PricedAnswer) -> list[Any]:
    """Seconds and counts of one answer, as a grid holds them."""
    stats = answer.stats
    return [
        answer.seconds, answer.draft_seconds, answer.target_seconds, stats.num_forwards, stats.num_draft_tokens,
        stats.num_accepted_tokens, list(stats.reached_per_position), list(stats.accepted_per_position),
    ]  # fmt: skip


def rounded(value: Any) -> Any:
    """With four digits, which is more than is measured."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


@dataclass
class Grid:
    """A grid that was made.

    Attributes:
        trials: arm -> a trial for each prompt.
        target: seconds of a forward, by rows.
    """

    trials: dict[Arm, list[Trial]]
    target: CostCurve

    @classmethod
    def read(cls, path: Path) -> Grid:
        """From its file."""
        content = path.read_bytes()
        file = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        costs, target = costs_of(file["costs"]), curve(file["costs"]["target"])
        tokens, model = file["tokens"], file["model"]
        trials = {
            arm: [
                Trial(seconds, tokens, forwards, drafted, accepted, tuple(reached), tuple(kept), draft, verify)
                for seconds, draft, verify, forwards, drafted, accepted, reached, kept in file["arms"][str(arm)]
            ]
            for arm in arms_of(model)
        }
        step = target(1) + min(each.rest(0) for each in costs.values())
        count = len(next(iter(trials.values())))
        trials[PLAIN] = [Trial(tokens * step, tokens, tokens, target_seconds=tokens * target(1))] * count
        return cls(trials, target)

    @property
    def seconds(self) -> float:
        """What all arms on all prompts take, each beside plain decoding as tuning has it (a seventh more)."""
        return 7 / 6 * sum(trial.seconds for every in self.trials.values() for trial in every)

    def speedup(self, arm: Arm, prompts: Sequence[int]) -> float:
        """Over plain decoding."""
        return self._total(PLAIN, prompts) / self._total(arm, prompts)

    def best(self, prompts: Sequence[int]) -> Arm:
        """The fastest."""
        return max(self.trials, key=lambda arm: self.speedup(arm, prompts))

    def nearest(self, arm: Arm) -> Arm | None:
        """The arm of the grid that is the nearest in K; None where its drafter is not in the grid."""
        of = [each for each in self.trials if each.drafter == arm.drafter and each.is_auto == arm.is_auto]
        if arm.is_auto:
            return of[0] if of else None
        wanted = int(arm.num_draft_tokens)
        return min(of, key=lambda each: abs(int(each.num_draft_tokens) - wanted), default=None)

    def _total(self, arm: Arm, prompts: Sequence[int]) -> float:
        return sum(self.trials[arm][prompt].seconds for prompt in prompts)


@dataclass
class LookedUp:
    """Trials as a grid has them, with noise and drift: what tuning sees in place of engines."""

    grid: Grid
    seed: int
    clock: float = 0.0
    count: int = 0
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def now(self) -> float:
        """Seconds of all trials so far."""
        return self.clock

    def run(self, arm: Arm, unit: Unit) -> Trial:
        """As `Trials.run`."""
        if arm not in self.grid.trials:
            raise ArmFailedError("it is not in the grid")
        found = self.grid.trials[arm][unit.prompts[0]]
        self.count += 1
        factor = float(np.exp(NOISE * self._rng.standard_normal())) * (1 + DRIFT * np.sin(self.count / 40))
        self.clock += factor * found.seconds
        return Trial(
            factor * found.seconds, found.num_tokens, found.num_forwards, found.num_drafted, found.num_accepted,
            found.reached, found.accepted, factor * found.draft_seconds, factor * found.target_seconds,
        )  # fmt: skip


def tuned(grid: Grid, seed: int, share: float = SHARE) -> tuple[Arm, float, float]:
    """What tuning chooses; its regret on the prompts that had no part in the choice; its share of the grid's time."""
    trials = LookedUp(grid, seed)
    count = len(grid.trials[PLAIN])
    units = [Unit((number,)) for number in range(count)]
    texts = [arm.drafter for arm in grid.trials if arm.is_auto and not arm.drafter.startswith("hybrid")]
    arms = [*(Arm(text, AUTO) for text in texts), *(Arm(text, probe(text)) for text in texts)]

    def more(ledger: Ledger) -> Sequence[Arm]:
        near = [grid.nearest(arm) for arm in promising(grid.target, ledger)]
        return list(dict.fromkeys(arm for arm in near if arm is not None))

    seconds = share * grid.seconds
    until = SELECTION_SHARE * seconds
    first = int(FIRST_SHARE * until / len(arms) / grid.trials[PLAIN][0].seconds)
    rounds = max(1, min(first, MOST_AT_FIRST))
    found = search(trials, Ledger(), arms, units[::2], until, more, count=rounds)
    report = Ledger()
    confirm(trials, report, found, units[1::2], REPORT_SHARE * seconds)
    chosen = judge(report, found).arm
    others = range(1, count, 2)
    regret = 1 - grid.speedup(chosen, others) / grid.speedup(grid.best(others), others)
    return chosen, regret, trials.now() / grid.seconds


def regrets(paths: Sequence[Path]) -> Iterator[str]:
    """Lines for people."""
    for path in paths:
        grid = Grid.read(path)
        every = range(len(grid.trials[PLAIN]))
        best = grid.best(every)
        yield f"{path.name}: {len(grid.trials) - 1} arms, {len(every)} prompts, {grid.seconds:.0f} s"
        yield f"  the best: {best}, {grid.speedup(best, every):.3f} of plain"
        found = [tuned(grid, seed) for seed in range(SEEDS)]
        worst = max(found, key=lambda each: each[1])
        chosen = {str(arm): sum(each[0] == arm for each in found) for arm, _, _ in found}
        median = sorted(regret for _, regret, _ in found)[len(found) // 2]
        time = max(share for _, _, share in found)
        yield f"  regret: median {100 * median:.1f} %, largest {100 * worst[1]:.1f} % ({worst[0]})"
        within = sum(regret <= 0.03 for _, regret, _ in found)
        yield f"  within 3 %: {within} of {len(found)}; time: at most {100 * time:.0f} % of the grid's"
        yield "  chosen: " + "; ".join(f"{name} {count} times" for name, count in chosen.items())


def main(arguments: list[str]) -> None:
    """One of the three."""
    match arguments:
        case ["costs", model, path, *rest]:
            measure_costs(model, Path(path), *rest)
        case ["grid", model, workload, costs_path, path]:
            make_grid(model, workload, Path(costs_path), Path(path))
        case ["regret", *paths] if paths:
            for line in regrets([Path(path) for path in paths]):
                print(line)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
