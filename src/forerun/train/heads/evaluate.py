"""Measurement of a head's agreement with its target on given answers.

Greedy chains: where the text is the target's greedy answer, the greedy chain of the head is known without drafting,
because its tokens are the text's up to the first that differs, and the unrolled steps of training are those of
drafting. So stepping over the text as speculation would is exact.
Overlap at temperature 1: the sum of min(target, head) at each position of a chain, along the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from forerun.train.accelerator import device_of
from forerun.train.data.packed import NO_DOCUMENT, PackedShard
from forerun.train.evaluate import accepted_chains, expected_chains
from forerun.train.heads.module import HeadModule, HeadRows, head_rows
from forerun.train.heads.target_states import HeadInputs, TrainingTarget
from forerun.train.loop import StageProgress

CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Where the buckets of context lengths begin."""
GREEDY_SHARE = 0.97
"""Smallest share of tokens that are the target's most probable ones of an answer that counts as greedy. Near-ties may
be decided differently by another kind of product."""
ROWS_AT_ONCE = 4
CHUNK = 128
LogitParts = list[tuple[Tensor, Tensor]]
"""A head's predictions: features [J, A, F] and layers [V, F] whose products add up to the logits of each active row at
each step."""


@dataclass(slots=True)
class HeadScore:
    """The counts of an evaluation, and the rates that follow from them.

    Attributes:
        reached, accepted: of each position of the greedy chains.
        by_context: by the start of a bucket of context lengths: chains, and draft tokens that they had accepted.
        overlaps, overlapped: sum of the overlap at each position of a chain, and of how many.
        starts: chains in expectation at temperature 1. survived: the expected number of them whose draft was accepted
            up to each position.
        documents, greedy_documents: answers, and those whose chains count.
        frequencies: of the answers' tokens.
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
    frequencies: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for counts in (self.reached, self.accepted, self.overlaps, self.overlapped, self.survived):
            counts += [0] * (self.num_draft_tokens - len(counts))

    def add_chain(self, context: int, run: int) -> None:
        """Count a greedy chain of which `run` tokens were accepted. context: tokens before it."""
        for k in range(self.num_draft_tokens):
            self.reached[k] += run >= k
            self.accepted[k] += run > k
        bucket = max(begin for begin in CONTEXTS if begin <= context)
        chains, accepted = self.by_context.get(bucket, (0, 0))
        self.by_context[bucket] = (chains + 1, accepted + run)

    @property
    def is_judged(self) -> bool:
        """Return whether there was any chain to count."""
        return self.reached[0] > 0 or self.starts > 0

    @property
    def first(self) -> float:
        """Return the acceptance of a chain's first token: of greedy chains, of drawn ones where no answer is greedy."""
        return self.per_position[0] if self.reached[0] else self.drawn_per_position[0]

    @property
    def constant(self) -> float:
        """Return the share of the most frequent token: what always proposing that one would get."""
        return max(self.frequencies.values(), default=0) / max(1, self.frequencies.total())

    @property
    def is_chance(self) -> bool:
        """Return whether always proposing the most frequent token would do as well."""
        return self.is_judged and self.first <= self.constant

    @property
    def per_position(self) -> list[float]:
        """Return the acceptance of greedy chains at each position, if it is reached."""
        return [done / max(1, of) for done, of in zip(self.accepted, self.reached, strict=True)]

    @property
    def mean_acceptance_length(self) -> float:
        """Return the mean length of chains, the target's token included (`length_of_chains`)."""
        return self.length_of_chains(self.num_draft_tokens)

    def length_of_chains(self, num_draft_tokens: int) -> float:
        """Return the mean acceptance length of chains of so many draft tokens, estimated from the longer ones.

        They are greedy, or drawn at temperature 1 where no answer is greedy.
        """
        counts, of = (self.accepted, self.reached[0]) if self.reached[0] else (self.survived, self.starts)
        return 1 + sum(counts[:num_draft_tokens]) / max(1, of)

    @property
    def overlap(self) -> list[float]:
        """Return the mean overlap at temperature 1 at each position."""
        return [total / max(1, of) for total, of in zip(self.overlaps, self.overlapped, strict=True)]

    @property
    def drawn_per_position(self) -> list[float]:
        """Return the acceptance of chains drawn at temperature 1 at each position, if it is reached; empty without."""
        pairs = zip(self.survived, [self.starts, *self.survived], strict=False)
        return [kept / max(1e-9, of) for kept, of in pairs] if self.starts else []

    @property
    def expected_length(self) -> float:
        """Return the mean acceptance length of chains drawn at temperature 1, token by token."""
        return 1 + sum(self.survived) / max(1, self.starts)

    @property
    def lengths_by_context(self) -> dict[int, float]:
        """Return the mean acceptance length of greedy chains by the start of a bucket of context lengths."""
        return {start: 1 + accepted / chains for start, (chains, accepted) in sorted(self.by_context.items())}

    @property
    def score(self) -> float:
        """Return the score of a run: the length of greedy chains, or of drawn ones where no answer is greedy."""
        return self.mean_acceptance_length


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """Rows with what the target says of them.

    Attributes:
        states: [N, layers, hidden] of all tokens (`HeadInputs`).
        likeliest: [N] the target's most probable token after each predicting position.
        mass: [N] its probability of the whole draft vocabulary there.
    """

    rows: HeadRows
    states: Tensor
    likeliest: Tensor
    mass: Tensor


