"""Nine faults of speculative decoding, planted one at a time, which an audit must find. None of them is in the package.

Each takes a `pytest.MonkeyPatch` and the fake target, and breaks one thing as it has been broken elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import FakeCache, FakeModel
from forerun.engine import text as text_module
from forerun.engine.sequence import SequenceStep
from forerun.engine.verifying import Verifying
from forerun.lab.audit.settings import AuditOptions, quick
from forerun.models import Forward
from forerun.sampling import LogitsRow, draw_tokens, noise as seeded_noise
from forerun.types import Noise, PackedDrafts, Verdict
from forerun.verification import VERIFIERS
from forerun.verification.chain_rejection import Rejection, checked_probs
from forerun.verification.chain_rejection_math import BLOCK, TOKEN

Fault = Callable[[pytest.MonkeyPatch, Any], None]


class Accepting:
    """Token-level rejection that accepts with the target's probability alone, not its ratio to the draft's."""

    lossless = True

    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        verdicts = []
        target = target_logprobs.exp()
        for draft, start in zip(drafts.drafts, drafts.offsets):
            probs = checked_probs(draft, target)
            uniforms = noise.uniform(len(draft) + 1)
            path: list[int] = []
            while len(path) < len(draft) and uniforms[len(path)] <= target[start + len(path), draft.ids[len(path)]]:
                path.append(len(path))
            weights = target[start + len(path)]
            if len(path) < len(draft):
                left = (weights - probs[len(path)]).clamp(min=0)
                weights = left if left.sum() > 0 else weights
            verdicts.append(Verdict(path, int(draw_tokens(weights[None], uniforms[-1:])[0])))
        return verdicts


class FirstRow(Rejection):
    """Recovers from what is left at the first row, wherever the chain ended."""

    def weigh(self, drafts: PackedDrafts, target: Tensor) -> Any:
        accept_probs, left, masses = super().weigh(drafts, target)
        wrong = left.clone()
        for draft, start in zip(drafts.drafts, drafts.offsets):
            if left[start].sum() > 0:
                wrong[start : start + len(draft)] = left[start]
        return accept_probs, wrong, masses


class AtZero(Rejection):
    """Accepts where a uniform number equals the chance: at 0, a token that cannot come."""

    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        target = target_logprobs.exp()
        accept_probs, left, masses = self.weigh(drafts, target)
        verdicts = []
        for draft, start, each in zip(drafts.drafts, drafts.offsets, accept_probs):
            uniforms = noise.uniform(len(draft) + 1)
            length = self.rule.length([float(number) <= accept_prob for number, accept_prob in zip(uniforms, each)])
            row = start + length
            weights = left[row] if masses[row] > 0 else target[row]
            verdicts.append(Verdict(list(range(length)), int(draw_tokens(weights[None], uniforms[-1:])[0])))
        return verdicts


def _rules(patch: pytest.MonkeyPatch, block: Any, token: Any) -> None:
    patch.setitem(VERIFIERS, "block", block)  # type: ignore[arg-type]
    patch.setitem(VERIFIERS, "token", token)  # type: ignore[arg-type]


def accepted_by_the_target_alone(patch: pytest.MonkeyPatch, target: Any) -> None:
    _rules(patch, Accepting(), Accepting())


def residual_from_the_wrong_row(patch: pytest.MonkeyPatch, target: Any) -> None:
    _rules(patch, FirstRow(BLOCK), FirstRow(TOKEN))


def bonus_from_unprocessed_logits(patch: pytest.MonkeyPatch, target: Any) -> None:
    verify = Verifying._verify_drawn

    def broken(self: Any, work: Seq[SequenceStep], logits: Tensor) -> None:
        verify(self, work, logits)
        at = 0
        for item in work:
            assert item.draft is not None and item.verdict is not None
            at += len(item.draft) + 1
            if len(item.draft) and len(item.verdict.path) == len(item.draft) and item.draft.is_chain:
                uniform = torch.rand(1, dtype=torch.float64, generator=self._generator)
                token = int(draw_tokens(logits[at - 1 : at].softmax(-1), uniform)[0])
                item.verdict = replace(item.verdict, next_token=token)

    patch.setattr(Verifying, "_verify_drawn", broken)


def penalties_without_the_drafted_path(patch: pytest.MonkeyPatch, target: Any) -> None:
    rows = SequenceStep.logits_rows
    patch.setattr(SequenceStep, "logits_rows", lambda self: [LogitsRow(row.sequence) for row in rows(self)])


def a_row_that_is_not_rolled_back(patch: pytest.MonkeyPatch, target: Any) -> None:
    """The last committed position keeps what a rejected row has written."""
    if isinstance(target, FakeModel):
        commit = FakeCache.commit

        def broken(self: Any, path: Seq[int]) -> None:
            written = list(self.scratch.ids)
            commit(self, path)
            if path and path[-1] + 1 < len(written):
                self.tokens[-1] = written[path[-1] + 1]

        patch.setattr(FakeCache, "commit", broken)
        return
    from forerun.kv_cache.sequence_cache import SequenceCache

    commit = SequenceCache.commit

    def keep(self: Any, path: Seq[int]) -> None:
        path = list(path)
        if path and path[-1] > 0 and path[-1] + 1 < self.num_scratch:
            path[-1] += 1
        commit(self, path)

    patch.setattr(SequenceCache, "commit", keep)


def a_product_order_that_depends_on_k(patch: pytest.MonkeyPatch, target: Any) -> None:
    """The last bits of a forward of many rows are others."""
    kind = type(target)
    forward = kind.forward

    def broken(self: Any, batch: Any, layers: Any = ()) -> Forward:
        result = forward(self, batch, layers)
        if self is not target or max(len(rows.token_ids) for rows in batch) < 3:
            return result
        return Forward(result.logits * (1 + 2**-20), result.hidden_outputs)

    patch.setattr(kind, "forward", broken)


def noise_shared_by_two_positions(patch: pytest.MonkeyPatch, target: Any) -> None:
    keys = seeded_noise._keys_of

    def broken(*args: Any) -> Any:
        return [None if key is None else key._replace(position=key.position // 2) for key in keys(*args)]

    patch.setattr(seeded_noise, "_keys_of", broken)


def a_stop_string_cut_at_the_block(patch: pytest.MonkeyPatch, target: Any) -> None:
    """The tokens of a block that holds a stop string are all kept."""
    push = text_module.TextStream.push

    def broken(self: Any, ids: Any, num_exempt: int = 0) -> int | None:
        return None if push(self, ids, num_exempt) is None else len(ids)

    patch.setattr(text_module.TextStream, "push", broken)


def a_token_of_no_chance_at_zero(patch: pytest.MonkeyPatch, target: Any) -> None:
    _rules(patch, AtZero(BLOCK), AtZero(TOKEN))


FAULTS: Mapping[str, tuple[Fault, str]] = {
    "u <= p instead of p/q": (accepted_by_the_target_alone, "Rule"),
    "residual from the wrong row": (residual_from_the_wrong_row, "Rule"),
    "bonus from unprocessed logits": (bonus_from_unprocessed_logits, "Engine"),
    "penalties without the drafted path": (penalties_without_the_drafted_path, "Bits"),
    "a row that is not rolled back": (a_row_that_is_not_rolled_back, "Bits"),
    "a product order that depends on K": (a_product_order_that_depends_on_k, "Bits"),
    "noise shared by two positions": (noise_shared_by_two_positions, "Engine"),
    "a stop string cut at the block": (a_stop_string_cut_at_the_block, "Bits"),
    "a token of no chance at u = 0": (a_token_of_no_chance_at_zero, "Rule"),
}
"""Name -> the fault, and the layer that must find it."""


def sizes_for(layer: str) -> AuditOptions:
    """At which an audit finds the layer's faults: the default number of requests for the layer Engine, whose tests see
    too little of a fault in a quick audit's; else a quick audit's sizes, without that layer."""
    settings = quick(AuditOptions())
    if layer == "Engine":
        return replace(settings, requests=AuditOptions().requests, samples=0)
    return replace(settings, requests=0)
