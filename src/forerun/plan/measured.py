"""Steps of a target with its drafter, measured in the engine on this machine."""

from __future__ import annotations

import torch

from forerun import workloads
from forerun.config import SamplingParams
from forerun.drafters import Binding, make_drafter
from forerun.errors import ConfigError
from forerun.models import find_tokenizer, load_model
from forerun.plan.options import PlanOptions
from forerun.plan.predictor import StepCosts
from forerun.plan.step_times import step_costs

LOOKED_UP = "suffix"
"""What stands for drafts without a model."""
MOST = 8
"""Largest K that is measured."""
CONTEXT = 256
TOKENS = 24
_ARGUMENTS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None)} | {
    name: ("bfloat16", name) for name in ("int8", "int4")
}


def measured_steps(model: str, draft: str | None, options: PlanOptions) -> StepCosts:
    """The costs of chains of up to MOST tokens.

    Args:
        draft: a draft model, or the text of a drafter; None: look-ups.

    Raises:
        ConfigError: the number format is none that forerun serves.
        ModelLoadError, DrafterError: as `LLM`.
    """
    if options.precision not in _ARGUMENTS:
        raise ConfigError(
            f"--precision is {options.precision!r}, which forerun does not compute in, so it cannot be measured. Give "
            f"one of {', '.join(_ARGUMENTS)}, or leave --measure out."
        )
    dtype, quantize = _ARGUMENTS[options.precision]
    target, tokenizer = load_model(model, dtype, quantize=quantize), find_tokenizer(model)
    drafter, _ = make_drafter(draft or LOOKED_UP, Binding(target, tokenizer, 0))
    text = workloads.load("copying", 1)[0].prompt
    prompt = [1] * 8 if tokenizer is None else tokenizer(text, verbose=False)["input_ids"]
    most = min(CONTEXT, options.context, target.context_length // 2)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with torch.inference_mode():
        count = min(MOST, options.num_draft_tokens)
        return step_costs(target, tokenizer, lambda: drafter, count, prompt[:most], params)