class HeldOut:
    """Held-out answers, with what the target says of them.

    Args:
        rows: packed rows; the first `count` of them.
        vocabulary: [V] ids of the draft vocabulary.
        predict: computes the head's predictions (`HeadKind.predict`).
        console: for progress; None without.
        is_kept: the target's states are computed once; otherwise whenever they are read, which takes no memory.
    """

    def __init__(
        self,
        target: TrainingTarget,
        rows: PackedShard,
        count: int,
        vocabulary: Tensor,
        num_draft_tokens: int,
        predict: Callable[[Any, HeadInputs], LogitParts],
        console: Console | None = None,
        *,
        is_kept: bool = True,
    ) -> None:
        self._target = target
        self._vocabulary = vocabulary
        self._k = num_draft_tokens
        self._predict = predict
        self._console = console or Console(quiet=True)
        self._laid = list(self._laid_out(rows, min(count, len(rows))))
        self._kept = list(self._read()) if is_kept else None

    def __bool__(self) -> bool:
        """Return whether there is anything to score."""
        return bool(self._laid)

    def _laid_out(self, rows: PackedShard, count: int) -> Iterator[HeadRows]:
        for start in range(0, count, ROWS_AT_ONCE):
            batch = rows.rows(list(range(start, min(count, start + ROWS_AT_ONCE))))
            laid = head_rows(batch.tokens, answers_alone(batch.wanted, batch.documents), batch.documents, self._k)
            if len(laid.active):
                yield laid

    def _read(self) -> Iterator[JudgedRows]:
        with StageProgress(self._console, "reading held-out answers", len(self._laid)) as progress:
            for done, rows in enumerate(self._laid, 1):
                num_logits = _after_first(rows)
                judged = self._target.states.judged(rows.token_ids, rows.lengths, num_logits, self._vocabulary)
                yield JudgedRows(rows.to(judged[0].device), *judged)
                progress.show(done)

    def _parts(self) -> Iterator[tuple[JudgedRows, HeadInputs]]:
        for part in self._read() if self._kept is None else self._kept:
            embeddings = self._target.embeddings(part.rows.token_ids)
            yield part, HeadInputs(self._target, part.rows, part.states, embeddings)

    @torch.no_grad()
    def score(self, head: HeadModule) -> HeadScore:
        """Measure a head of the same target and vocabulary."""
        found = HeadScore(self._k)
        for part, inputs in self._parts():
            matches, overlaps, greedy = self._agreement(head, part, inputs)
            _count(found, part.rows, matches.cpu(), overlaps.cpu(), greedy.cpu())
        return found

    @torch.no_grad()
    def ranks(self, head: HeadModule) -> Iterator[tuple[HeadRows, Tensor]]:
        """Rank the text's tokens among the head's predictions.

        Yields:
            Rows, and [K, N] at each step and predicting position: how many tokens are more probable to the head than
            the text's. The draft vocabulary's size where it lacks the token, and -1 where nothing is predicted, or the
            text's token is not the target's.
        """
        for part, inputs in self._parts():
            rows = part.rows
            size = len(part.rows.token_ids)
            ranks = torch.full((rows.steps, size), -1, dtype=torch.int64, device=part.states.device)
            for here, predictions in self._predictions(head, inputs):
                positions = rows.predictors[here]
                text = rows.token_ids[positions + 1]
                is_target = part.likeliest[positions] == text
                own = self._vocabulary.to(text.device)
                is_own = own == text[:, None]
                for step, drafted in enumerate(predictions):
                    value = drafted.masked_fill(~is_own, float("-inf")).amax(-1, keepdim=True)
                    rank = torch.where(is_own.any(-1), (drafted > value).sum(-1), len(own))
                    ranks[step, positions] = torch.where(rows.valid[step, here] & is_target, rank, -1)
            yield rows, ranks

    def _predictions(self, head: HeadModule, inputs: HeadInputs) -> Iterator[tuple[slice, list[Tensor]]]:
        """Compute the head's logits [n, V] of each step at some of the predicting positions at a time."""
        rows = inputs.rows
        dtype = self._target.dtype
        parts = [(features, layer.to(dtype)) for features, layer in self._predict(head, inputs)]
        for start in range(0, len(rows.predictors), CHUNK):
            here = slice(start, start + CHUNK)
            predictions = []
            for step in range(rows.steps):
                chosen = rows.rows[step, here]
                every = [F.linear(features[step, chosen].to(dtype), layer).float() for features, layer in parts]
                predictions.append(torch.stack(every).sum(0))
            yield here, predictions

    def _agreement(self, head: HeadModule, part: JudgedRows, inputs: HeadInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Compare head, text and target.

        Returns:
            At each step and predicting position, [K, N]: whether the head's most probable token is the text's; the
            overlap, NaN where there is none. And [N], whether the text's token is the target's most probable one.
        """
        where = device_of(head)
        rows = part.rows
        vocabulary = self._vocabulary.to(where)
        size = len(rows.token_ids)
        matches = torch.zeros(rows.steps, size, dtype=torch.bool, device=where)
        overlaps = torch.full((rows.steps, size), float("nan"), device=where)
        greedy = torch.zeros(size, dtype=torch.bool, device=where)
        output = self._target.output_rows
        for here, predictions in self._predictions(head, inputs):
            positions = rows.predictors[here]
            text = rows.token_ids[positions + 1]
            greedy[positions] = part.likeliest[positions] == text
            logits = (part.states[positions, -1].to(output.dtype) @ output.T).float()
            wanted = torch.softmax(logits, -1) * part.mass[positions, None]
            for step, drafted in enumerate(predictions):
                valid = rows.valid[step, here]
                matches[step, positions] = (vocabulary[drafted.argmax(-1)] == text) & valid
                common = torch.minimum(wanted, torch.softmax(drafted, -1)).sum(-1)
                overlaps[step, positions] = torch.where(valid, common, float("nan"))
        return matches, overlaps, greedy


def _after_first(rows: HeadRows) -> list[int]:
    """Count the tokens of each document from its first predicting position on."""
    ends = torch.tensor(rows.lengths).cumsum(0)
    found = [0] * len(rows.lengths)
    of = torch.searchsorted(ends, rows.predictors, right=True).tolist()
    for document, position in zip(reversed(of), reversed(rows.predictors.tolist()), strict=True):
        found[document] = int(ends[document]) - position
    return found


def answers_alone(wanted: Tensor, documents: Tensor) -> Tensor:
    """Keep of the wanted tokens the run at the end of each document: its answer, without positions of the prompt."""
    used = documents != NO_DOCUMENT
    same = torch.zeros_like(wanted)
    same[:, :-1] = (documents[:, 1:] == documents[:, :-1]) & used[:, :-1]
    result = wanted & used
    for position in range(wanted.shape[1] - 2, -1, -1):
        result[:, position] &= ~same[:, position] | result[:, position + 1]
    return result


def _count(found: HeadScore, rows: HeadRows, matches: Tensor, overlaps: Tensor, greedy: Tensor) -> None:
    """Add the counts of some documents."""
    found.frequencies.update(rows.token_ids[rows.predictors + 1].tolist())
    for step in range(found.num_draft_tokens):
        there = ~overlaps[step].isnan()
        found.overlaps[step] += float(overlaps[step][there].sum())
        found.overlapped[step] += int(there.sum())
    wanted = torch.zeros(len(rows.token_ids), dtype=torch.bool)
    wanted[rows.predictors.cpu()] = True
    start = 0
    for length in rows.lengths:
        positions = wanted[start : start + length].nonzero().flatten()
        if len(positions) > 1:
            found.documents += 1
            # the target gives an answer's first token; the first chain is of the row that reads it
            first = start + int(positions[0])
            last = start + int(positions[-1])
            here = slice(first + 1, last + 1)
            starts, survived = expected_chains(overlaps[:, here])
            found.starts += starts
            found.survived = [a + b for a, b in zip(found.survived, survived, strict=True)]
            if float(greedy[first : last + 1].float().mean()) >= GREEDY_SHARE:
                found.greedy_documents += 1
                for at, run in accepted_chains(matches[:, here], last - first + 1):
                    found.add_chain(first + at + 2 - start, run)
        start += length


def cell_text(values: Sequence[float]) -> str:
    """Format numbers for a table's cell."""
    return " ".join(f"{value:.3f}" for value in values)
