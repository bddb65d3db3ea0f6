"""Measurements of a model and a pair on held-out code: bits per byte, perplexity, acceptance.

Acceptance is read from one forward of the draft over the target's own continuations. At temperature 0
that is exact: the draft's greedy chain and the target's text are the same tokens until the first
disagreement. At temperature 1 it is the expected acceptance of token-level rejection along that text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.train import attention
from forerun.train.continuations import write_on
from forerun.train.token_ids import model_vocabulary

_LOGITS = 1 << 17
"""Logits of prompts of one position that are computed at once, at most: of 32 prompts where there are 4,096 tokens."""


@dataclass(frozen=True, slots=True)
class TextScore:
    """How well a model predicts text; `perplexity` is per token, so it depends on the tokenizer."""

    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Agreement of a draft with its target; `rate` is accepted over drafted at `num_draft_tokens`.

    `per_token` is the mean acceptance of one draft token, `per_position` the probability that the
    draft token at each position of the chain is accepted, given that it is reached.
    """

    temperature: float
    num_draft_tokens: int
    per_token: float
    rate: float
    per_position: list[float]
    mean_acceptance_length: float
    tokens: int


@torch.inference_mode()
def text_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    window: int = 1024,
    max_tokens: int | None = None,
) -> TextScore:
    """Score every byte of `texts` in windows of `window` tokens, each with half a window of context.

    `max_tokens` stops early, at a text's end.
    """
    attention.use_for(model, window)
    nats, tokens, size = 0.0, 0, 0
    for text in texts:
        ids = [int(tokenizer.eos_token_id), *tokenizer(text, verbose=False)["input_ids"]]
        nats += _document_nats(model, torch.tensor([ids], device=model.device), window)
        tokens += len(ids) - 1
        size += len(text.encode("utf-8"))
        if max_tokens is not None and tokens >= max_tokens:
            break
    return TextScore(nats / math.log(2) / max(size, 1), math.exp(nats / max(tokens, 1)), tokens, size)


def _document_nats(model: PreTrainedModel, ids: Tensor, window: int) -> float:
    """Sum over tokens 1.. of -log probability, each token scored once; ids [1, T]."""
    total, scored = 0.0, 1
    while scored < ids.shape[1]:
        start = max(0, scored - window // 2) if scored > 1 else 0
        piece = ids[:, start : start + window + 1]
        logits = model(input_ids=piece[:, :-1], use_cache=False).logits[0].float()
        losses = F.cross_entropy(logits, piece[0, 1:], reduction="none")
        total += float(losses[scored - start - 1 :].sum())
        scored = start + piece.shape[1]
    return total


def greedy_chains(matches: Tensor, num_draft_tokens: int) -> tuple[int, list[int], list[int], int]:
    """Walk one text as speculation would: matches bool [T], whether the draft guesses token t.

    Returns (steps, reached per position, accepted per position, tokens covered). Chains that would
    run over the end of the text are not counted, since nothing tells what they would have met.
    """
    reached, accepted = [0] * num_draft_tokens, [0] * num_draft_tokens
    at, steps = 0, 0
    values = matches.tolist()
    while at + num_draft_tokens < len(values):
        steps += 1
        run = 0
        for position in range(num_draft_tokens):
            reached[position] += 1
            if not values[at + position]:
                break
            accepted[position] += 1
            run += 1
        at += run + 1
    return steps, reached, accepted, at


def expected_chains(overlaps: Tensor, num_draft_tokens: int) -> tuple[float, list[float], list[float]]:
    """The same in expectation, averaged over every start: overlaps float [T] in [0, 1].

    Returns (steps, reached per position, accepted per position).
    """
    starts = max(0, len(overlaps) - num_draft_tokens)
    alive = torch.ones(starts)
    reached, accepted = [], []
    for position in range(num_draft_tokens):
        reached.append(float(alive.sum()))
        alive = alive * overlaps[position : position + starts]
        accepted.append(float(alive.sum()))
    return float(starts), reached, accepted


@torch.inference_mode()
def acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    num_draft_tokens: int = 4,
    new_tokens: int = 128,
    seed: int = 0,
) -> Acceptance:
    """Acceptance on the target's own continuations of `prompts` (token ids), at temperature 0 or above."""
    rows = _agreements(target, draft, prompts, temperature, new_tokens, seed)
    return acceptance_of(rows, temperature, num_draft_tokens)


