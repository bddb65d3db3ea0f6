"""The tensor code does what the enumerated mathematics says, also on packed batches, rounding and bad input."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from forerun.types import Draft, PackedDrafts, Verdict
from forerun.verification import VERIFIERS
from forerun.verification.tree_rejection_math import DrawnTree, multi_step, traversal

RULES = {"traversal": traversal, "multi-step": multi_step}
OF_CHAINS = {"traversal": "block", "multi-step": "token"}
REPLACEMENT = pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
ALMOST_ONE = 1 - 2**-53


def random_probs(rows, vocab_size, generator, zeros=0.2, dtype=torch.float64):
    weights = torch.rand(rows, vocab_size, generator=generator, dtype=dtype)
    weights *= torch.rand(rows, vocab_size, generator=generator) > zeros
    weights[:, 0] += 0.01
    return weights / weights.sum(-1, keepdim=True)


def random_parents(size, generator):
    return [int(torch.randint(-1, node, (1,), generator=generator)) if node else -1 for node in range(size)]


def random_tree(parents, vocab_size, seed, replacement=True, dtype=torch.float64):
    """A drawn draft, and the target's distributions for it, not far from its own."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(parents, int):
        parents = random_parents(parents, generator)
    probs = random_probs(len(parents) + 1, vocab_size, generator, dtype=dtype)
    target = (probs + random_probs(len(parents) + 1, vocab_size, generator, dtype=dtype)) / 2
    tokens = torch.zeros(len(parents), dtype=torch.int64)
    left = probs.clone()
    for node, parent in enumerate(parents):
        distribution = left[parent + 1]
        tokens[node] = torch.multinomial(distribution, 1, generator=generator)[0] if distribution.sum() > 0 else 0
        if not replacement:
            distribution[tokens[node]] = 0
    return Draft(tokens, parents, probs, replacement), target


def fractions(row):
    return np.array([Fraction(float(x)) for x in row], dtype=object)


def exact_verdict(rule, draft, target, uniforms):
    """In fractions: the same numbers compared with the chances, and the last of them inverted."""
    parents = draft.parents
    tree = DrawnTree(
        draft.ids,
        [[i for i in range(draft.num_candidates) if parents[i] == node] for node in range(-1, len(parents))],
        lambda row: fractions(target[row]),
        lambda row: fractions(draft.probs[row]),
        draft.replacement,
        Fraction(1),
    )
    row, weights = rule(tree, lambda node, accept_prob: Fraction(uniforms[node]) < accept_prob)
    path, node = [], row - 1
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    cumulative = np.cumsum(weights)
    wanted = Fraction(uniforms[draft.num_candidates]) * cumulative[-1]
    return Verdict(path, next(x for x in range(len(weights)) if cumulative[x] > wanted))


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_decision_given_the_uniform_numbers(name, replacement, dtype, given_noise):
    lengths = set()
    for seed in range(60):
        draft, target = random_tree(seed % 9, 4, seed, replacement, dtype)
        generator = torch.Generator().manual_seed(seed + 1)
        uniforms = torch.rand(len(draft) + 1, dtype=torch.float64, generator=generator).tolist()
        noise, before = given_noise(uniforms), draft.probs.clone()
        verdict = VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), noise)[0]
        assert noise.uniforms == []  # as many as asked for, whatever was decided
        assert torch.equal(draft.probs, before)
        assert verdict == exact_verdict(RULES[name], draft, target, uniforms)
        lengths.add(len(verdict.path))
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_chains_get_the_verdicts_of_the_rule_for_chains(name, replacement, given_noise):
    generator = torch.Generator().manual_seed(3)
    items = [random_tree(range(-1, size - 1), 6, seed, replacement) for seed, size in enumerate([4, 0, 2, 7, 1] * 12)]
    packed = PackedDrafts.of([draft for draft, _ in items])
    logprobs = torch.cat([target for _, target in items]).log()
    uniforms = torch.rand(len(items) * 8, dtype=torch.float64, generator=generator).tolist()
    verdicts = VERIFIERS[name].verify(packed, logprobs, given_noise(uniforms))
    assert verdicts == VERIFIERS[OF_CHAINS[name]].verify(packed, logprobs, given_noise(uniforms))
    assert {len(verdict.path) for verdict in verdicts} >= {0, 1, 2, 3}


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_company_changes_nothing(name, replacement, given_noise):
    items = [random_tree(size, 9, seed, replacement, torch.float32) for seed, size in enumerate([6, 0, 3, 9])]
    items.insert(1, (Draft.empty(), random_probs(1, 9, torch.Generator().manual_seed(1), dtype=torch.float32)))
    packed = PackedDrafts.of([draft for draft, _ in items])
    uniforms = torch.rand(len(items), 10, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    together = VERIFIERS[name].verify(
        packed, torch.cat([target for _, target in items]).log(), given_noise(uniforms.flatten().tolist())
    )
    for (draft, target), numbers, verdict in zip(items, uniforms.tolist(), together):
        alone = given_noise([*numbers[: len(draft)], numbers[-1]])
        assert VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), alone) == [verdict]
    assert VERIFIERS[name].verify(PackedDrafts.of([]), torch.zeros(0, 9), given_noise([])) == []


def siblings(tokens, distribution, replacement=True, **options):
    probs = torch.as_tensor(distribution).repeat(len(tokens) + 1, 1)
    return Draft(tokens, [-1] * len(tokens), probs, replacement, **options)


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_impossible_tokens_are_never_accepted_even_at_zero(name, replacement, given_noise):
    draft = siblings([0, 1], [0.5, 0.5, 0.0], replacement)
    target = torch.tensor([[0.0, 0.0, 1.0]]).repeat(3, 1)
    for u in (0.0, ALMOST_ONE):
        noise = given_noise([0.0, 0.0, u])
        assert VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), noise) == [Verdict([], 2)]


