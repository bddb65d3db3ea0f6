"""Trials in real engines over one target: a drafter is bound once, each arm has an engine of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import fmean
from time import perf_counter

from forerun.config import OFF, EngineConfig, SamplingParams
from forerun.drafters import Binding, Drafter, make_drafter
from forerun.engine import LLM
from forerun.engine.engine import Engine
from forerun.engine.results import Choice, StepStats
from forerun.engine.step_times import calibrate
from forerun.errors import ForerunError
from forerun.lab.bench.methods import with_prediction
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.tune.arms import PLAIN, ArmFailedError, OutOfTimeError, Trial, TuningArm, Unit

WARM_TOKENS = 8
"""Tokens that an arm generates before its first trial, for memory that is allocated at first. One that chooses K itself
generates a whole answer, unless time is short, by which it learns what steps cost: that is written down for later
processes, too."""
SETTLING = 2
"""Steps after a prompt that decoding is not judged by: rows may take twice as long then, whoever drafts."""
_SEED = 1


def decoding(steps: Sequence[StepStats]) -> tuple[float, list[StepStats]]:
    """Return the seconds of decoding of one request, and the steps in which it was spent: those after its first token,
    without the first SETTLING where others follow. Where there is none after the first token, all steps are returned.

    What the drafter took of earlier steps beyond what it takes of these counts: it followed the prompt there.
    """
    first = next(number for number, step in enumerate(steps, 1) if step.num_tokens)
    begin = first + SETTLING if first + SETTLING < len(steps) else first
    later = list(steps[begin:])
    if not later:
        return sum(step.time_total for step in steps), list(steps)
    usual = fmean(step.time_draft for step in later)
    following = sum(max(step.time_draft - usual, 0.0) for step in steps[:begin])
    return following + sum(step.time_total for step in later), later


class EngineTrials:
    """Trials by wall clock.

    Args:
        plain: an engine of the target alone.
        requests: the prompts, by number.
        params: of all of them; each gets a seed of its own, and its prediction where the drafter reads them.
        seconds: after which the trial that runs is given up.
        only_decoding: the time of prompts does not count; for units of one prompt.
    """

    def __init__(
        self,
        plain: LLM,
        requests: Sequence[BenchPrompt],
        params: SamplingParams,
        seconds: float = math.inf,
        *,
        only_decoding: bool = False,
    ) -> None:
        self._plain = plain
        self._requests = requests
        self._params = params
        self._seconds = seconds
        self._only_decoding = only_decoding
        self._drafters: dict[str, Drafter] = {}
        self._engines: dict[TuningArm, Engine] = {}
        self._texts: dict[int, list[int]] = {}  # of plain decoding, by prompt
        self._began = perf_counter()

    def now(self) -> float:
        """Return the seconds since tuning began."""
        return perf_counter() - self._began

    def drafter(self, text: str) -> Drafter:
        """Return the drafter of this text, bound to the target, the same one every time.

        Raises:
            ArmFailedError: it cannot be had, or does not fit the target.
        """
        if text not in self._drafters:
            binding = Binding(self._plain.target, self._plain.tokenizer, _SEED)
            try:
                self._drafters[text] = make_drafter(text, binding)[0]
            except ForerunError as error:
                raise ArmFailedError(str(error)) from error
            except Exception as error:  # a drafter of another package may raise anything
                raise ArmFailedError(f"it raised {type(error).__name__}") from error
        return self._drafters[text]

    def engine(self, arm: TuningArm, level: int = 1) -> Engine:
        """Return the arm's engine. Raises ArmFailedError as `drafter`."""
        if arm not in self._engines:
            config = EngineConfig(seed=0, prefix_reuse=OFF, num_draft_tokens=arm.num_draft_tokens)
            drafter = None if arm == PLAIN else self.drafter(arm.drafter)
            if arm.is_auto:  # as LLM does, or drafts would be tried rarely until their cost is known
                calibrate(self._plain.target, drafter)
            engine = Engine(self._plain.target, drafter, tokenizer=self._plain.tokenizer, config=config)
            self._engines[arm] = engine
            tokens = self._params.max_tokens if arm.is_auto and not self._only_decoding else WARM_TOKENS
            self._answers(arm, engine, range(0, 2 * level, 2), tokens)  # of those by which arms are chosen
        return self._engines[arm]

    def run(self, arm: TuningArm, unit: Unit) -> Trial:
        """Run one trial.

        Raises:
            ArmFailedError: as `drafter`, or a request fails.
            OutOfTimeError: the time is up.
        """
        engine = self.engine(arm, len(unit))
        if arm != PLAIN:
            self.drafter(arm.drafter).reset()  # no arm profits from text that another has seen
        started = perf_counter()
        choices, steps = self._answers(arm, engine, unit, self._params.max_tokens)
        trial = _trial(perf_counter() - started, choices, self._is_same(arm, unit, choices))
        if not self._only_decoding:
            return trial
        seconds, later = decoding(steps)
        return replace(
            trial, seconds=seconds, num_tokens=sum(step.num_tokens for step in later), num_forwards=len(later)
        )

    def _answers(
        self, arm: TuningArm, engine: Engine, prompts: Sequence[int], max_tokens: int
    ) -> tuple[list[Choice], list[StepStats]]:
        """Answer prompts that are sent at once; return the answers in their order, and the steps."""
        steps: list[StepStats] = []
        done: dict[int, Choice] = {}
        try:
            ids = []
            for prompt in prompts:
                params = replace(self._params, seed=prompt, max_tokens=max_tokens)
                params = with_prediction(params, engine.drafter, self._requests[prompt])
                ids.append(engine.add(list(self._requests[prompt].token_ids), params))
            while engine.has_work:
                if self.now() > self._seconds:
                    raise OutOfTimeError
                outputs = engine.step()
                steps.append(engine.last_step)
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                    if output.choice is not None:
                        done[output.request_id] = output.choice
        except Exception as error:
            engine.close()
            if arm == PLAIN or isinstance(error, OutOfTimeError):
                raise  # the target's own failure is nobody else's
            reason = str(error) if isinstance(error, ForerunError) else f"it raised {type(error).__name__}"
            raise ArmFailedError(f"it failed while it was tried: {reason}") from error
        except BaseException:
            engine.close()
            raise
        return [done[each] for each in ids], steps

    def _is_same(self, arm: TuningArm, unit: Unit, choices: Sequence[Choice]) -> bool | None:
        """Return whether the texts are those of plain decoding, which is tried first."""
        if arm == PLAIN:
            self._texts |= {prompt: choice.token_ids for prompt, choice in zip(unit, choices, strict=True)}
            return None
        known = [self._texts.get(prompt) for prompt in unit]
        return all(text == choice.token_ids for text, choice in zip(known, choices, strict=True))


def _trial(seconds: float, choices: Sequence[Choice], same: bool | None) -> Trial:
    stats = [choice.stats for choice in choices]
    return Trial(
        seconds,
        sum(each.num_tokens for each in stats),
        sum(each.num_forwards for each in stats),
        sum(each.num_draft_tokens for each in stats),
        sum(each.num_accepted_tokens for each in stats),
        _summed([each.reached_per_position for each in stats]),
        _summed([each.accepted_per_position for each in stats]),
        max(each.time_first_token for each in stats),
        same,
    )


def _summed(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))
