"""An audit of an engine in this process: a model, a drafter, and the three layers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from forerun.errors import ConfigError, DrafterError
from forerun.lab.audit.bits_layer import bits_layer, runs
from forerun.lab.audit.certificate import Certificate, Layer
from forerun.lab.audit.engine_layer import Audited, engine_layer, engine_weight
from forerun.lab.audit.pace import Pace
from forerun.lab.audit.rule_layer import RULE_WEIGHT, TRIED, rule_layer
from forerun.lab.audit.settings import FAMILY_ERROR, NEEDS_DRAFTER, SAMPLED, AuditOptions
from forerun.verification import check_acceptance

_FEWEST_TOKENS = 4
"""Of a vocabulary: the rules are tried on four symbols."""

_SHORT = 48
"""Tokens of a prompt, from its end."""
_LONG = 250
"""Tokens of the long one: its answers go over the border of 256 keys, where sums are cut."""


def run_audit(
    audited: Audited,
    prompts: Seq[Seq[int]],
    settings: AuditOptions | None = None,
    *,
    acceptance: str | None = None,
    subject: Mapping[str, Any] | None = None,
    pace: Pace | None = None,
) -> Certificate:
    """Run all layers.

    Args:
        prompts: token ids, as long as they are.
        acceptance: the rule that `audited` was given.
        subject: what the certificate says of the model and the drafter.
        pace: how long its stages may take, and who hears of them; None: as long as the settings say.

    Raises:
        ConfigError: there is no usable prompt, or no such rule.
        DrafterError: there is no drafter to be audited.
    """
    settings = settings or AuditOptions()
    started = time.perf_counter()
    target = audited.target
    if acceptance is not None:
        check_acceptance(acceptance)
    if audited.drafter is None:
        raise DrafterError(NEEDS_DRAFTER)
    if target.vocab_size < _FEWEST_TOKENS:
        raise ConfigError(f"{target.name} has {target.vocab_size} tokens; an audit needs {_FEWEST_TOKENS} or more.")
    chosen = audit_prompts(prompts, max(settings.num_prompts, 2), target.context_length, settings.max_tokens)
    num_rules = len(TRIED) * bool(settings.samples)
    sampled = SAMPLED if settings.requests else ()
    level = FAMILY_ERROR / max(1, num_rules + len(sampled))
    pace = pace or Pace(60 * settings.minutes or math.inf)
    pace.weight = 1 + len(runs(settings.num_draft_tokens)) + RULE_WEIGHT * num_rules + sum(map(engine_weight, sampled))
    layers = [bits_layer(audited, chosen[: settings.num_prompts], settings, pace)]
    if settings.samples:
        layers.append(rule_layer(target, chosen, settings.samples, settings.seed, level, acceptance, pace))
    else:
        layers.append(Layer("Rule", "Acceptance rules on cached distributions of the model.", reason="samples is 0"))
    if settings.requests:
        layers.append(engine_layer(audited, chosen, settings.requests, settings.seed, level, acceptance, pace))
    else:
        layers.append(Layer("Engine", "Real requests against exact probabilities.", reason="requests is 0"))
    return Certificate(dict(subject or {}), layers, FAMILY_ERROR, time.perf_counter() - started)


def audit_prompts(prompts: Seq[Seq[int]], count: int, context_length: int, max_tokens: int) -> list[list[int]]:
    """Cut and repeat token ids to `count` prompts. Every second one is repeated, so that drafters that copy find
    something; the last one is long, where the context permits.

    Raises:
        ConfigError: there is no prompt, or the context is too short for any.
    """
    available = context_length - max_tokens - 1
    usable = [list(prompt) for prompt in prompts if prompt]
    if not usable or available < 2:
        raise ConfigError(
            f"There are {len(usable)} prompts, and a context of {context_length} leaves {max(available, 0)} tokens for "
            f"one. Give a file with prompts, or decrease the key max_tokens."
        )
    found: list[list[int]] = []
    for number in range(count):
        prompt = usable[number % len(usable)]
        turn = number // len(usable)  # a file with few prompts: other ends of the same ones
        end = max(len(prompt) - 7 * turn, min(len(prompt), 4))
        prompt = prompt[:end][-_SHORT:]
        if number % 2 == 0:
            prompt = prompt[-_SHORT // 2 :] * 2
        found.append(prompt[-available:])
    if count > 1 and available > _LONG:
        whole = usable[(count - 1) % len(usable)]
        found[-1] = (whole * -(-_LONG // len(whole)))[-_LONG:]
    return found
