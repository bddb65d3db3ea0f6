"""How well a head agrees with its target, on answers that are there.

DraftSession: where the text is the target's greedy answer, what a greedy chain of the head would propose is known
without
drafting, because its tokens are the text's up to the first that is not, and the unrolled steps of training are those of
drafting. So walking over the text as speculation would is exact.
Overlap at temperature 1: the sum of min(target, head) at each position of a chain, along the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.train.accelerator import device_of
from forerun.train.data.packed import NO_DOCUMENT, PackedShard
from forerun.train.evaluate import expected_chains, greedy_chains
from forerun.train.heads.module import HeadModule, HeadRows, head_rows
from forerun.train.heads.run import COMPUTE, Read, TrainingTarget

CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Where the buckets of context lengths begin."""
GREEDY_SHARE = 0.97
"""Of an answer's tokens that are the target's most probable ones: from here on it counts as greedy. Near-ties may fall
otherwise in another kind of product."""
ROWS_AT_ONCE = 4
CHUNK = 128


Guess = Callable[[HeadModule, Read], list[tuple[Tensor, Tensor]]]
"""What a head predicts of the tokens after those of a text: features [J, A, F] and layers [V, F] whose products add up
to the logits of each active row at each step."""


@dataclass(slots=True)
class HeadScore:
    """What was counted, and what follows from it.

    Attributes:
        reached, accepted: of each position of the greedy chains.
        by_context: by the start of a bucket of context lengths: chains, and draft tokens that they had accepted.
        overlaps, overlapped: sum of the overlap at each position of a chain, and of how many.
        starts: chains in expectation at temperature 1. survived: the expected number of them whose draft was accepted
            up to each position.
        documents, greedy_documents: answers, and those whose chains count.
    """

    num_draft_tokens: int
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    by_context: dict[int, tuple[int, int]] = field(default_factory=dict)
    overlaps: list[float] = field(default_factory=list)
    overlapped: list[int] = field(default_factory=list)
    starts: int = 0
    survived: list[float] = field(default_factory=list)
    documents: int = 0
    greedy_documents: int = 0

    def __post_init__(self) -> None:
        for counts in (self.reached, self.accepted, self.overlaps, self.overlapped, self.survived):
            counts += [0] * (self.num_draft_tokens - len(counts))

    def add_chain(self, context: int, run: int) -> None:
        """A greedy chain after so many tokens, of which `run` were accepted."""
        for k in range(self.num_draft_tokens):
            self.reached[k] += run >= k
            self.accepted[k] += run > k
        bucket = max(begin for begin in CONTEXTS if begin <= context)
        chains, accepted = self.by_context.get(bucket, (0, 0))
        self.by_context[bucket] = (chains + 1, accepted + run)

    @property
    def per_position(self) -> list[float]:
        """Acceptance of greedy chains at each position, if it is reached."""
        return [done / max(1, of) for done, of in zip(self.accepted, self.reached, strict=True)]

    @property
    def mean_acceptance_length(self) -> float:
        """Of greedy chains, the target's token included."""
        return 1 + sum(self.accepted) / max(1, self.reached[0])

    def length_of_chains(self, num_draft_tokens: int) -> float:
        """The same of shorter chains, as far as these can tell."""
        return 1 + sum(self.accepted[:num_draft_tokens]) / max(1, self.reached[0])

    @property
    def overlap(self) -> list[float]:
        """Mean overlap at temperature 1 at each position."""
        return [total / max(1, of) for total, of in zip(self.overlaps, self.overlapped, strict=True)]

    @property
    def expected_length(self) -> float:
        """Mean acceptance length of chains drawn at temperature 1, token by token."""
        return 1 + sum(self.survived) / max(1, self.starts)

    @property
    def lengths_by_context(self) -> dict[int, float]:
        """Mean acceptance length of greedy chains by the start of a bucket of context lengths."""
        return {start: 1 + accepted / chains for start, (chains, accepted) in sorted(self.by_context.items())}

    @property
    def score(self) -> float:
        """What training is judged by: the length of greedy chains, or of drawn ones where no answer is greedy."""
        return self.mean_acceptance_length if self.reached[0] else self.expected_length


@dataclass(frozen=True, slots=True)
class _Known:
    """Some held-out rows with what does not depend on the head."""

    rows: HeadRows
    states: Tensor
    embeddings: Tensor


