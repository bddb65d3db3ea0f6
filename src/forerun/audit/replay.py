"""Near-ties told from bugs, where a model is not exact: a teacher-forced replay of what both runs agree on.

Rows of an inexact model differ in their last bits with what is computed beside them. How far they differ is measured:
each row of the replay alone, and all of them together. Then a difference between two runs is a near-tie if logits
within that distance of the replay's explain it: they could have made the other token the chosen one, and every
log-probability that was reported before lies within the distance too. Everything else is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.engine import Choice
from forerun.models import LanguageModel, Rows
from forerun.sampling import LogitsPipeline, LogitsRow, NoiseKey, keyed_gumbel, row_argmax
from forerun.types import Sequence

MARGIN = 4.0
"""Times the measured distance that is still explained by rounding: few rows are replayed, and others differ more."""
_ULPS = 16
"""Units in the last place of float32 at the largest logit: the least that is explained."""


@dataclass(frozen=True, slots=True)
class Explained:
    """What a replay says of two runs that part.

    Attributes:
        near_tie: rounding explains it.
        gap: how far apart the logits must be moved for the other token, in units of the tolerance; infinite if no
            token parts, and a log-probability is too far off.
        tolerance: of a logit.
    """

    near_tie: bool
    tolerance: float
    reason: str


def explain(target: LanguageModel, prompt: Seq[int], params: SamplingParams, plain: Choice, other: Choice) -> Explained:
    """Whether rounding explains that `other` differs from `plain`, two answers to the same request."""
    common = _common(plain.token_ids, other.token_ids)
    tokens = [*prompt, *plain.token_ids[:common]]
    alone, together = _replayed(target, tokens, len(prompt))
    spread = float((alone - together).abs().max())
    tolerance = max(MARGIN * spread, _ULPS * torch.finfo(torch.float32).eps * float(alone.abs().max()))
    for choice in (plain, other):
        if choice.logprobs is None:
            continue
        logprobs = alone.double().log_softmax(-1)
        for place, entry in enumerate(choice.logprobs[:common]):
            error = abs(entry.logprob - float(logprobs[place, entry.token_id]))
            if not error <= 2 * tolerance:
                return Explained(
                    False,
                    tolerance,
                    f"the log-probability of token {place} is off by {error:.2g}, where rounding explains "
                    f"{2 * tolerance:.2g}",
                )
    if common == min(len(plain.token_ids), len(other.token_ids)):
        if len(plain.token_ids) != len(other.token_ids) or plain.text != other.text:
            return Explained(False, tolerance, "the tokens agree, but the answers end differently")
        return Explained(True, tolerance, "log-probabilities within rounding")
    sequence = Sequence(0, tokens, len(prompt), params, choice=plain.index)
    wanted = other.token_ids[common]
    for row in (alone[common], together[common]):
        moved = row - tolerance
        moved[wanted] += 2 * tolerance
        if _chosen(target, moved, sequence) == wanted:
            return Explained(True, tolerance, "logits within rounding choose the other token")
    return Explained(
        False, tolerance, f"at token {common} no logits within rounding ({tolerance:.2g}) choose the other token"
    )


@torch.inference_mode()
def _replayed(target: LanguageModel, tokens: Seq[int], num_prompt: int) -> tuple[Tensor, Tensor]:
    """[n + 1, V] logits that follow the prompt and each token after it: each row alone, and all together."""
    cache = target.new_cache()
    try:
        start = num_prompt - 1
        if start:
            target.forward([Rows(cache, tokens[:start], num_logits=0)])
            cache.commit(range(start))
        together = target.forward([Rows(cache, tokens[start:])]).logits.clone()
        cache.drop()
        rows = []
        for token in tokens[start:]:
            rows.append(target.forward([Rows(cache, [token])]).logits[0].clone())
            cache.commit([0])
        return torch.stack(rows), together
    finally:
        cache.free()


def _chosen(target: LanguageModel, logits: Tensor, sequence: Sequence) -> int:
    """The token that a greedy or seeded request takes from these logits."""
    pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
    logprobs = pipeline.process(logits[None], [LogitsRow(sequence)])
    seed = sequence.params.seed
    if not sequence.params.greedy and seed is not None:
        key = NoiseKey(seed, sequence.choice, len(sequence.token_ids))
        logprobs = keyed_gumbel([key], logprobs.shape[-1]).to(logprobs.device) + logprobs
    return int(row_argmax(logprobs)[0])


def _common(first: Seq[int], second: Seq[int]) -> int:
    """How many tokens two answers have in common from the start."""
    return next(
        (place for place, (one, two) in enumerate(zip(first, second, strict=False)) if one != two),
        min(len(first), len(second)),
    )
