"""From a step's logits to its verdicts: distributions are made only where more than the argmax decides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence as Seq

import torch
from torch import Tensor

from forerun.config import EngineConfig
from forerun.engine.work import Work
from forerun.models import LanguageModel
from forerun.sampling import DeadRows, LogitsPipeline, LogitsRow, StepNoise, non_finite_rows, row_argmax
from forerun.types import PackedDrafts
from forerun.verification import rule_for, verify_step, walk_tokens


class Verifying:
    """The sampling pipeline, the noise and the rules of one engine."""

    def __init__(self, target: LanguageModel, config: EngineConfig) -> None:
        self._acceptance = config.acceptance
        self.pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
        self._generator = torch.Generator()
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)

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
        tokens: list[int] = row_argmax(logits).tolist()
        for row in non_finite_rows(logits, tokens):
            _mark(work, packed, row)
        if any(item.state.sequence.constraint is not None for item in work):
            tokens = row_argmax(self._adjusted(work, packed, logits, self.pipeline.adjust)).tolist()
        for item, verdict in zip(work, walk_tokens(packed, tokens), strict=True):
            item.verdict = verdict

    def _verify_drawn(self, work: Seq[Work], logits: Tensor) -> None:
        drafts = [item.draft for item in work if item.draft is not None]
        packed = PackedDrafts.of(drafts)
        bad = non_finite_rows(logits)
        if bad:  # any distribution will do in their place: a request whose verdict comes by one of them ends
            for row in bad:
                _mark(work, packed, row)
            logits = logits.index_fill(0, torch.tensor(bad, device=logits.device), 0.0)
        logprobs = self._adjusted(work, packed, logits, self.pipeline.process)
        rules = [
            rule_for(item.state.sequence.params, draft, self._acceptance)
            for item, draft in zip(work, drafts, strict=True)
        ]
        noise = StepNoise(self._generator, [item.state.sequence for item in work], packed, logits.device)
        for item, verdict in zip(work, verify_step(packed, logprobs, rules, noise), strict=True):
            item.verdict = verdict

    def _adjusted(
        self,
        work: Seq[Work],
        packed: PackedDrafts,
        logits: Tensor,
        adjust: Callable[[Tensor, Seq[LogitsRow], DeadRows], Tensor],
    ) -> Tensor:
        """What `adjust` makes of the logits; rows whose grammar leaves no token are marked."""
        dead: DeadRows = {}
        logits = adjust(logits, [row for item in work for row in item.logits_rows()], dead)
        for row, error in dead.items():
            _mark(work, packed, row, error)
        return logits


def _mark(work: Seq[Work], packed: PackedDrafts, row: int, error: Exception | None = None) -> None:
    """Note for its sequence that a row is bad, or that its grammar leaves no token. row: of the packed drafts."""
    index = bisect_right(packed.offsets, row) - 1
    item, own = work[index], row - packed.offsets[index]
    if error is None:
        item.bad_rows |= {own}
    else:
        item.dead_rows = {**item.dead_rows, own: error}
