"""The layer *Rule*: the acceptance rules as the engine calls them, on cached distributions of the user's model.

No model is called: drafts are drawn from known distributions, a rule decides, what a step leaves open is drawn from the
target's distribution, and the counts of three symbols are compared with their exact probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from forerun.config import LOSSY_RULES, SamplingParams
from forerun.lab.audit.certificate import Check, Layer
from forerun.lab.audit.distributions import (
    CHAIN,
    LENGTH,
    NUM_SYMBOLS,
    TREE,
    PossibleDrafts,
    SymbolDistributions,
    TargetDistributions,
    possible_drafts,
    symbol_distributions,
)
from forerun.lab.audit.pace import Pace, in_time
from forerun.lab.audit.statistics import NOTHING, Numbers, g_test
from forerun.models import LanguageModel
from forerun.sampling import StepNoise
from forerun.types import Noise, PackedDrafts, Sequence
from forerun.verification import verify_step

RULE_WEIGHT = 0.2
"""Of a rule's time, beside that of a comparison of bits."""
_AT_ONCE = 2048
"""Sequences of a step."""
_NUM_PROMPTS = 2
_OPTIONS = (SamplingParams(), SamplingParams(temperature=0.8, top_k=3))
"""Options of the distributions; with the second, some symbols cannot come."""
_AT_BOUNDS = 512
"""Drafts of each rule and distribution that are judged with numbers at the bounds."""
_AT_A_BOUND = "tokens of probability 0 were written at a bound of the noise"


@dataclass(frozen=True, slots=True)
class RuleCase:
    """A rule on drafts of one kind.

    Attributes:
        name: in reports.
        rule: its name.
        drafts: makes all drafts from distributions.
        is_seeded: sequences have seeds, and their noise is keyed.
    """

    name: str
    rule: str
    drafts: Callable[[SymbolDistributions], PossibleDrafts]
    is_seeded: bool = False


_CHAINS = partial(possible_drafts, shape=CHAIN)
_DISTINCT = partial(possible_drafts, shape=TREE, replacement=False)
_REPEATED = partial(possible_drafts, shape=TREE)
_CHOSEN = partial(possible_drafts, shape=TREE, chosen=True)
_CHOSEN_CHAINS = partial(possible_drafts, shape=CHAIN, chosen=True)

TRIED: Seq[RuleCase] = (
    RuleCase("block, drawn chains", "block", _CHAINS),
    RuleCase("token, drawn chains", "token", _CHAINS),
    RuleCase("traversal, trees drawn without replacement", "traversal", _DISTINCT),
    RuleCase("traversal, trees drawn with replacement", "traversal", _REPEATED),
    RuleCase("multi-step, trees drawn without replacement", "multi-step", _DISTINCT),
    RuleCase("multi-step, trees drawn with replacement", "multi-step", _REPEATED),
    RuleCase("walk, chosen trees", "walk", _CHOSEN),
    RuleCase("coupled, chosen chains, a seed each", "coupled", _CHOSEN_CHAINS, is_seeded=True),
)


