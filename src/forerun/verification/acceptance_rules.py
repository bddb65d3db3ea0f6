"""The acceptance rules by name, the choice of a rule for a request, and the verification of a step by several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.errors import ConfigError
from forerun.types import Draft, Noise, PackedDrafts, Verdict, Verifier
from forerun.verification.chain_rejection import Rejection
from forerun.verification.chain_rejection_math import BLOCK, TOKEN
from forerun.verification.greedy_and_seeded import Coupled, SampleAndMatch
from forerun.verification.lossy import Threshold, in_top_k, in_top_p, typical
from forerun.verification.tree_rejection import TreeRejection
from forerun.verification.tree_rejection_math import multi_step, traversal

VERIFIERS: Mapping[str, Verifier] = {
    "walk": SampleAndMatch(),
    "token": Rejection(TOKEN),
    "block": Rejection(BLOCK),
    "multi-step": TreeRejection(multi_step),
    "traversal": TreeRejection(traversal),
    "coupled": Coupled(),
    "typical": Threshold(typical),
    "top-k": Threshold(in_top_k),
    "top-p": Threshold(in_top_p),
}
_OF_CHAINS: Mapping[str, str] = {"traversal": "block", "multi-step": "token"}
"""The rule that gives the same verdicts on chains, with all chains of a step computed together."""
_OF_TREES: Mapping[str, str] = {same: name for name, same in _OF_CHAINS.items()}


def rule_for(params: SamplingParams, draft: Draft, acceptance: str | None = None) -> str:
    """Return the name of the rule that verifies this draft of this request.

    Greedy requests get walk and requests with a seed coupled, whatever rule is named: both promise a text that depends
    on the target alone. Drafts without distributions allow no rejection, and get walk.

    Args:
        acceptance: the named rule; None takes the lossless one that fits: block for drawn chains,
            traversal for drawn trees, walk for all else. Block on a tree is traversal and token multi-step,
            and the other way round on a chain.

    Raises:
        ConfigError: no rule has that name.
    """
    if acceptance is not None:
        check_acceptance(acceptance)
    if params.greedy:
        return "walk"
    if params.seed is not None:
        return "coupled"
    rule = acceptance or "block"
    if rule in _OF_CHAINS or rule in _OF_TREES:
        if draft.probs is None:
            return "walk"
        return (_OF_CHAINS if draft.is_chain else _OF_TREES).get(rule, rule)
    # Without a seed nothing is keyed, and coupled is the walk with the generator's noise.
    return "walk" if rule == "coupled" else rule


def check_acceptance(acceptance: str) -> None:
    """Raise ConfigError, with the names there are, if no rule has this name."""
    if acceptance not in VERIFIERS:
        lossy = ", ".join(name for name, each in VERIFIERS.items() if not each.lossless)
        names = ", ".join(name for name, each in VERIFIERS.items() if each.lossless)
        raise ConfigError(
            f"acceptance is {acceptance!r}, but must be one of {names} (exact), or {lossy} (which change the "
            "text's distribution). Leave it out for the exact rule that fits each request."
        )


def verify_step(packed: PackedDrafts, logprobs: Tensor, rules: Seq[str], noise: Noise) -> list[Verdict]:
    """Verify one step's drafts, the sequences of each rule together.

    Args:
        packed: the drafts of B sequences.
        logprobs: [rows, V] log-probabilities of the target's processed distributions.
        rules: [B] names in VERIFIERS.
        noise: of this step, in the packed order of the rows.
    """
    groups: dict[str, list[int]] = {}
    for index, rule in enumerate(rules):
        groups.setdefault(rule, []).append(index)
    if len(groups) == 1:
        return VERIFIERS[rules[0]].verify(packed, logprobs, noise)
    verdicts: dict[int, Verdict] = {}
    for rule, members in groups.items():
        rows = [row for index in members for row in range(packed.offsets[index], packed.offsets[index + 1])]
        part = PackedDrafts.of([packed.drafts[index] for index in members])
        part_logprobs = logprobs[torch.tensor(rows, device=logprobs.device)]
        part_verdicts = VERIFIERS[rule].verify(part, part_logprobs, _NoiseOfRows(noise, rows))
        verdicts.update(zip(members, part_verdicts, strict=True))
    return [verdicts[index] for index in range(len(rules))]


class _NoiseOfRows:
    """The step's noise for some of its rows, numbered from 0."""

    def __init__(self, noise: Noise, rows: Seq[int]) -> None:
        self._noise = noise
        self._rows = rows

    def uniform(self, size: int) -> Tensor:
        return self._noise.uniform(size)

    def gumbel(self, rows: Seq[int], vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
        return self._noise.gumbel([self._rows[row] for row in rows], vocab_size, token_ids)
