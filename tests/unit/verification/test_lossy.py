import math

import torch

from forerun.types import Draft, PackedDrafts, Verdict
from forerun.verification import VERIFIERS
from forerun.verification.lossy import in_top_k, in_top_p, typical


def test_typical_threshold():
    # Entropy log 20: the threshold is 0.3 / 20 = 0.015, below epsilon.
    flat = torch.full((1, 20), 0.05)
    assert typical(flat, torch.tensor([3])).tolist() == [True]
    # A sure distribution: the threshold is epsilon = 0.09 (delta * exp(-entropy) is above it).
    sure = torch.tensor([[0.91, 0.089, 0.001]])
    assert 0.3 * math.exp(-float(torch.special.entr(sure).sum())) > 0.09
    assert typical(sure.expand(2, -1), torch.tensor([0, 1])).tolist() == [True, False]
    assert typical(torch.tensor([[1.0, 0.0]]).expand(2, -1), torch.tensor([0, 1])).tolist() == [True, False]


def test_sets():
    distribution = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05, 0.0]]).expand(6, -1)
    assert in_top_k(distribution, torch.arange(6)).tolist() == [True, True, True, False, False, False]
    assert in_top_p(distribution, torch.arange(6)).tolist() == [True, True, True, False, False, False]
    sure = torch.tensor([[1.0, 0.0, 0.0]]).expand(2, -1)
    assert in_top_k(sure, torch.tensor([0, 1])).tolist() == [True, False]
    assert in_top_p(sure, torch.tensor([0, 1])).tolist() == [True, False]


def test_longest_path_then_the_most_probable(given_noise):
    #        root -> 0 (.6) -> 2 (.1 rejected)      root -> 1 (.4) -> 3 (.45), 4 (.5)
    draft = Draft([0, 1, 2, 3, 4], [-1, -1, 0, 1, 1])
    probs = torch.zeros(6, 6)
    probs[0, :2] = torch.tensor([0.6, 0.4])
    probs[1] = torch.tensor([0.8, 0.1, 0.01, 0.09, 0.0, 0.0])
    probs[2, 3:] = torch.tensor([0.45, 0.5, 0.05])
    probs[3:, 5] = 1
    for name in ("typical", "top-k", "top-p"):
        verdicts = VERIFIERS[name].verify(
            PackedDrafts.of([Draft.empty(), draft]), torch.cat([probs[:1], probs]).log(), given_noise([0.7, 0.5])
        )
        assert verdicts == [Verdict([], 1), Verdict([1, 4], 5)]
        assert not VERIFIERS[name].lossless


def test_probes_are_not_accepted(given_noise):
    draft = Draft([0, 0], [-1, 0], num_candidates=1)
    probs = torch.tensor([[1.0, 0.0]]).repeat(3, 1)
    assert VERIFIERS["top-k"].verify(PackedDrafts.of([draft]), probs.log(), given_noise([0.5])) == [Verdict([0], 0)]