def rule_layer(
    target: LanguageModel,
    prompts: Seq[Seq[int]],
    num_samples: int,
    seed: int,
    level: float,
    acceptance: str | None = None,
    pace: Pace | None = None,
    grid: Seq[RuleCase] = TRIED,
) -> Layer:
    """Try every lossless rule, and the lossy one that is requested.

    Args:
        num_samples: of each.
        level: of each test.
        grid: the rules, each on one kind of drafts.
    """
    layer = Layer(
        "Rule",
        "Acceptance rules on cached distributions of the model: three tokens a time against exact probabilities.",
    )
    pace = pace or Pace()
    pace.begin("Rule: distributions of the model", weight=RULE_WEIGHT)
    if pace.is_over:
        layer.tests.append(Check("all rules", "inconclusive", note=in_time(0, len(grid))))
        return layer
    rng = np.random.default_rng(seed)
    sets: list[SymbolDistributions] = []
    for prompt in prompts[:_NUM_PROMPTS]:
        with closing(TargetDistributions(target, prompt)) as distributions:
            sets += [symbol_distributions(distributions, params, rng) for params in _OPTIONS]
    count = -(-num_samples // len(sets))
    for tried in grid:
        pace.begin(f"Rule: {tried.name}", count * len(sets), RULE_WEIGHT)
        outcome = NOTHING
        for one in sets:
            outcome += g_test(_counts(tried, one, count, rng, pace), one.cells)
            pace.advance(outcome.num_samples)
        note = in_time(outcome.num_samples, count * len(sets))
        layer.tests.append(Check.of(tried.name, outcome, level, **({"note": note} if note else {})))
        if layer.tests[-1].verdict == "fail":
            layer.findings.append(f"{tried.name}: what it writes does not follow the target's distribution.")
    if acceptance in LOSSY_RULES:
        lossy = RuleCase(f"{acceptance}, drawn chains", str(acceptance), _CHAINS)
        layer.tests.append(
            Check.measured(lossy.name, [(_counts(lossy, one, count, rng, pace), one.cells) for one in sets])
        )
    layer.tests.append(_at_bounds(layer, grid, sets, rng))
    return layer


def _counts(
    tried: RuleCase, distributions: SymbolDistributions, num_samples: int, rng: np.random.Generator, pace: Pace
) -> Numbers:
    """Count how often each string of symbols is written, [NUM_SYMBOLS ** LENGTH]."""
    counts = np.zeros(NUM_SYMBOLS**LENGTH)
    drafts = tried.drafts(distributions)
    cumulative = {context: np.cumsum(row).tolist() for context, row in distributions.target.items()}
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    for start in range(0, num_samples, _AT_ONCE):
        if pace.is_over:
            break
        count = min(_AT_ONCE, num_samples - start)
        drawn = rng.choice(len(drafts.drafts), size=count, p=drafts.probabilities).tolist()
        seeds = rng.integers(2**62, size=count).tolist() if tried.is_seeded else [None] * count
        sequences = [
            Sequence(number, [0], 1, _OPTIONS[0] if seed is None else SamplingParams(seed=seed))
            for number, seed in enumerate(seeds)
        ]
        packed = PackedDrafts.of([drafts.drafts[index] for index in drawn])
        strings = _written(tried, drafts, drawn, packed, StepNoise(generator, sequences, packed))
        for string, numbers in zip(strings, rng.random((count, LENGTH)).tolist(), strict=True):
            for number in numbers[: LENGTH - len(string)]:
                sums = cumulative[string]
                string = (*string, next(symbol for symbol, sum_ in enumerate(sums) if number * sums[-1] < sum_))
            counts[sum(symbol * NUM_SYMBOLS ** (LENGTH - 1 - depth) for depth, symbol in enumerate(string))] += 1
    return counts


def _written(
    tried: RuleCase, drafts: PossibleDrafts, drawn: Seq[int], packed: PackedDrafts, noise: Noise
) -> list[tuple[int, ...]]:
    """Return the symbols that the rule writes for each of the drawn drafts."""
    logprobs = drafts.logprobs[torch.tensor(drawn)].flatten(0, 1)
    verdicts = verify_step(packed, logprobs, [tried.rule] * len(drawn), noise)
    ids = [drafts.drafts[index].ids for index in drawn]
    return [
        (*(own[node] for node in verdict.path), verdict.next_token) for own, verdict in zip(ids, verdicts, strict=True)
    ]


class BoundNoise:
    """Numbers at the bounds of their range, which generators give once in 2^53 times, and a middle one."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def uniform(self, size: int) -> Tensor:
        return torch.from_numpy(self._rng.choice([0.0, 0.0, 2.0**-53, 0.5, 1 - 2.0**-53], size=size))

    def gumbel(self, rows: Seq[int], vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
        width = vocab_size if token_ids is None else len(token_ids)
        uniforms = self._rng.choice([2.0**-53, 0.5, 1 - 2.0**-53], size=(len(rows), width))
        return torch.from_numpy(-np.log(-np.log(uniforms)))


def _at_bounds(layer: Layer, grid: Seq[RuleCase], sets: Seq[SymbolDistributions], rng: np.random.Generator) -> Check:
    """Check that no rule writes a token of probability 0, whatever the noise."""
    for tried in grid:
        count = 0
        for distributions in sets:
            drafts = tried.drafts(distributions)
            drawn = rng.integers(len(drafts.drafts), size=_AT_BOUNDS).tolist()
            packed = PackedDrafts.of([drafts.drafts[index] for index in drawn])
            count += sum(
                distributions.probability(each) == 0 for each in _written(tried, drafts, drawn, packed, BoundNoise(rng))
            )
        if count:
            layer.findings.append(f"{tried.name}: {count} {_AT_A_BOUND}.")
    return Check(
        "noise at its bounds, all rules",
        "fail" if any(_AT_A_BOUND in finding for finding in layer.findings) else "pass",
        what="verdicts",
        num_samples=_AT_BOUNDS * len(sets) * len(grid),
        note="no token of probability 0 may come",
    )
