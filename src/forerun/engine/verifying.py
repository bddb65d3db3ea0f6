"""From a step's logits to its verdicts: distributions are made only where more than the argmax decides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from forerun.config import EngineConfig, SamplingParams
from forerun.engine.drafting import Drafting
from forerun.engine.work import Work
from forerun.models import LanguageModel
from forerun.sampling import DeadRows, LogitsPipeline, StepNoise, non_finite_rows, row_argmax
from forerun.types import PackedDrafts, Sequence, Verdict
from forerun.verify import UnsoundProbsError, greedy_verdicts, rule_for, verify_step


class Verifying:
    """The sampling pipeline, the noise and the rules of one engine."""

    def __init__(self, target: LanguageModel, config: EngineConfig, drafting: Drafting) -> None:
        self._acceptance, self._drafting = config.acceptance, drafting
        self._pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
        self._generator = torch.Generator()
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)

    def argmax_suffices(self, params: SamplingParams) -> bool:
        """Whether the argmax decides, of the raw logits or of those that the grammar allows."""
        return self._pipeline.takes_argmax(params)

    def start(self, sequence: Sequence) -> None:
        """A sequence enters."""
        self._pipeline.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        """A sequence leaves."""
        self._pipeline.stop(sequence)

    def verify(self, work: Seq[Work], logits: Tensor) -> None:
        """Set every verdict; keep the logits that log-probabilities will be taken from."""
        greedy: list[Work] = []
        drawn: list[Work] = []
        greedy_rows: list[int] = []
        drawn_rows: list[int] = []
        at = 0
        for item in work:
            state, end = item.state, at + item.num_logits
            if state.logprobs is not None or state.prompt_logprobs is not None:
                item.logits = logits[at:end]
            if item.draft is not None:
                items, rows = (greedy, greedy_rows) if state.argmax_suffices else (drawn, drawn_rows)
                items.append(item)
                rows.extend(range(at + item.num_extra, end))
            at = end
        if greedy:
            self._verify_greedy(greedy, logits if len(greedy_rows) == at else logits[greedy_rows])
        if drawn:
            self._verify_drawn(drawn, logits if len(drawn_rows) == at else logits[drawn_rows])

    def _verify_greedy(self, work: Seq[Work], logits: Tensor) -> None:
        packed = PackedDrafts.of([item.draft for item in work if item.draft is not None])
        if any(item.state.sequence.constraint is not None for item in work):
            _mark(work, packed, non_finite_rows(logits))
            dead: DeadRows = {}
            logits = self._pipeline.adjust(logits, [row for item in work for row in item.logits_rows()], dead)
            _mark_dead(work, packed, dead)
            _settle(work, greedy_verdicts(packed, row_argmax(logits).tolist()))
            return
        tokens: list[int] = row_argmax(logits).tolist()
        _settle(work, greedy_verdicts(packed, tokens))
        _mark(work, packed, non_finite_rows(logits, tokens))

    def _verify_drawn(self, work: Seq[Work], logits: Tensor) -> None:
        drafts = [item.draft for item in work if item.draft is not None]
        packed = PackedDrafts.of(drafts)
        bad = non_finite_rows(logits)
        if bad:  # any distribution will do in their place: a request whose verdict comes by one of them ends
            _mark(work, packed, bad)
            logits = logits.index_fill(0, torch.tensor(bad, device=logits.device), 0.0)
        dead: DeadRows = {}
        logprobs = self._pipeline.process(logits, [row for item in work for row in item.logits_rows()], dead)
        _mark_dead(work, packed, dead)
        rules = [
            rule_for(item.state.sequence.params, draft, self._acceptance)
            for item, draft in zip(work, drafts, strict=True)
        ]
        noise = StepNoise(self._generator, [item.state.sequence for item in work], packed, logits.device)
        try:
            _settle(work, verify_step(packed, logprobs, rules, noise))
        except UnsoundProbsError as error:
            raise self._drafting.error(error) from None


def _mark(work: Seq[Work], packed: PackedDrafts, bad_rows: Seq[int]) -> None:
    """Note for each sequence which of its rows are bad. bad_rows: among all rows of the packed drafts."""
    for row in bad_rows:
        index = bisect_right(packed.offsets, row) - 1
        work[index].bad_rows |= {row - packed.offsets[index]}


def _mark_dead(work: Seq[Work], packed: PackedDrafts, dead: DeadRows) -> None:
    """The same of rows whose grammar leaves no token."""
    for row, error in dead.items():
        index = bisect_right(packed.offsets, row) - 1
        work[index].dead_rows = {**work[index].dead_rows, row - packed.offsets[index]: error}


def _settle(work: Seq[Work], verdicts: Seq[Verdict]) -> None:
    for item, verdict in zip(work, verdicts, strict=True):
        item.verdict = verdict
