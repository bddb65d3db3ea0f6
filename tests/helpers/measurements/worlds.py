"""Worlds for policies to run in: known acceptances and costs, and time that is only counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from forerun import SamplingParams
from forerun.speculation import (
    AutomaticPolicy,
    CostModel,
    DraftChooser,
    DraftOutcome,
    FixedPolicy,
    SpeculationPolicy,
    StepCost,
)
from forerun.types import Draft, Sequence, Verdict

GREEDY = SamplingParams(temperature=0)


@dataclass
class World:
    """What drafting and verifying cost, and how good the drafts are.

    Attributes:
        accept: (sequence, token number, depth) -> probability that a node is accepted if its parent was.
        found: (sequence, token number) -> probability that the drafter proposes anything.
        draft: (num_draft_tokens, sequences) -> seconds.
        target: rows -> seconds.
        batch: sequences at a time.
        length: tokens of each.
        noise: spread of the measured times.
        prompt: tokens of each before the first of its length.
        catch_up: seconds for each token that came, prompt included, since a sequence drafted last, if it has paused.
    """

    accept: Callable[[int, int, int], float]
    draft: Callable[[int, int], float]
    target: Callable[[int], float]
    found: Callable[[int, int], float] = lambda sequence, at: 1.0
    batch: int = 1
    length: int = 128
    noise: float = 0.0
    prompt: int = 1
    catch_up: float = 0.0


@dataclass
class Lived:
    """The steps of a policy in a world: expected tokens and seconds (so that luck is left out), and draft tokens."""

    tokens: list[float]
    seconds: list[float]
    num_draft_tokens: list[list[int]]

    def speed(self, first: int = 0) -> float:
        """Tokens per second from a step on."""
        return sum(self.tokens[first:]) / sum(self.seconds[first:])


def calibrated(world: World) -> AutomaticPolicy:
    """Return a policy that begins with what this world's steps and drafts cost, as an engine's does."""
    costs = CostModel()
    for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16, 32):
        costs.add_target("greedy", 1, 0, rows, world.target(rows), 5)
    for batch in (1, 4):
        for k in (1, 1, 4, 4):
            costs.add_draft(batch, k, world.draft(k, batch))
    if world.catch_up:
        costs.add_first_draft(1, 1, 64, world.draft(1, 1) + 64 * world.catch_up)
    return AutomaticPolicy(DraftChooser(costs))


def live(world: World, policy: SpeculationPolicy, num_steps: int, seed: int = 0) -> Lived:
    """Sequences one after the other, world.batch of them at a time, for so many steps."""
    rng = np.random.default_rng(seed)
    lived = Lived([], [], [])
    running: list[Sequence] = []
    seen: dict[int, int] = {}  # tokens of a sequence that its drafter has computed with
    count = 0
    for _ in range(num_steps):
        while len(running) < world.batch:
            length = world.length if world.batch == 1 else int(world.length * (0.5 + rng.random()))
            running.append(Sequence(count, [0] * world.prompt, world.prompt, GREEDY, max_length=world.prompt + length))
            count += 1
        num_draft_tokens = policy.plan(running).num_draft_tokens
        num_draft_tokens = [
            min(own, max(0, sequence.room)) for own, sequence in zip(num_draft_tokens, running, strict=True)
        ]
        outcomes = [_try(world, sequence, own, rng) for sequence, own in zip(running, num_draft_tokens, strict=True)]
        rows = sum(len(outcome.draft) + 1 for outcome in outcomes)
        asked = sum(own > 0 for own in num_draft_tokens)
        drafting = world.draft(max(num_draft_tokens), asked) if asked else 0.0
        drafting += world.catch_up * sum(
            len(sequence.token_ids) - seen.get(sequence.id, 0)
            for own, sequence in zip(num_draft_tokens, running, strict=True)
            if own
        )
        target = world.target(rows)
        blur = np.exp(world.noise * rng.standard_normal(2)) if world.noise else np.ones(2)
        context = sum(len(sequence.token_ids) for sequence in running)
        cost = StepCost(rows, 0, context, drafting * blur[0], target * blur[1], 0.0)
        tokens, seconds = _expected(world, running, num_draft_tokens)
        lived.tokens.append(tokens)
        lived.seconds.append(seconds + drafting)
        lived.num_draft_tokens.append(list(num_draft_tokens))
        for outcome in outcomes:
            outcome.sequence.token_ids += [0] * (len(outcome.verdict.path) + 1)
        policy.observe(cost, outcomes)
        for outcome in outcomes:
            if outcome.num_draft_tokens:
                seen[outcome.sequence.id] = len(outcome.sequence.token_ids)
        for sequence in [own for own in running if len(own.token_ids) >= own.max_length]:
            policy.stop(sequence)
            running.remove(sequence)
    return lived


def _expected(world: World, running: Seq[Sequence], num_draft_tokens: Seq[int]) -> tuple[float, float]:
    """Tokens and seconds in the target of a step, on average over what it may bring."""
    tokens, rows, found = 0.0, 0.0, 1.0
    for sequence, k in zip(running, num_draft_tokens, strict=True):
        at = len(sequence.token_ids)
        found = world.found(sequence.id, at) if k else 0.0
        accept_probs = np.cumprod([world.accept(sequence.id, at, depth) for depth in range(k)])
        tokens += 1 + found * float(accept_probs.sum())
        rows += 1 + found * k
    if len(running) == 1:  # costs may come in steps
        return tokens, found * world.target(1 + num_draft_tokens[0]) + (1 - found) * world.target(1)
    return tokens, world.target(round(rows))


def best_fixed(world: World, num_steps: int, counts: Seq[int] = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)) -> float:
    """The best speed of any fixed K."""
    return max(live(world, FixedPolicy(k), num_steps).speed() for k in counts)


def _try(world: World, sequence: Sequence, num_draft_tokens: int, rng: np.random.Generator) -> DraftOutcome:
    at = len(sequence.token_ids)
    drafted = num_draft_tokens if num_draft_tokens and rng.random() < world.found(sequence.id, at) else 0
    path: list[int] = []
    while len(path) < drafted and rng.random() < world.accept(sequence.id, at, len(path)):
        path.append(len(path))
    draft = Draft.chain(torch.zeros(drafted, dtype=torch.int64)) if drafted else Draft.empty()
    return DraftOutcome(sequence, num_draft_tokens, draft, Verdict(path, 0))
