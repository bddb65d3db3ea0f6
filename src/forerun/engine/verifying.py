"""The verification of a step's logits: verdicts, or errors where no token can be chosen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence as Seq
from functools import cached_property

import torch
from torch import Tensor

from forerun import verification
from forerun.config import EngineConfig
from forerun.engine.sequence import SequenceStep
from forerun.models import LanguageModel
from forerun.models.model import first_non_finite_tensor
from forerun.sampling import DeadRows, LogitsPipeline, LogitsRow, StepNoise, non_finite_rows, row_argmax
from forerun.types import PackedDrafts


class Verifying:
    """Verifies drafts with the sampling pipeline, the noise and the acceptance rules of one engine.

    Distributions are computed only where more than the argmax decides.
    """

    def __init__(self, target: LanguageModel, config: EngineConfig) -> None:
        self._target = target
        self._acceptance = config.acceptance
        self.pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
        self._generator = torch.Generator()
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)

    def verify(self, work: Seq[SequenceStep], logits: Tensor) -> None:
        """Set the verdict of every sequence; keep the logits that log-probabilities are taken from.

        logits: [rows, V] of the step, in the order of `work`.
        """
        greedy: list[SequenceStep] = []
        drawn: list[SequenceStep] = []
        greedy_rows: list[int] = []
        drawn_rows: list[int] = []
        at = 0
        for item in work:
            state = item.state
            end = at + item.num_logits
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

    @cached_property
    def non_finite_message(self) -> str:
        """Explain why logits are NaN or infinite. The weights are searched once, after the first such row."""
        tensor = first_non_finite_tensor(self._target)
        cause = "No such number was found in its weights. "
        is_narrow = self._target.dtype.itemsize < 4
        cause += "A wider number format may help: dtype='float32'." if is_narrow else "Its files may be damaged."
        if tensor is not None:
            cause = f"Its weights hold such numbers, first in {tensor}. Get them anew, or another model."
        return (
            f"{self._target.name} computed logits that are NaN or infinite, from which no token can be chosen. {cause}"
        )

    def _verify_greedy(self, work: Seq[SequenceStep], logits: Tensor) -> None:
        packed = PackedDrafts.of([item.draft for item in work if item.draft is not None])
        tokens: list[int] = row_argmax(logits).tolist()
        for row in non_finite_rows(logits, tokens):
            _mark(work, packed, row)
        if any(item.state.sequence.constraint is not None for item in work):
            tokens = row_argmax(self._adjusted(work, packed, logits, self.pipeline.adjust)).tolist()
        for item, verdict in zip(work, verification.match_sampled_tokens(packed, tokens), strict=True):
            item.verdict = verdict

    def _verify_drawn(self, work: Seq[SequenceStep], logits: Tensor) -> None:
        drafts = [item.draft for item in work if item.draft is not None]
        packed = PackedDrafts.of(drafts)
        bad = non_finite_rows(logits)
        if bad:  # replaced by any distribution: a request whose verdict depends on one of them ends
            for row in bad:
                _mark(work, packed, row)
            logits = logits.index_fill(0, torch.tensor(bad, device=logits.device), 0.0)
        logprobs = self._adjusted(work, packed, logits, self.pipeline.process)
        rules = [
            verification.rule_for(item.state.sequence.params, draft, self._acceptance)
            for item, draft in zip(work, drafts, strict=True)
        ]
        noise = StepNoise(self._generator, [item.state.sequence for item in work], packed, logits.device)
        for item, verdict in zip(work, verification.verify_step(packed, logprobs, rules, noise), strict=True):
            item.verdict = verdict

    def _adjusted(
        self,
        work: Seq[SequenceStep],
        packed: PackedDrafts,
        logits: Tensor,
        adjust: Callable[[Tensor, Seq[LogitsRow], DeadRows], Tensor],
    ) -> Tensor:
        """Return the logits as `adjust` changes them, and mark rows whose grammar leaves no token."""
        dead: DeadRows = {}
        logits = adjust(logits, [row for item in work for row in item.logits_rows()], dead)
        for row, error in dead.items():
            _mark(work, packed, row, error)
        return logits


def _mark(work: Seq[SequenceStep], packed: PackedDrafts, row: int, error: Exception | None = None) -> None:
    """Note for its sequence that a row is bad, or that its grammar leaves no token. row: of the packed drafts."""
    index = bisect_right(packed.offsets, row) - 1
    item = work[index]
    own = row - packed.offsets[index]
    if error is None:
        item.bad_rows |= {own}
    else:
        item.dead_rows = {**item.dead_rows, own: error}
