"""The walk is exact for any tree: enumerated with fractions through the code that runs."""

from collections import defaultdict
from fractions import Fraction
from itertools import product
from random import Random

import pytest
import torch

from forerun.config import SamplingParams
from forerun.sampling import StepNoise
from forerun.types import Draft, PackedDrafts, Sequence, Verdict
from forerun.verification import VERIFIERS
from forerun.verification.greedy_and_seeded import match_sampled_tokens

VOCAB = 3


def tree(tokens, parents, **options):
    return Draft(tokens, parents, **options)


TREES = {
    "empty": Draft.empty(),
    "chain": Draft.chain([1, 0, 2]),
    "branching": tree([0, 1, 2, 2, 0], [-1, -1, 0, 1, 1]),
    "complete": tree([0, 1, 2, 0, 1], [-1, -1, -1, 0, 0]),
    "duplicates": tree([1, 1, 0, 2, 2], [-1, -1, 0, 1, 2]),
    "probes": tree([1, 2, 0, 1], [-1, 0, -1, 1], num_candidates=2),
    "only probes": tree([1, 2], [-1, 0], num_candidates=0),
}


def context_of(draft, row):
    tokens, node = (), row - 1
    while node >= 0:
        tokens = (int(draft.token_ids[node]), *tokens)
        node = draft.parents[node]
    return tokens


def target_distribution(context):
    random = Random(str(context))
    weights = [random.randint(0, 4) for _ in range(VOCAB - 1)] + [1]
    return [Fraction(weight, sum(weights)) for weight in weights]


def chance_of(tokens):
    accept_prob = Fraction(1)
    for i, token in enumerate(tokens):
        accept_prob *= target_distribution(tokens[:i])[token]
    return accept_prob


def emitted(draft, walk):
    """Distribution of the tokens of one step, over every outcome of the draws at the tree's rows."""
    probs = [target_distribution(context_of(draft, row)) for row in range(len(draft) + 1)]
    emitted = defaultdict(Fraction)
    for drawn in product(range(VOCAB), repeat=len(draft) + 1):
        accept_prob = Fraction(1)
        for distribution, token in zip(probs, drawn):
            accept_prob *= distribution[token]
        if accept_prob:
            for tokens, share in walk(draft, list(drawn), probs):
                emitted[tokens] += accept_prob * share
    return emitted


def total_variation(distribution, length=5):
    completed = defaultdict(Fraction)
    for tokens, accept_prob in distribution.items():
        for rest in product(range(VOCAB), repeat=length - len(tokens)):
            whole = (*tokens, *rest)
            if chance_of(whole):
                completed[whole] += accept_prob * chance_of(whole) / chance_of(tokens) if chance_of(tokens) else 0
    return sum(abs(chance_of(t) - completed[t]) for t in product(range(VOCAB), repeat=length)) / 2


def walk(draft, drawn, probs):
    verdict = match_sampled_tokens(PackedDrafts.of([draft]), drawn)[0]
    yield (*(int(draft.token_ids[node]) for node in verdict.path), verdict.next_token), Fraction(1)


def walk_redrawing_after_a_mismatch(draft, drawn, probs):
    """The next token is drawn anew instead of being the one that did not match."""
    path = match_sampled_tokens(PackedDrafts.of([draft]), drawn)[0].path
    for token, accept_prob in enumerate(probs[path[-1] + 1 if path else 0]):
        yield (*(int(draft.token_ids[node]) for node in path), token), accept_prob


@pytest.mark.parametrize("name", TREES)
def test_walk_is_exact(name):
    assert total_variation(emitted(TREES[name], walk)) == 0


def test_drawing_anew_after_a_mismatch_is_lossy():
    assert total_variation(emitted(TREES["chain"], walk_redrawing_after_a_mismatch)) > 0


def test_paths():
    drafts = [TREES["branching"], TREES["duplicates"], TREES["probes"], TREES["empty"]]
    rows = [
        *[1, 9, 2, 9, 8, 9],  # token 1 is node 1; its row draws 2, node 3; whose row draws 8
        *[1, 0, 9, 2, 9, 9],  # of the two nodes 1 the first; then 0 (node 2), then 2 (node 4), then 9
        *[1, 2, 1, 9, 9],  # node 3 follows, but is a probe
        *[7],
    ]
    assert match_sampled_tokens(PackedDrafts.of(drafts), torch.tensor(rows)) == [
        Verdict([1, 3], 8),
        Verdict([0, 2, 4], 9),
        Verdict([0, 1], 1),
        Verdict([], 7),
    ]


