"""The sizes of an audit, and the options of its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.lab.audit.statistics import Numbers
from forerun.utils.fields import Checked, option

FAMILY_ERROR = 1e-4
"""The probability that an audit of a lossless engine fails, whatever the number of its tests."""

QUICK_MINUTES = 2.5
"""After which a quick audit begins nothing more; what has begun takes some seconds."""
NEEDS_DRAFTER = "An audit compares speculation with plain decoding, so it needs a drafter: --drafter NAME."


@dataclass(frozen=True, slots=True)
class AuditOptions(Checked):
    """Sizes of the layers, and the seed of everything drawn. The grid of options is the same at every size."""

    samples: int = option(100_000, "Samples of each acceptance rule (Rule); 0 leaves the layer out.", low=0, high=10**7)
    requests: int = option(
        8_000, "Requests answered with speculation (Engine), all tests together; 0 leaves the layer out.", low=0
    )
    num_prompts: int = option(8, "Prompts on which plain and speculative answers are compared (Bits).", low=1)
    max_tokens: int = option(40, "Tokens of each of those answers.", low=8)
    num_draft_tokens: int = option(8, "The largest K of the grid.", low=1, high=64)
    seed: int = option(0, "Seed of everything that the audit draws: the same seed, the same verdict.", low=0)
    minutes: float = option(0.0, "Time to spend, loading included; 0 leaves it open. What it cuts is told.", low=0)


def quick(settings: AuditOptions) -> AuditOptions:
    """Limit the sizes, so that the same grid takes half a minute on the bundled pair, and the time of larger models."""
    return replace(
        settings,
        samples=min(settings.samples, 8_000),
        requests=min(settings.requests, 1_600),
        num_prompts=min(settings.num_prompts, 2),
        max_tokens=min(settings.max_tokens, 20),
        minutes=settings.minutes or QUICK_MINUTES,
    )


# Options are made for each prompt from the model's own answer, so that stops fall into accepted blocks, and biases and
# penalties change tokens.

Options = dict[str, Any]
"""Fields of SamplingParams."""

PENALTIES: Mapping[str, float] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
FILTERS: Mapping[str, float] = {"temperature": 0.8, "top_k": 8, "top_p": 0.95}


def bit_options(token_ids: Seq[int], text: str) -> dict[str, Options]:
    """Return, by name, the options under which plain and speculative answers to one prompt are compared.

    Args:
        token_ids: the greedy answer of plain decoding without options, at least one token.
        text: of that answer; empty without a tokenizer.
    """
    middle = text[len(text) // 2 :][:4]  # across the border of two tokens more often than not
    late = token_ids[(2 * len(token_ids)) // 3]
    bias = {token_ids[0]: -2.0, token_ids[len(token_ids) // 2]: -6.0}
    stops: Options = {"stop": [middle]} if middle.strip() else {"stop_token_ids": [late]}
    return {
        "no options": {"temperature": 0.0, "logprobs": 2},
        "penalties": {"temperature": 0.0, "logprobs": 0, **PENALTIES},
        "stops": {"temperature": 0.0, **stops},
        "stop token": {"temperature": 0.0, "stop_token_ids": [late], "min_tokens": 3, "logprobs": 0},
        "bias": {"temperature": 0.0, "logprobs": 2, "logit_bias": bias},
        "seeded": {"temperature": 1.0, "logprobs": 0, "seed": 1},
        "seeded, two choices, filters": {**FILTERS, "seed": 2, "n": 2},
        "seeded, penalties, stops": {"temperature": 0.9, "logprobs": 2, "seed": 3, **PENALTIES, **stops},
    }


@dataclass(frozen=True, slots=True)
class Sampled:
    """A test of the engine's samples.

    Attributes:
        name: in reports.
        options: made of the distribution [V] of the first token after a prompt, without options.
        is_seeded: each request has a seed of its own.
        is_drawn: drafts are the audit's own, drawn from known distributions.
    """

    name: str
    options: Callable[[Numbers], Options]
    is_seeded: bool = False
    is_drawn: bool = False


def _bias_and_stop(probabilities: Numbers) -> Options:
    first, second, third = (int(token) for token in np.argsort(-probabilities, kind="stable")[:3])
    return {"logit_bias": {first: -1.5, third: 1.0}, "stop_token_ids": [second], "min_tokens": 1, "logprobs": 1}


def _two_tokens(probabilities: Numbers) -> Options:
    first, second = (int(token) for token in np.argsort(-probabilities, kind="stable")[:2])
    return {"temperature": 2.0, "logit_bias": {first: 60.0, second: 60.0}}


SAMPLED: Seq[Sampled] = (
    Sampled("no options", lambda _: {}),
    Sampled("filters", lambda _: dict(FILTERS)),
    Sampled("penalties", lambda _: {"temperature": 0.9, **PENALTIES}),
    Sampled("bias, stop token, log-probabilities", _bias_and_stop),
    Sampled("seeded", lambda _: {}, is_seeded=True),
    Sampled("seeded, penalties", lambda _: dict(PENALTIES), is_seeded=True),
    # the same two tokens are candidates everywhere, so that noise which two positions share shows in what follows what
    Sampled("seeded, two tokens", _two_tokens, is_seeded=True),
    Sampled("drawn drafts", lambda _: {}, is_drawn=True),
    Sampled("drawn drafts, filters, penalties", lambda _: {**FILTERS, **PENALTIES}, is_drawn=True),
)
"""The grid of the Engine layer."""
