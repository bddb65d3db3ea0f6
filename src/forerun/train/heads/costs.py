"""What a step costs on this machine with a head that is being trained, for the predictor of its card."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.config import SamplingParams
from forerun.drafters import Binding, Drafter
from forerun.models import LanguageModel
from forerun.plan.predictor import StepCosts
from forerun.plan.step_times import step_costs

CONTEXT = 256
"""Tokens of the prompt, at most."""
TOKENS = 24
"""Of each generation that is timed."""


@torch.no_grad()
def head_costs(served: LanguageModel, head: Drafter, prompt: Sequence[int], num_draft_tokens: int) -> StepCosts:
    """Seconds of the engine's steps with a head as the drafter, by the tokens of its drafts.

    Args:
        head: not yet bound to the target.
        prompt: text that the head was made for; its first CONTEXT tokens, and half of the target's context, are read.
    """
    head.bind(Binding(served, None, 0))
    most = min(CONTEXT, served.context_length // 2)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return step_costs(served, None, lambda: head, num_draft_tokens, prompt[:most], params)
