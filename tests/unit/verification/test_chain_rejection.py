"""The tensor code does what the enumerated mathematics says, also on packed batches and bad input."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from forerun.types import Draft, PackedDrafts
from forerun.verification import VERIFIERS, UnsoundProbsError
from forerun.verification.chain_rejection_math import BLOCK, TOKEN, excess

RULES = {"token": TOKEN, "block": BLOCK}


def random_probs(rows, vocab_size, seed, zeros=0.2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, vocab_size, generator=generator, dtype=dtype)
    weights *= torch.rand(rows, vocab_size, generator=generator) > zeros
    weights[:, 0] += 0.01
    return weights / weights.sum(-1, keepdim=True)


def random_chain(length, vocab_size, seed, **options):
    probs = random_probs(length + 1, vocab_size, seed, **options)
    tokens = torch.multinomial(probs[:length], 1)[:, 0] if length else []
    return Draft.chain(tokens, probs)


def fractions(tensor):
    return np.array([[Fraction(float(x)) for x in row] for row in tensor], dtype=object)


def exact(rule, draft, target):
    """Chances [n] and weights after each accepted length [n + 1, V], in fractions, without batch or padding."""
    n = draft.num_candidates
    p, q = fractions(target[: n + 1]), fractions(draft.probs[: n + 1])
    tokens = draft.ids[:n]
    ratios = [p[i][x] / q[i][x] for i, x in enumerate(tokens)]
    carries = rule.carry(ratios)
    left = excess(np.array(carries, dtype=object)[:, None], p, q)
    accept_probs = rule.acceptance(ratios, carries, list(left.sum(-1)))
    left[n] = p[n]
    return accept_probs, left


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("vocab_size", [3, 17])
def test_tensors_agree_with_fractions(name, vocab_size):
    drafts = [random_chain(length, vocab_size, seed) for seed, length in enumerate([3, 0, 1, 5, 4, 0, 2])]
    packed = PackedDrafts.of(drafts)
    target = random_probs(packed.offsets[-1], vocab_size, seed=99)
    accept_probs, left, _ = VERIFIERS[name].weigh(packed, target)
    for index, draft in enumerate(drafts):
        rows = slice(packed.offsets[index], packed.offsets[index + 1])
        expected_chances, expected_left = exact(RULES[name], draft, target[rows])
        assert len(accept_probs[index]) == len(draft)
        np.testing.assert_allclose(
            accept_probs[index], [float(accept_prob) for accept_prob in expected_chances], atol=1e-12
        )
        np.testing.assert_allclose(left[rows].numpy(), expected_left.astype(float), atol=1e-12)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(40))
def test_decision_given_the_uniform_numbers(name, seed, given_noise):
    length, vocab_size = seed % 5, 4
    draft = random_chain(length, vocab_size, seed)
    target = random_probs(length + 1, vocab_size, seed=seed + 1000)
    uniforms = torch.rand(length + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    verdict = VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), given_noise(uniforms))[0]

    accept_probs, left = exact(RULES[name], draft, target)
    success = [Fraction(u) < accept_prob for u, accept_prob in zip(uniforms, accept_probs)]
    if name == "token":
        accepted = next((i for i, each in enumerate(success) if not each), length)
    else:
        accepted = max((i + 1 for i, each in enumerate(success) if each), default=0)
    assert verdict.path == list(range(accepted))
    cumulative = np.cumsum(left[accepted])
    assert verdict.next_token == next(x for x in range(vocab_size) if cumulative[x] > uniforms[length] * cumulative[-1])


@pytest.mark.parametrize("name", RULES)
def test_impossible_tokens_are_never_accepted_even_at_zero(name, given_noise):
    probs = torch.tensor([[0.5, 0.5, 0.0]]).repeat(3, 1)
    target = torch.tensor([[0.0, 0.5, 0.5]]).repeat(3, 1)
    draft = Draft.chain([0, 1], probs)
    for u in (0.0, 1 - 2**-53):
        verdict = VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), given_noise([0.0, 0.0, u]))[0]
        assert verdict.path == []
        assert verdict.next_token == 2  # the only token with more mass in the target than in the draft


@pytest.mark.parametrize("name", RULES)
def test_equal_distribution_accept_everything(name, given_noise):
    probs = random_probs(5, 11, seed=3, dtype=torch.float32)
    draft = Draft.chain([0, 0, 0, 0], probs)
    almost_one = 1 - 2**-53
    target_logprobs = probs.double().log()
    exact_draft = Draft.chain([0, 0, 0, 0], target_logprobs.exp())
    verdict = VERIFIERS[name].verify(PackedDrafts.of([exact_draft]), target_logprobs, given_noise([almost_one] * 5))[0]
    assert verdict.path == [0, 1, 2, 3]
    # Equal but for rounding: whatever is decided, the next token is one that the target can draw.
    verdict = VERIFIERS[name].verify(PackedDrafts.of([draft]), probs.log(), given_noise([almost_one] * 5))[0]
    assert probs[len(verdict.path), verdict.next_token] > 0


@pytest.mark.parametrize("name", RULES)
def test_token_that_the_draft_could_not_have_drawn(name, given_noise):
    probs = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    target = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    with pytest.raises(UnsoundProbsError, match="no positive probability"):
        VERIFIERS[name].verify(
            PackedDrafts.of([Draft.chain([0, 0], probs)]), target.log(), given_noise([0.5, 0.5, 0.5])
        )


@pytest.mark.parametrize("name", RULES)
def test_probes_are_not_accepted_and_do_not_move_the_bonus(name, given_noise):
    probs = random_probs(5, 6, seed=5)
    target = probs.clone()
    probs[2] = torch.tensor([1.0, 0, 0, 0, 0, 0])
    target[2] = torch.tensor(
        [0.5, 0, 0, 0, 0, 0.5]
    )  # its excess over the distribution that drew the probe is token 5 alone
    chain = Draft.chain([0, 0, 0, 0], probs)
    probed = Draft(chain.token_ids, chain.parents, probs, num_candidates=2)
    verdict = VERIFIERS[name].verify(PackedDrafts.of([probed]), target.log(), given_noise([0.9, 0.9, 0.1]))[0]
    assert verdict.path == [0, 1] and verdict.next_token == 0
    only_probes = Draft(chain.token_ids, chain.parents, probs, num_candidates=0)
    verdict = VERIFIERS[name].verify(PackedDrafts.of([only_probes]), target.log(), given_noise([0.0]))[0]
    assert verdict.path == []


@pytest.mark.parametrize("name", RULES)
def test_company_and_padding_change_nothing(name, fresh_noise):
    drafts = [random_chain(length, 9, seed, dtype=torch.float32) for seed, length in enumerate([4, 0, 2, 7])]
    packed = PackedDrafts.of(drafts)
    target = random_probs(packed.offsets[-1], 9, seed=7, dtype=torch.float32)
    accept_probs, left, _ = VERIFIERS[name].weigh(packed, target)
    for index, draft in enumerate(drafts):
        rows = slice(packed.offsets[index], packed.offsets[index + 1])
        alone_chances, alone_left, _ = VERIFIERS[name].weigh(PackedDrafts.of([draft]), target[rows])
        assert accept_probs[index] == alone_chances[0]
        assert torch.equal(left[rows], alone_left)


def test_missing_or_misshapen_distribution_are_named(fresh_noise):
    logprobs = torch.zeros(2, 4).log_softmax(-1)
    with pytest.raises(ValueError, match="distributions"):
        VERIFIERS["block"].verify(PackedDrafts.of([Draft.chain([1])]), logprobs, fresh_noise())
    with pytest.raises(ValueError, match="shape"):
        VERIFIERS["block"].verify(PackedDrafts.of([Draft.chain([1], torch.ones(2, 3))]), logprobs, fresh_noise())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_weights_have_the_bits_of_the_formula(name, dtype):
    """Whatever is computed in place, and however many drafts there are."""
    chains = [random_chain(length, 4099, seed, dtype=dtype) for seed, length in enumerate([4, 0, 2])]
    probed = random_chain(3, 4099, 9, dtype=dtype)
    chains.append(Draft(probed.token_ids, probed.parents, probed.probs, num_candidates=1))
    for drafts in (chains, chains[:1], chains[3:]):
        packed = PackedDrafts.of(drafts)
        target = random_probs(packed.offsets[-1], 4099, seed=17, dtype=dtype)
        before = [draft.probs.clone() for draft in drafts], target.clone()
        _, left, masses = VERIFIERS[name].weigh(packed, target)
        assert torch.equal(target, before[1]) and all(map(torch.equal, before[0], [draft.probs for draft in drafts]))
        expected = target.clone()
        for draft, start in zip(drafts, packed.offsets):
            carry = np.ones(1)
            for node in range(draft.num_candidates):
                p, q = target[start + node], draft.probs[node]
                expected[start + node] = (torch.from_numpy(carry).to(dtype) * p - q).clip(min=0)
                if name == "block":
                    token = draft.ids[node]
                    carry = np.minimum(carry * (float(p[token]) / float(q[token])), 1)
        assert torch.equal(left, expected)
        assert masses == expected.sum(-1).double().tolist()