@pytest.mark.parametrize("name", RULES)
def test_exhausted_distribution_leaves_the_remainder_of_the_target(name, given_noise):
    """Both tokens that the draft knows are offered and rejected; what follows is no draw of it."""
    draft = siblings([0, 1, 2, 3], [0.5, 0.5, 0.0, 0.0], replacement=False)
    target = torch.tensor([[0.1, 0.1, 0.4, 0.4]]).repeat(5, 1)
    noise = given_noise([ALMOST_ONE] * 4 + [0.4])
    assert VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), noise) == [Verdict([], 2)]
    noise = given_noise([ALMOST_ONE, ALMOST_ONE, 0.0, 0.0, 0.6])
    assert VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), noise) == [Verdict([], 3)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rest", [1e-12, 1e-36, 1e-42])
def test_next_to_nothing_left_of_the_distribution(name, rest, given_noise):
    """Without replacement, a sharp distribution leaves little to the second draw: it is all of it then."""
    distribution = torch.tensor([[1.0, rest, 3 * rest]])
    draft = Draft([0, 1], [-1, -1], distribution.repeat(3, 1), replacement=False)
    target = torch.tensor([[0.0, 0.125, 0.875]]).repeat(3, 1)
    for u, verdict in [(0.49, Verdict([1], 2)), (0.51, Verdict([], 2))]:  # accepted with 0.125 / 0.25
        assert VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), given_noise([0.0, u, 0.5])) == [verdict]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rest", [1e-12, 1e-36])
def test_residual_after_next_to_nothing_was_left_of_the_distribution(name, rest, given_noise):
    """The second child holds more of the draft's remainder than of the target's: if it falls, the other is meant."""
    distribution = torch.tensor([[1.0, rest, 2 * rest]])
    draft = Draft([0, 2], [-1, -1], distribution.repeat(3, 1), replacement=False)
    target = torch.tensor([[0.0, 0.5, 0.5]]).repeat(3, 1)
    noise = given_noise([0.0, 0.76, ALMOST_ONE])  # accepted with (1 / 2) / (2 / 3)
    assert VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), noise) == [Verdict([], 1)]


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_an_excess_below_the_precision_of_one(name, replacement, given_noise):
    draft = siblings([0, 0, 0], torch.tensor([1.0, 0.0], dtype=torch.float64), replacement)
    target = torch.tensor([[ALMOST_ONE, 1e-20]], dtype=torch.float64).repeat(4, 1)
    noise = given_noise([ALMOST_ONE] * 4)
    assert VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), noise) == [Verdict([], 1)]


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_an_excess_of_rounding_overflows_nowhere(name, replacement, given_noise):
    draft = siblings([0, 0, 0], torch.tensor([1.0, 0.0]), replacement)
    target = torch.tensor([[1 - 2**-24, 1e-42]]).repeat(4, 1)
    with np.errstate(over="raise", invalid="raise"):
        verdict = VERIFIERS[name].verify(PackedDrafts.of([draft]), target.log(), given_noise([ALMOST_ONE] * 4))[0]
    assert verdict.path == []


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_distribution_accept_a_whole_path(name, replacement, dtype, given_noise):
    draft, _ = random_tree([-1, -1, 0, 0, 2], 11, 4, replacement, torch.float32)
    logprobs = draft.probs.log().to(dtype)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    equal = Draft(draft.token_ids, draft.parents, logprobs.to(wide).exp(), replacement)
    noise = given_noise([ALMOST_ONE] * 6)
    assert VERIFIERS[name].verify(PackedDrafts.of([equal]), logprobs, noise)[0].path == [0, 2, 4]
    # Equal but for rounding: whatever is decided, the next token is one that the target can draw.
    nearly = Draft(draft.token_ids, draft.parents, logprobs.double().exp() * (1 + 1e-7), replacement)
    verdict = VERIFIERS[name].verify(PackedDrafts.of([nearly]), logprobs, given_noise([ALMOST_ONE] * 6))[0]
    assert draft.probs[verdict.path[-1] + 1 if verdict.path else 0, verdict.next_token] > 0


@pytest.mark.parametrize("name", RULES)
@REPLACEMENT
def test_probes_are_not_accepted(name, replacement, given_noise):
    parents = [-1, 0, -1, 1, 2]
    draft, target = random_tree(parents, 6, 2, replacement)
    probed = Draft(draft.token_ids, draft.parents, target.clone(), replacement, num_candidates=2)
    verdict = VERIFIERS[name].verify(PackedDrafts.of([probed]), target.log(), given_noise([0.9, 0.9, 0.1]))[0]
    assert verdict.path == [0, 1]  # the distributions are equal; the probes below and beside take no part
    verdict = VERIFIERS[name].verify(
        PackedDrafts.of([Draft(draft.token_ids, draft.parents, draft.probs, replacement, num_candidates=0)]),
        target.log(),
        given_noise([0.0]),
    )[0]
    assert verdict == Verdict([], int(target[0].nonzero()[0]))


@pytest.mark.parametrize("name", RULES)
def test_missing_or_misshapen_distribution_are_named(name, fresh_noise):
    logprobs = torch.zeros(3, 4).log_softmax(-1)
    tokens, parents = torch.tensor([1, 2]), torch.tensor([-1, -1])
    with pytest.raises(ValueError, match="distributions"):
        VERIFIERS[name].verify(PackedDrafts.of([Draft(tokens, parents)]), logprobs, fresh_noise())
    with pytest.raises(ValueError, match="shape"):
        VERIFIERS[name].verify(PackedDrafts.of([Draft(tokens, parents, torch.ones(2, 4))]), logprobs, fresh_noise())
