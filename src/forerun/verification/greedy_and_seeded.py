"""Verification that samples a token of the target for every row and matches it with the draft: exact for any draft.

One token is sampled for every row beforehand; from the root, descend while a child holds the row's token.
The token of the last row is the recovered or bonus token. Greedy decoding takes each row's argmax, a request with a
seed argmax(logprob + keyed noise).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.cpu import paced_threads
from forerun.sampling import draw_tokens, row_argmax
from forerun.types import Noise, PackedDrafts, Verdict

_CHUNK = 2**16
"""Noise values held at once: fresh pages for larger arrays cost more than the values."""
_SPARSE = 4
"""Noise is made for the tokens of positive probability alone where the vocabulary has this many times as many."""


def match_sampled_tokens(packed: PackedDrafts, row_tokens: Tensor | Seq[int]) -> list[Verdict]:
    """Match each draft with sampled tokens, from the root down. row_tokens: [rows] int64, the token of each row.

    Of siblings that hold the same token the lowest index is taken. Probes are never entered.
    """
    drawn = row_tokens.tolist() if isinstance(row_tokens, Tensor) else row_tokens
    verdicts = []
    for draft, offset in zip(packed.drafts, packed.offsets, strict=False):
        path: list[int] = []
        node = -1
        if len(draft):
            tokens, parents = draft.ids, draft.parents
            for index in range(draft.num_candidates):
                if parents[index] == node and tokens[index] == drawn[offset + node + 1]:
                    path.append(index)
                    node = index
        verdicts.append(Verdict(path, drawn[offset + node + 1]))
    return verdicts


class SampleAndMatch:
    """Samples tokens with fresh noise."""

    lossless = True

    @paced_threads()
    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        uniforms = noise.uniform(len(target_logprobs))
        return match_sampled_tokens(drafts, draw_tokens(target_logprobs.exp(), uniforms))


class Coupled:
    """Samples tokens with noise keyed by seed, choice and position, which the drafter may share.

    Gumbel coupling (Daliri, Musco, Suresh, 2408.07978): the output depends on the noise and the target
    alone; a drafter that takes argmax(logprob + the same noise) only raises the acceptance rate.
    """

    lossless = True

    @paced_threads()
    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        num_rows, vocab_size = target_logprobs.shape
        at_once = max(1, _CHUNK // vocab_size)
        tokens = []
        for start in range(0, num_rows, at_once):
            logprobs = target_logprobs[start : start + at_once]
            tokens.append(_perturbed_argmax(logprobs, range(start, start + len(logprobs)), noise))
        return match_sampled_tokens(drafts, torch.cat(tokens))


def _perturbed_argmax(logprobs: Tensor, rows: Seq[int], noise: Noise) -> Tensor:
    """Return [R] argmax(logprob + Gumbel noise), the lowest id of equal sums. logprobs: [R, V], of these rows of the
    step.

    Filters leave few tokens, and a token's noise does not depend on which other tokens are requested.
    """
    vocab_size = logprobs.shape[-1]
    if logprobs.device.type == "cpu":  # elsewhere the number of tokens would have to be read back
        drawable = np.flatnonzero((logprobs.numpy() > -np.inf).any(0))
        if _SPARSE * len(drawable) <= vocab_size:
            ids = torch.from_numpy(drawable)
            return ids[row_argmax(noise.gumbel(rows, vocab_size, ids) + logprobs[:, ids])]
    return row_argmax(noise.gumbel(rows, vocab_size).to(logprobs.device).add_(logprobs))
