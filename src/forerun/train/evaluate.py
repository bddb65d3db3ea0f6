"""Measurement of a model and a pair on held-out code: bits per byte, perplexity, acceptance.

Acceptance is read from one forward of the draft over the target's own continuations. At temperature 0
that is exact: the draft's greedy chain and the target's text are the same tokens until the first
disagreement. At temperature 1 it is the expected acceptance of token-level rejection along that text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.train.accelerator import model_vocabulary
from forerun.train.data.packed import NO_DOCUMENT, PackedShard
from forerun.train.draft.parallel import MaskLayout, mask_token_of

_LOGITS = 1 << 17
"""Logits of prompts of one position that are computed at once, at most: of 32 prompts where there are 4,096 tokens."""


@dataclass(frozen=True, slots=True)
class TopProbs:
    """The target's most probable tokens at every position, [B, T, k], most probable first.

    `ids` uint16 or uint32, `probabilities` float16; row t is the distribution of token t + 1. The tail is left out: it
    holds a few hundredths of the mass, which a small draft cannot learn.
    """

    ids: np.ndarray
    probabilities: np.ndarray


def document_mask(documents: Tensor) -> Tensor:
    """Return the mask of attention within documents: each position sees itself and those before it in its document.

    documents: [B, T]; returns bool [B, 1, T, T], as Transformers takes it for attention_mask.
    """
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def behind_first(documents: Tensor) -> Tensor:
    """Return which positions stand behind the first of their documents, bool [B, T].

    The first one's state is larger than all others by orders of magnitude in many models. documents: [B, T].
    """
    found = documents != NO_DOCUMENT
    found[:, 0] = False
    found[:, 1:] &= documents[:, 1:] == documents[:, :-1]
    return found


def packed_inputs(model: PreTrainedModel, tokens: Tensor, documents: Tensor) -> dict[str, Any]:
    """Return what a model is fed to compute packed rows as if each of their documents were alone.

    tokens: int64 [B, T]. documents: [B, T].
    """
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    places = torch.arange(tokens.shape[1], device=tokens.device)
    positions = places - (places * begins).cummax(1).values
    mask = seen_by(model, document_mask(documents), positions)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


def masked_inputs(
    model: PreTrainedModel, layout: MaskLayout, tokens: Tensor, documents: Tensor, mask_token: int
) -> dict[str, Any]:
    """Return what a model is fed to compute packed rows with mask tokens. Arguments as those of `MaskLayout.inputs`."""
    inputs = layout.inputs(tokens, documents, mask_token)
    return inputs | {"attention_mask": seen_by(model, inputs["attention_mask"], inputs["position_ids"])}


def seen_by(model: PreTrainedModel, mask: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
    """Return a mask of attention as a model takes it: within the window of those layers that have one.

    mask: bool [B, 1, N, N]. positions: [B, N].

    Raises:
        ConfigError: the rows are longer than the window of a model that has layers of further kinds.
    """

    def taken(each: Tensor) -> Tensor:
        if model.config._attn_implementation != "eager":
            return each
        least = torch.finfo(torch.float32).min  # it adds masks
        return torch.zeros(each.shape, device=each.device).masked_fill(~each, least)

    window = getattr(model.config, "sliding_window", None)
    if window is None or window >= mask.shape[-1]:
        return taken(mask)
    near = taken(mask & (positions[:, None, :, None] - positions[:, None, None, :] < window))
    masks = {"full_attention": taken(mask), "sliding_attention": near}
    kinds = getattr(model.config, "layer_types", None)
    if kinds is None:  # all layers have it
        return near
    if masks.keys() >= {*kinds}:
        return masks
    raise ConfigError(
        f"A draft of type {model.config.model_type!r} has layers with a window of {window} tokens beside others than "
        "of attention: it cannot be trained on longer rows. Give a smaller window of rows, or another start."
    )


def next_tokens(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Select one token a row from logits [B, V]: the most probable at temperature 0, otherwise drawn."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    distribution = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(distribution, 1, generator=generator).squeeze(-1)


@torch.inference_mode()
def write_on(model: PreTrainedModel, prompts: Tensor, new_tokens: int, temperature: float, seed: int) -> Tensor:
    """Continue prompts [B, P] by `new_tokens` tokens each, without distributions: [B, P + new_tokens]."""
    generator = torch.Generator(device=prompts.device).manual_seed(seed)
    cache = DynamicCache()
    tokens = [prompts]
    fed = prompts
    for _ in range(new_tokens):
        logits = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        fed = next_tokens(logits[:, -1], temperature, generator).unsqueeze(1)
        tokens.append(fed)
    return torch.cat(tokens, dim=1)


@dataclass(frozen=True, slots=True)
class TextScore:
    """How well a model predicts text; `perplexity` is per token, so it depends on the tokenizer."""

    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HeldOutAcceptance:
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


def most_frequent_share(rows: PackedShard, count: int) -> float:
    """Return the share of the most frequent token among the wanted ones of the first rows; 0 without any."""
    batch = rows.rows(list(range(min(len(rows), count)))) if len(rows) else None
    counts = torch.zeros(1) if batch is None else batch.tokens[batch.wanted].bincount()
    return float(counts.max() / counts.sum().clamp(min=1))


def is_chance(acceptance: Sequence[HeldOutAcceptance], constant: float) -> bool:
    """Return whether always proposing one token, which gets this share, would be accepted as often at temperature 0."""
    return any(row.temperature == 0 and row.per_position[0] <= constant for row in acceptance)


@torch.inference_mode()
def text_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    window: int = 1024,
) -> TextScore:
    """Score every byte of `texts` in windows of `window` tokens, each with half a window of context."""
    nats = 0.0
    tokens = 0
    size = 0
    for text in texts:
        ids = [int(tokenizer.eos_token_id), *tokenizer(text, verbose=False)["input_ids"]]
        nats += _document_nats(model, torch.tensor([ids], device=model.device), window)
        tokens += len(ids) - 1
        size += len(text.encode("utf-8"))
    return TextScore(nats / math.log(2) / max(size, 1), math.exp(nats / max(tokens, 1)), tokens, size)


def _document_nats(model: PreTrainedModel, ids: Tensor, window: int) -> float:
    """Sum over tokens 1.. of -log probability, each token scored once; ids [1, T]."""
    total = 0.0
    scored = 1
    while scored < ids.shape[1]:
        start = max(0, scored - window // 2) if scored > 1 else 0
        piece = ids[:, start : start + window + 1]
        logits = model(input_ids=piece[:, :-1], use_cache=False).logits[0].float()
        losses = F.cross_entropy(logits, piece[0, 1:], reduction="none")
        total += float(losses[scored - start - 1 :].sum())
        scored = start + piece.shape[1]
    return total


def accepted_chains(matches: Tensor, length: int) -> Iterator[tuple[int, int]]:
    """Step over one text as speculation would: yield where each chain starts, and how many of its tokens are accepted.

    Chains that would run over the end are not counted, since their tokens have no counterpart.

    Args:
        matches: bool [K, T], whether the k-th token of a draft is the text's; column c at row k belongs to the chain
            that starts at c - k.
        length: where the text ends.
    """
    rows = matches.tolist()
    at = 0
    while at + len(rows) < length:
        run = next((k for k, row in enumerate(rows) if not row[at + k]), len(rows))
        yield at, run
        at += run + 1


def expected_chains(overlaps: Tensor) -> tuple[int, list[float]]:
    """Return the number of starts of chains, and the expected number of chains that survive each position.

    overlaps: float [K, T] in [0, 1], as `matches` of `accepted_chains`.
    """
    count, length = overlaps.shape
    starts = max(0, length - count)
    alive = torch.ones(starts)
    survived = []
    for k in range(count):
        alive = alive * overlaps[k, k : k + starts]
        survived.append(float(alive.sum()))
    return starts, survived


def output_rows(draft: PreTrainedModel, tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the output layer, of these tokens alone; None: of all."""
    head = draft.get_output_embeddings()
    if tokens is None:
        return head.weight, head.bias
    chosen = tokens.to(head.weight.device)
    return head.weight[chosen], None if head.bias is None else head.bias[chosen]