def test_greedy_takes_each_rows_argmax():
    packed = PackedDrafts.of([Draft.chain([3, 1]), Draft.chain([2])])
    assert match_sampled_tokens(packed, torch.tensor([3, 0, 5, 2, 4])) == [Verdict([0], 0), Verdict([0], 4)]


def test_drawn_tokens_come_from_the_rows_distribution(fresh_noise):
    distribution = torch.tensor([[0.2, 0.0, 0.5, 0.3]])
    packed = PackedDrafts.of([Draft.empty()] * 50_000)
    verdicts = VERIFIERS["walk"].verify(packed, distribution.log().expand(50_000, -1), fresh_noise())
    counts = torch.bincount(torch.tensor([verdict.next_token for verdict in verdicts]), minlength=4)
    assert counts[1] == 0
    torch.testing.assert_close(counts / 50_000, distribution[0], atol=0.01, rtol=0)


def seeded_sequence(tokens, seed=11, choice=0):
    return Sequence(id=0, token_ids=list(tokens), num_prompt=1, params=SamplingParams(seed=seed), choice=choice)


def plain_coupled(logprob_of, tokens, count, generator):
    tokens = list(tokens)
    for _ in range(count):
        packed = PackedDrafts.of([Draft.empty()])
        noise = StepNoise(generator, [seeded_sequence(tokens)], packed)
        tokens.append(VERIFIERS["coupled"].verify(packed, logprob_of(tokens)[None], noise)[0].next_token)
    return tokens


@pytest.mark.parametrize("seed", range(20))
def test_coupled_emits_the_same_tokens_whatever_is_drafted(seed):
    vocab_size, prompt = 5, [1, 2]

    def logprob_of(tokens):
        generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
        return (torch.randn(vocab_size, generator=generator) * 2).log_softmax(-1)

    plain = plain_coupled(logprob_of, prompt, 12, torch.Generator())
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    while len(tokens) < len(plain) - 6:
        size = int(torch.randint(0, 6, (1,), generator=generator))
        parents = [int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(size)]
        drafted = torch.randint(0, vocab_size, (size,), generator=generator).tolist()
        if seed % 2 and size:  # a draft that is right for a while
            parents = list(range(-1, size - 1))
            drafted[:3] = plain[len(tokens) : len(tokens) + 3][:size]
        draft = tree(drafted, parents)
        packed = PackedDrafts.of([draft])
        logprobs = torch.stack([logprob_of([*tokens, *context_of(draft, row)]) for row in range(size + 1)])
        noise = StepNoise(generator, [seeded_sequence(tokens)], packed)
        verdict = VERIFIERS["coupled"].verify(packed, logprobs, noise)[0]
        tokens += [drafted[node] for node in verdict.path] + [verdict.next_token]
        assert tokens == plain[: len(tokens)]


@pytest.mark.parametrize(
    ("kept", "vocab_size"), [(1, 2000), (3, 2000), (40, 2000), (2000, 2000), (3, 40_000), (40_000, 40_000)]
)
def test_coupled_takes_each_row_s_argmax_over_all_tokens(kept, vocab_size):
    """However few can be drawn, and however many rows there are: of the larger vocabulary, each is looked at alone."""
    generator = torch.Generator().manual_seed(kept)
    sequences = [seeded_sequence([1, 2, 3], seed) for seed in range(4)]
    logprobs = torch.full((4, vocab_size), -torch.inf)
    for row in logprobs:
        row[torch.randperm(vocab_size, generator=generator)[:kept]] = torch.randn(kept, generator=generator)
    packed = PackedDrafts.of([Draft.empty()] * 4)
    noise = StepNoise(generator, sequences, packed)
    expected = (noise.gumbel(range(4), vocab_size) + logprobs).argmax(-1)
    assert VERIFIERS["coupled"].verify(packed, logprobs, noise) == match_sampled_tokens(packed, expected)


def test_coupled_takes_the_lowest_of_equal_sums(given_noise):
    logprobs = torch.full((1, 40), -torch.inf)
    logprobs[0, [9, 11, 30]] = torch.tensor([-2.0, -1.0, -1.0])
    noise = given_noise(gumbel=torch.zeros(1, 40, dtype=torch.float64))
    assert VERIFIERS["coupled"].verify(PackedDrafts.of([Draft.empty()]), logprobs, noise) == [Verdict([], 11)]
