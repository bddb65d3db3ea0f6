import pytest
import torch

from forerun.config import LOSSY_RULES, SamplingParams
from forerun.errors import ConfigError
from forerun.sampling import StepNoise
from forerun.types import Draft, PackedDrafts, Sequence
from forerun.verification import VERIFIERS, check_acceptance, rule_for, verify_step

VOCAB = 8
UNIFORM = torch.full((3, VOCAB), 1 / VOCAB)
DRAWN, CHOSEN = Draft.chain([1, 2], UNIFORM), Draft.chain([1, 2])
DRAWN_TREE = Draft([1, 2], [-1, -1], UNIFORM)
CHOSEN_TREE = Draft([1, 2], [-1, -1])
GREEDY, PLAIN, SEEDED = SamplingParams(temperature=0), SamplingParams(), SamplingParams(seed=1)


@pytest.mark.parametrize(
    ("params", "draft", "acceptance", "expected"),
    [
        (GREEDY, DRAWN, None, "walk"),
        (GREEDY, DRAWN, "typical", "walk"),
        (SamplingParams(temperature=0, seed=1), CHOSEN, None, "walk"),
        (PLAIN, DRAWN, None, "block"),
        (PLAIN, CHOSEN, None, "walk"),
        (PLAIN, Draft.empty(), None, "walk"),
        (PLAIN, DRAWN_TREE, None, "traversal"),
        (PLAIN, DRAWN_TREE, "block", "traversal"),
        (PLAIN, DRAWN_TREE, "traversal", "traversal"),
        (PLAIN, DRAWN_TREE, "token", "multi-step"),
        (PLAIN, DRAWN_TREE, "multi-step", "multi-step"),
        (PLAIN, DRAWN_TREE, "walk", "walk"),
        (PLAIN, DRAWN_TREE, "coupled", "walk"),
        (PLAIN, DRAWN_TREE, "typical", "typical"),
        (PLAIN, DRAWN, "block", "block"),
        (PLAIN, DRAWN, "traversal", "block"),
        (PLAIN, DRAWN, "multi-step", "token"),
        (PLAIN, CHOSEN_TREE, None, "walk"),
        (PLAIN, CHOSEN_TREE, "traversal", "walk"),
        (PLAIN, CHOSEN_TREE, "multi-step", "walk"),
        (PLAIN, Draft.empty(), "traversal", "walk"),
        (GREEDY, DRAWN_TREE, "traversal", "walk"),
        (SEEDED, DRAWN_TREE, None, "coupled"),
        (PLAIN, DRAWN, "token", "token"),
        (PLAIN, DRAWN, "walk", "walk"),
        (PLAIN, CHOSEN, "block", "walk"),
        (PLAIN, CHOSEN, "token", "walk"),
        (PLAIN, DRAWN, "coupled", "walk"),
        (PLAIN, DRAWN, "typical", "typical"),
        (PLAIN, CHOSEN, "top-p", "top-p"),
        (SEEDED, DRAWN, None, "coupled"),
        (SEEDED, DRAWN, "block", "coupled"),
        (SEEDED, CHOSEN, "typical", "coupled"),
    ],
)
def test_rule_for(params, draft, acceptance, expected):
    assert rule_for(params, draft, acceptance) == expected


def test_unknown_rule_names_the_others():
    with pytest.raises(
        ConfigError, match=r"'blok'.*walk, token, block, multi-step, traversal, coupled.*typical, top-k"
    ):
        rule_for(PLAIN, DRAWN, "blok")
    with pytest.raises(ConfigError):
        check_acceptance("greedy")


def test_only_the_named_ones_are_lossy():
    assert {name for name, verifier in VERIFIERS.items() if not verifier.lossless} == {"typical", "top-k", "top-p"}


def test_mixed_rules_verify_each_sequence_by_its_own():
    params = [GREEDY, PLAIN, SEEDED, SamplingParams(seed=2), PLAIN, PLAIN]
    probs = torch.rand(4, VOCAB, generator=torch.Generator().manual_seed(1)).softmax(-1)
    chain, other = Draft.chain([1, 2, 3]), Draft.chain([1])
    drafts = [chain, Draft.chain([4, 5, 6], probs), other, Draft.empty(), Draft.empty(), DRAWN_TREE]
    rules = ["walk", "block", "coupled", "coupled", "walk", "traversal"]
    packed = PackedDrafts.of(drafts)
    logprobs = torch.randn(packed.offsets[-1], VOCAB, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    greedy_rows = torch.full((4, VOCAB), -torch.inf)
    greedy_rows[torch.arange(4), torch.tensor([1, 2, 7, 0])] = 0
    logprobs[:4] = greedy_rows
    sequences = [Sequence(i, [1, 2, 3 + i], 2, each) for i, each in enumerate(params)]
    noise = StepNoise(torch.Generator().manual_seed(3), sequences, packed)
    mixed = verify_step(packed, logprobs, rules, noise)
    assert mixed[0].path == [0, 1] and mixed[0].next_token == 7
    for index in (2, 3):  # keyed by the sequence: alone they get the same
        rows = slice(packed.offsets[index], packed.offsets[index + 1])
        alone = PackedDrafts.of([drafts[index]])
        noise = StepNoise(torch.Generator().manual_seed(9), [sequences[index]], alone)
        assert verify_step(alone, logprobs[rows], ["coupled"], noise) == [mixed[index]]
    assert all(0 <= verdict.next_token < VOCAB for verdict in mixed)
    assert mixed[5].path in ([], [0], [1])


def test_the_lossy_rules_are_named_for_the_command_line() -> None:
    assert tuple(name for name, rule in VERIFIERS.items() if not rule.lossless) == LOSSY_RULES
