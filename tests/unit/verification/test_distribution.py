"""G-test of the tensor code: 40,000 packed sequences, two drafted tokens, every string of three tokens."""

from dataclasses import replace

import pytest
import torch

from forerun.types import Draft, PackedDrafts
from forerun.verification import VERIFIERS
from forerun.verification.chain_rejection import Rejection
from forerun.verification.chain_rejection_math import BLOCK, up_to_first_failure

VOCAB, SAMPLES = 3, 40_000


def probs(seed):
    """Distributions after no token [V], one [V, V] and two [V, V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(*[VOCAB] * depth, generator=generator).pow(2).add(0.02) for depth in (1, 2, 3)]


TARGET, DRAFT = ([distribution / distribution.sum(-1, keepdim=True) for distribution in probs(seed)] for seed in (1, 2))


def rows(table, tokens):
    """[B, 3, V] the distributions along drafted tokens [B, 2]."""
    first, second = tokens.T
    return torch.stack([table[0].expand(len(tokens), -1), table[1][first], table[2][first, second]], dim=1)


@pytest.fixture(scope="module")
def proposals():
    """[B, 2] drafted tokens, and their drafts."""
    generator = torch.Generator().manual_seed(5)
    drafted = torch.zeros(SAMPLES, 2, dtype=torch.int64)
    for place in range(2):
        distribution = rows(DRAFT, drafted)[:, place]
        drafted[:, place] = torch.multinomial(distribution, 1, generator=generator)[:, 0]
    chains = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    drafts = [Draft.chain(chain, distribution) for chain, distribution in zip(chains, rows(DRAFT, chains))]
    return drafted, [drafts[index] for index in (drafted @ torch.tensor([VOCAB, 1])).tolist()]


def emitted(verifier, noise, proposals):
    drafted, drafts = proposals
    generator = torch.Generator().manual_seed(6)
    target_logprobs = rows(TARGET, drafted).reshape(-1, VOCAB).log()
    verdicts = verifier.verify(PackedDrafts.of(drafts), target_logprobs, noise)
    lengths = torch.tensor([len(verdict.path) for verdict in verdicts])
    following = torch.tensor([verdict.next_token for verdict in verdicts])
    tokens = torch.cat([drafted, torch.zeros(SAMPLES, 1, dtype=torch.int64)], dim=1)
    tokens[torch.arange(SAMPLES), lengths] = following
    for place in range(3):  # what the step left open is completed by the target's own distribution
        distribution = rows(TARGET, tokens[:, :2])[:, place]
        drawn = torch.multinomial(distribution, 1, generator=generator)[:, 0]
        tokens[:, place] = torch.where(lengths < place, drawn, tokens[:, place])
    return torch.bincount((tokens * torch.tensor([9, 3, 1])).sum(-1), minlength=27)


def p_value(counts):
    expected = (TARGET[0][:, None, None] * TARGET[1][:, :, None] * TARGET[2]).flatten().double() * SAMPLES
    assert expected.min() > 5
    observed = counts.double()
    g = 2 * torch.xlogy(observed, observed / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(26 / 2, dtype=torch.float64), g / 2))


@pytest.mark.parametrize("name", ["walk", "token", "block", "coupled"])
def test_lossless_rules_are_not_rejected(name, fresh_noise, proposals):
    assert p_value(emitted(VERIFIERS[name], fresh_noise(), proposals)) > 1e-3


def test_broken_block_is_rejected(fresh_noise, proposals):
    broken = Rejection(replace(BLOCK, length=up_to_first_failure))
    assert p_value(emitted(broken, fresh_noise(), proposals)) < 1e-9


@pytest.mark.parametrize("name", ["typical", "top-k", "top-p"])
def test_lossy_rules_are_rejected(name, fresh_noise, proposals):
    assert p_value(emitted(VERIFIERS[name], fresh_noise(), proposals)) < 1e-9