def drafted_logits(
    draft: PreTrainedModel,
    tokens: Tensor,
    documents: Tensor | None,
    num_tokens: int,
    first: int = 0,
    outputs: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the logits of the 1st, 2nd, ... token of the chains that start at each position from `first` on, [B, S, V].

    A draft that drafts token by token has only the first of them: in its chains those of any other token are the same.

    Args:
        tokens: int64 [B, T]. documents: [B, T]; None: each row is one.
        outputs: int64 [V], of which tokens there are logits, of a draft of the Llama family; None: of all.
    """
    mask_token = mask_token_of(draft)
    weight, bias = output_rows(draft, outputs)
    if mask_token is None:
        inputs = {"input_ids": tokens} if documents is None else packed_inputs(draft, tokens, documents)
        if outputs is None:  # a family may do more to its logits than one product
            yield draft(**inputs, use_cache=False).logits[:, first:].float()
            return
        states = draft.base_model(**inputs, use_cache=False).last_hidden_state[:, first:]
        yield F.linear(states, weight, bias).float()
        return
    layout = MaskLayout.whole(tokens, first, num_tokens)
    documents = torch.zeros_like(tokens) if documents is None else documents
    inputs = masked_inputs(draft, layout, tokens, documents, mask_token)
    hidden = draft.base_model(**inputs, use_cache=False).last_hidden_state[:, first:]
    for part in hidden.split(tokens.shape[1] - first, 1):
        yield F.linear(part, weight, bias).float()


def agreement_of(drafted: Iterable[Tensor], wanted: Tensor, text: Tensor, temperature: float) -> Tensor:
    """Return how far chains agree with the target's rows: [B, 1, S], or [B, K, S] with a row for each of their tokens,
    as `accepted_chains` has them.

    Args:
        drafted: as `drafted_logits` gives them.
        wanted: [B, S, V], the target's logits. text: [B, S], what counts as the target's tokens at temperature 0.
    """
    found = []
    for place, logits in enumerate(drafted):
        there = logits[:, : logits.shape[1] - place, : wanted.shape[-1]]
        if temperature == 0:
            agreed = (there.argmax(-1) == text[:, place:]).float()
        else:
            probs = (torch.softmax(each / temperature, dim=-1) for each in (wanted[:, place:], there))
            agreed = torch.minimum(*probs).sum(-1)
        found.append(F.pad(agreed, (place, 0)))
    return torch.stack(found, 1)


def acceptance_of(agreement: Sequence[Tensor], temperature: float, num_draft_tokens: int) -> list[HeldOutAcceptance]:
    """Aggregate the agreement in some texts, each float32 [T] or as of `agreement_of`; nothing where no draft fits
    them."""
    steps = 0
    accepted = torch.zeros(num_draft_tokens, dtype=torch.float64)
    for row in agreement:
        each = row.expand(num_draft_tokens, -1)
        if temperature == 0:
            runs = [run for _, run in accepted_chains(each > 0.5, each.shape[1])]
            steps += len(runs)
            accepted += torch.tensor([sum(run > k for run in runs) for k in range(num_draft_tokens)])
        else:
            starts, survived = expected_chains(each)
            steps += starts
            accepted += torch.tensor(survived, dtype=torch.float64)
    if not steps:
        return []
    rows = [row.view(-1, row.shape[-1]) for row in agreement]
    drafted = torch.cat([each[k:] for row in rows for k, each in enumerate(row)])  # what lies before is padding
    counts = accepted.tolist()
    found = HeldOutAcceptance(
        temperature=temperature,
        num_draft_tokens=num_draft_tokens,
        per_token=float(drafted.mean()),
        rate=sum(counts) / (steps * num_draft_tokens),
        per_position=[a / max(r, 1e-9) for a, r in zip(counts, [steps, *counts], strict=False)],
        mean_acceptance_length=1 + sum(counts) / steps,
        tokens=sum(row.shape[-1] for row in rows),
    )
    return [found]


@torch.inference_mode()
def held_out_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    num_draft_tokens: int = 4,
    new_tokens: int = 128,
    seed: int = 0,
) -> list[HeldOutAcceptance]:
    """Measure acceptance on the target's own continuations of `prompts` (token ids), at temperature 0 or above."""
    rows: list[Tensor] = []
    size = max(1, min(32, _LOGITS // model_vocabulary(target)))
    for batch in batches_of_one_length(prompts, size):
        tokens = write_on(target, batch.to(target.device), new_tokens, temperature, seed)
        first = batch.shape[1] - 1
        wanted = target(input_ids=tokens[:, :-1], use_cache=False).logits[:, first:].float()
        drafted = drafted_logits(draft, tokens[:, :-1], None, num_draft_tokens, first)
        # The text itself, not a second argmax: a batched forward may break a near-tie the other way.
        agreed = agreement_of(drafted, wanted, tokens[:, first + 1 :], temperature)
        lengths = lengths_to_end(tokens[:, first + 1 :], target.config.eos_token_id)
        rows.extend(row[:, :length] for row, length in zip(agreed.cpu(), lengths, strict=True))
    return acceptance_of(rows, temperature, num_draft_tokens)


def lengths_to_end(tokens: Tensor, end_token: int | list[int] | None) -> list[int]:
    """Count the tokens of each row of [B, T] up to the first end-of-text token, that one included."""
    ends = torch.tensor([-1] if end_token is None else end_token, device=tokens.device).view(-1)
    is_end = torch.isin(tokens, ends)
    before = torch.cumsum(is_end, dim=1) - is_end.long()
    return (before == 0).sum(dim=1).tolist()


def batches_of_one_length(prompts: Sequence[Sequence[int]], size: int = 32, grain: int = 64) -> list[Tensor]:
    """Cut prompts at the front to a multiple of `grain` tokens and batch those of the same length."""
    groups: dict[int, list[Sequence[int]]] = {}
    for prompt in prompts:
        length = max(len(prompt) // grain * grain, min(len(prompt), grain))
        groups.setdefault(length, []).append(prompt[-length:])
    return [
        torch.tensor(group[start : start + size])
        for _, group in sorted(groups.items())
        for start in range(0, len(group), size)
    ]
