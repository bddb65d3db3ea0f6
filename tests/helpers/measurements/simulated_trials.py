"""Trials without engines: known acceptance and costs, drawn texts, and a clock that is only counted."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun import SamplingParams
from forerun.lab.tune.arms import PLAIN, ArmFailedError, Trial, TuningArm, Unit
from forerun.speculation import AutomaticPolicy, DraftOutcome, FixedPolicy, SpeculationPolicy, StepCost
from forerun.speculation.predictor import CostsByK
from forerun.types import Draft, Sequence, Verdict

GREEDY = SamplingParams(temperature=0)


def costs(first: float, later: float, row: float, most: int = 16) -> CostsByK:
    """A plain step takes 1; a draft its first token, and something for each later one; rows a little."""
    counts = range(most + 1)
    drafting = [first + later * (count - 1) if count else 0.0 for count in counts]
    return CostsByK(1.0, [1 + row * count for count in counts], drafting, [0.0 for _ in counts])


@dataclass
class Simulated:
    """Engines by chance.

    Attributes:
        steps: of every drafter.
        acceptance: of every draft token, by drafter.
        num_tokens: of an answer.
        noise: spread of what trials seem to take; drift: of the machine's speed over time.
        fails: drafter -> trials after which it fails.
    """

    steps: CostsByK
    acceptance: dict[str, float]
    num_tokens: int = 256
    noise: float = 0.02
    drift: float = 0.1
    seed: int = 0
    fails: dict[str, int] = field(default_factory=dict)
    ran: list[tuple[TuningArm, Unit]] = field(default_factory=list)
    clock: float = 0.0
    _policies: dict[TuningArm, SpeculationPolicy] = field(default_factory=dict)

    def now(self) -> float:
        return self.clock

    def run(self, arm: TuningArm, unit: Unit) -> Trial:
        self.ran.append((arm, unit))
        if arm != PLAIN and sum(tried.drafter == arm.drafter for tried, _ in self.ran) > self.fails.get(
            arm.drafter, 10**9
        ):
            raise ArmFailedError("it broke")
        rng = np.random.default_rng((self.seed, *unit, zlib.crc32(str(arm).encode())))
        tokens, seconds, forwards = 0, 0.0, 0
        policy = self._policies.setdefault(arm, self._policy(arm))
        for prompt in unit:
            sequence = Sequence(prompt, [0], 1, GREEDY, max_length=1 + self.num_tokens)
            while sequence.num_output < self.num_tokens:
                seconds += self._step(sequence, policy, self.acceptance.get(arm.drafter, 0.0), rng)
                forwards += 1
            policy.stop(sequence)
            tokens += self.num_tokens
        seconds *= float(np.exp(self.noise * np.random.default_rng(len(self.ran)).standard_normal()))
        seconds *= 1 + self.drift * np.sin(len(self.ran) / 40)
        self.clock += seconds
        return Trial(seconds, tokens, forwards)

    def _policy(self, arm: TuningArm) -> SpeculationPolicy:
        return AutomaticPolicy() if arm.is_auto else FixedPolicy(int(arm.num_draft_tokens))

    def _step(
        self, sequence: Sequence, policy: SpeculationPolicy, acceptance: float, rng: np.random.Generator
    ) -> float:
        k = min(policy.plan([sequence]).num_draft_tokens[0], max(sequence.room, 0), self.steps.most)
        path: list[int] = []
        while len(path) < k and rng.random() < acceptance:
            path.append(len(path))
        draft = Draft.chain(torch.zeros(k, dtype=torch.int64)) if k else Draft.empty()
        cost = StepCost(k + 1, 0, len(sequence.token_ids), self.steps.draft[k], self.steps.target[k], 0.0)
        policy.observe(cost, [DraftOutcome(sequence, k, draft, Verdict(path, 0))])
        sequence.token_ids += [0] * (len(path) + 1)
        return self.steps.seconds(k) if k else self.steps.plain
