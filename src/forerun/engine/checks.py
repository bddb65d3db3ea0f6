"""Requests that cannot be served are refused here, before they take a place in the queue."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from forerun.config import SamplingParams
from forerun.errors import PromptError, SamplingError
from forerun.models import Model


def check_request(prompt: Seq[int], params: SamplingParams, target: Model, tokenizer: Any) -> None:
    """Raise PromptError or SamplingError if the target cannot serve this; both name value, reason and remedy."""
    if len(prompt) == 0:
        raise PromptError("The prompt is empty: there is nothing to continue. Give at least one token.")
    if len(prompt) >= target.context_length:
        raise PromptError(
            f"The prompt has {len(prompt)} tokens, but the context of {target.name} holds {target.context_length}, "
            "and at least one place is needed for the answer. Shorten the prompt."
        )
    vocab_size = target.vocab_size
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(i for i, token_id in enumerate(prompt) if not 0 <= token_id < vocab_size)
        raise PromptError(
            f"Token {prompt[bad]} at place {bad} of the prompt is outside the vocabulary of {target.name}, "
            f"0..{vocab_size - 1}. Was it made by another model's tokenizer?"
        )
    for name, token_ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise SamplingError(
                    f"{name} names token {token_id}, but the vocabulary of {target.name} is 0..{vocab_size - 1}. "
                    "Leave it out."
                )
    if params.stop and tokenizer is None:
        raise SamplingError(
            f"stop is {list(params.stop)!r}, but {target.name} has no tokenizer, so there is no text to search. "
            "Use stop_token_ids."
        )