class HeldOut:
    """Held-out answers, with the target's states of them.

    Args:
        rows: packed rows; the first `count` of them.
        vocabulary: [V] ids of the draft vocabulary.
        guess: what the head predicts.
    """

    def __init__(
        self,
        target: TrainingTarget,
        rows: PackedShard,
        count: int,
        vocabulary: Tensor,
        num_draft_tokens: int,
        guess: Guess,
    ) -> None:
        self._target, self._vocabulary, self._k = target, vocabulary, num_draft_tokens
        self._guess = guess
        self._output = target.all_output_rows()
        self._parts = list(self._read(rows, min(count, len(rows))))

    def __bool__(self) -> bool:
        """Whether there is anything to score."""
        return bool(self._parts)

    def _read(self, rows: PackedShard, count: int) -> Iterator[_Known]:
        for start in range(0, count, ROWS_AT_ONCE):
            batch = rows.rows(list(range(start, min(count, start + ROWS_AT_ONCE))))
            laid = head_rows(batch.tokens, answers_alone(batch.wanted, batch.documents), batch.documents, self._k)
            if len(laid.active):
                states = self._target.states.of(laid.token_ids, laid.lengths)
                yield _Known(laid.to(states.device), states, self._target.embeddings(laid.token_ids))

    @torch.no_grad()
    def score(self, head: HeadModule) -> HeadScore:
        """Of a head of the same target and vocabulary."""
        found = HeadScore(self._k)
        for part in self._parts:
            matches, overlaps, greedy = self._agreement(head, part)
            _count(found, part.rows, matches.cpu(), overlaps.cpu(), greedy.cpu())
        return found

    @torch.no_grad()
    def ranks(self, head: HeadModule) -> Iterator[tuple[HeadRows, Tensor]]:
        """Rows, and [K, N] at each step and place that predicts: how many tokens the head holds more probable than the
        text's. The draft vocabulary's size where that has not the token, and -1 where there is no guess, or the text's
        token is not the target's."""
        for part in self._parts:
            rows, size = part.rows, len(part.rows.token_ids)
            ranks = torch.full((rows.steps, size), -1, dtype=torch.int64, device=part.states.device)
            for here, logits, guesses in self._guesses(head, part):
                places = rows.predictors[here]
                text = rows.token_ids[places + 1]
                is_target = logits.argmax(-1) == text
                own = self._vocabulary.to(text.device)
                is_own = own == text[:, None]
                for step, guessed in enumerate(guesses):
                    value = guessed.masked_fill(~is_own, float("-inf")).amax(-1, keepdim=True)
                    rank = torch.where(is_own.any(-1), (guessed > value).sum(-1), len(own))
                    ranks[step, places] = torch.where(rows.valid[step, here] & is_target, rank, -1)
            yield rows, ranks

    def _guesses(self, head: HeadModule, part: _Known) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
        """Some of the places that predict at a time: the target's logits, [n, V], and at each step the head's, of its
        vocabulary."""
        rows, dtype = part.rows, COMPUTE[device_of(head).type]
        read = Read(self._target, rows, part.states, part.embeddings, None)
        parts = [(features, layer.to(dtype)) for features, layer in self._guess(head, read)]
        for start in range(0, len(rows.predictors), CHUNK):
            here = slice(start, start + CHUNK)
            logits = (part.states[rows.predictors[here], -1].to(dtype) @ self._output.T).float()
            guesses = []
            for step in range(rows.steps):
                chosen = rows.rows[step, here]
                every = [F.linear(features[step, chosen].to(dtype), layer).float() for features, layer in parts]
                guesses.append(torch.stack(every).sum(0))
            yield here, logits, guesses

    def _agreement(self, head: HeadModule, part: _Known) -> tuple[Tensor, Tensor, Tensor]:
        """At each step and place that predicts, [K, N]: the head's most probable token is the text's; overlap, NaN
        where there is none. And [N], whether the text's token is the target's most probable one."""
        where, rows = device_of(head), part.rows
        vocabulary = self._vocabulary.to(where)
        size = len(rows.token_ids)
        matches = torch.zeros(rows.steps, size, dtype=torch.bool, device=where)
        overlaps = torch.full((rows.steps, size), float("nan"), device=where)
        greedy = torch.zeros(size, dtype=torch.bool, device=where)
        for here, logits, guesses in self._guesses(head, part):
            places = rows.predictors[here]
            text = rows.token_ids[places + 1]
            greedy[places] = logits.argmax(-1) == text
            wanted = torch.softmax(logits, -1)[:, vocabulary]
            for step, guessed in enumerate(guesses):
                valid = rows.valid[step, here]
                matches[step, places] = (vocabulary[guessed.argmax(-1)] == text) & valid
                common = torch.minimum(wanted, torch.softmax(guessed, -1)).sum(-1)
                overlaps[step, places] = torch.where(valid, common, float("nan"))
        return matches, overlaps, greedy


def answers_alone(wanted: Tensor, documents: Tensor) -> Tensor:
    """Of what is wanted, the run at the end of each document: its answer, without positions of the prompt."""
    used = documents != NO_DOCUMENT
    same = torch.zeros_like(wanted)
    same[:, :-1] = (documents[:, 1:] == documents[:, :-1]) & used[:, :-1]
    result = wanted & used
    for place in range(wanted.shape[1] - 2, -1, -1):
        result[:, place] &= ~same[:, place] | result[:, place + 1]
    return result


def _count(found: HeadScore, rows: HeadRows, matches: Tensor, overlaps: Tensor, greedy: Tensor) -> None:
    """Add some documents."""
    for step in range(found.num_draft_tokens):
        there = ~overlaps[step].isnan()
        found.overlaps[step] += float(overlaps[step][there].sum())
        found.overlapped[step] += int(there.sum())
    wanted = torch.zeros(len(rows.token_ids), dtype=torch.bool)
    wanted[rows.predictors.cpu()] = True
    start = 0
    for length in rows.lengths:
        places = wanted[start : start + length].nonzero().flatten()
        if len(places) > 1:
            found.documents += 1
            # the target gives an answer's first token; the first chain is of the row that reads it
            first, last = start + int(places[0]), start + int(places[-1])
            here = slice(first + 1, last + 1)
            starts, survived = expected_chains(overlaps[:, here])
            found.starts += starts
            found.survived = [a + b for a, b in zip(found.survived, survived, strict=True)]
            if float(greedy[first : last + 1].float().mean()) >= GREEDY_SHARE:
                found.greedy_documents += 1
                for at, run in greedy_chains(matches[:, here], last - first + 1):
                    found.add_chain(first + at + 2 - start, run)
        start += length


def shown(values: Sequence[float]) -> str:
    """Numbers of a table's cell."""
    return " ".join(f"{value:.3f}" for value in values)