def acceptance_of(agreement: Sequence[Tensor], temperature: float, num_draft_tokens: int) -> Acceptance:
    """From the acceptance of each position of some texts, float32 [T] each."""
    steps = 0.0
    reached, accepted = [0.0] * num_draft_tokens, [0.0] * num_draft_tokens
    for row in agreement:
        if temperature == 0:
            count, was_reached, was_accepted, _ = greedy_chains(row > 0.5, num_draft_tokens)
        else:
            count, was_reached, was_accepted = expected_chains(row, num_draft_tokens)  # type: ignore[assignment]
        steps += count
        reached = [a + b for a, b in zip(reached, was_reached, strict=True)]
        accepted = [a + b for a, b in zip(accepted, was_accepted, strict=True)]
    everything = torch.cat([*agreement, torch.zeros(0)])
    return Acceptance(
        temperature=temperature,
        num_draft_tokens=num_draft_tokens,
        per_token=float(everything.sum()) / max(1, len(everything)),
        rate=sum(accepted) / max(steps * num_draft_tokens, 1),
        per_position=[a / max(r, 1e-9) for a, r in zip(accepted, reached, strict=True)],
        mean_acceptance_length=1 + sum(accepted) / max(steps, 1),
        tokens=len(everything),
    )


def _agreements(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    new_tokens: int,
    seed: int,
) -> list[Tensor]:
    """Per prompt, the acceptance of each position of the continuation up to its end of text: float32 [T]."""
    rows: list[Tensor] = []
    size = max(1, min(32, _LOGITS // model_vocabulary(target)))
    for batch in batches_of_one_length(prompts, size):
        tokens = write_on(target, batch.to(target.device), new_tokens, temperature, seed)
        first = batch.shape[1] - 1
        wanted = target(input_ids=tokens[:, :-1], use_cache=False).logits[:, first:].float()
        guessed = draft(input_ids=tokens[:, :-1], use_cache=False).logits[:, first:, : wanted.shape[-1]].float()
        if temperature == 0:
            # The text itself, not a second argmax: a batched forward may break a near-tie the other way.
            agreed = (guessed.argmax(-1) == tokens[:, first + 1 :]).float()
        else:
            probs = (torch.softmax(logits / temperature, dim=-1) for logits in (wanted, guessed))
            agreed = torch.minimum(*probs).sum(-1)
        lengths = lengths_to_end(tokens[:, first + 1 :], target.config.eos_token_id)
        rows.extend(row[:length] for row, length in zip(agreed.cpu(), lengths, strict=True))
    return rows


def lengths_to_end(tokens: Tensor, end_token: int | list[int] | None) -> list[int]:
    """How many tokens of each row of [B, T] come up to the first end-of-text token, that one included."""
    ends = torch.tensor([-1] if end_token is None else end_token, device=tokens.device).view(-1)
    is_end = torch.isin(tokens, ends)
    before = torch.cumsum(is_end, dim=1) - is_end.long()
    return (before == 0).sum(dim=1).tolist()


def batches_of_one_length(prompts: Sequence[Sequence[int]], size: int = 32, grain: int = 64) -> list[Tensor]:
    """Prompts cut at the front to a multiple of `grain` tokens and batched with those of the same length."""
    groups: dict[int, list[Sequence[int]]] = {}
    for prompt in prompts:
        length = max(len(prompt) // grain * grain, min(len(prompt), grain))
        groups.setdefault(length, []).append(prompt[-length:])
    return [
        torch.tensor(group[start : start + size])
        for _, group in sorted(groups.items())
        for start in range(0, len(group), size)
    ]
