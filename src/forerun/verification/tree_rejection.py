"""Rejection sampling of trees drawn from known distributions: the tensor code around `tree_rejection_math`."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any, TypeAlias

import torch
from torch import Tensor

from forerun.sampling import draw_tokens
from forerun.types import Draft, Noise, PackedDrafts, Verdict
from forerun.verification.chain_rejection import checked_probs
from forerun.verification.chain_rejection_math import Numbers
from forerun.verification.tree_rejection_math import Accept, DrawnTree

TreeRule: TypeAlias = Callable[[DrawnTree[Any], Accept], tuple[int, Any]]


class TreeRejection:
    """Accepts a path of each drawn tree by a rule of `tree_rejection_math`, then draws one token from what is left.

    Uniform numbers are drawn as in `Rejection`: one for every node and one for the token that follows, whatever is
    decided; on chains both give the same verdicts for the same numbers.
    """

    lossless = True

    def __init__(self, rule: TreeRule) -> None:
        self.rule = rule

    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        most = max((draft.num_candidates for draft in drafts.drafts), default=0)
        uniforms = noise.uniform(len(drafts.drafts) * (most + 1)).reshape(-1, most + 1)
        paths, weights = [], []
        for draft, start, numbers in zip(drafts.drafts, drafts.offsets, uniforms.tolist(), strict=False):
            tree = drawn_tree(draft, target_logprobs[start : start + len(draft) + 1])
            row, left = self.rule(tree, _below(numbers))
            paths.append(draft.path_to(row - 1))
            weights.append(torch.as_tensor(left))
        if not paths:
            return []
        next_tokens = draw_tokens(torch.stack(weights), uniforms[:, most]).tolist()
        return [Verdict(path, token) for path, token in zip(paths, next_tokens, strict=True)]


def _below(uniforms: Seq[float]) -> Accept:
    """Return the comparison of a node's uniform number with its probability; strict, so that 0 never holds."""
    return lambda node, accept_prob: bool(uniforms[node] < accept_prob)


def drawn_tree(draft: Draft, target_logprobs: Tensor) -> DrawnTree[Any]:
    """Make the tree of a draft's candidates. target_logprobs: [n + 1, V].

    A row's distribution is computed when a rule first needs it: rules visit few rows, and of leaves the last alone.

    Raises:
        ValueError: the draft has no distributions, or distributions of another shape.
    """
    if target_logprobs.element_size() < 4:  # numpy has no bfloat16, and residuals deserve more digits
        target_logprobs = target_logprobs.float()
    n = draft.num_candidates
    children = [[node for node in below if node < n] for below in draft.children()[: n + 1]]
    probs = checked_probs(draft, target_logprobs)
    return DrawnTree(
        draft.ids,
        children,
        lambda row: _fast(target_logprobs[row].exp()),
        lambda row: _fast(probs[row]),
        draft.replacement,
    )


def _fast(row: Tensor) -> Tensor | Numbers:
    """Return a row on the CPU as a numpy array, whose operations cost half of torch's where rows are short."""
    return row.numpy() if row.device.type == "cpu" else row
