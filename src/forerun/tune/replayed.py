"""What a replay predicts for an arm: real drafts and verdicts, priced by costs that were measured once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.bench.priced_run import VirtualClock, priced_run
from forerun.bench.replay import fresh, timed_setting
from forerun.config import SamplingParams
from forerun.engine import LLM
from forerun.plan.step_times import CostCurve
from forerun.policy import FixedBudget, automatic_budget
from forerun.tune.arms import Arm, Trial

COUNTS = (1, 2, 4, 8, 16)
"""K at which costs are measured for an arm that chooses K itself."""


def replayed_speedup(
    plain: LLM,
    arm: Arm,
    target: CostCurve,
    params: Sequence[SamplingParams],
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    trials: Sequence[Trial],
) -> float:
    """Tokens per second over plain decoding, prompts included.

    Args:
        target: seconds of a forward, by rows.
        params: of each prompt.
        texts: prompt and answer.
        trials: of plain decoding, of these prompts: how long prompts take.
    """
    counts = COUNTS if arm.is_auto else (int(arm.num_draft_tokens),)
    prompts = [prompt for prompt, _ in texts]
    most = params[0].max_tokens
    setting = timed_setting(plain, arm.drafter, target, counts, prompts[0], most, lambda _: None)
    reader = fresh(plain, arm.drafter)
    setting = replace(setting, echo=not (reader.needs.rows or reader.traits.writes_cache))
    whole = setting.make(VirtualClock()).traits.whole_draft
    fixed = None if arm.is_auto else FixedBudget(int(arm.num_draft_tokens))
    budget = fixed or automatic_budget(whole_draft=whole, cost_key=None)
    whole_texts = [[*prompt, *answer] for prompt, answer in texts] if setting.echo else []
    run = priced_run(setting, budget, str(arm), prompts, params, whole_texts)
    tokens = sum(len(answer) for _, answer in texts)
    first = sum(trial.first_seconds for trial in trials)
    return (first + tokens / setting.plain_speed) / (first + tokens / run.tokens_per_second)
