import pytest
import torch

from forerun.config import SamplingParams
from forerun.errors import ConfigError
from forerun.sampling import StepNoise
from forerun.types import Draft, PackedDrafts, Sequence
from forerun.verify import VERIFIERS, check_acceptance, rule_for, verify_step

VOCAB = 8
LAWS = torch.full((3, VOCAB), 1 / VOCAB)
DRAWN, CHOSEN = Draft.chain([1, 2], LAWS), Draft.chain([1, 2])
DRAWN_TREE = Draft(torch.tensor([1, 2]), torch.tensor([-1, -1]), LAWS)
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
        (PLAIN, DRAWN_TREE, None, "walk"),
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
    with pytest.raises(ConfigError, match=r"'blok'.*walk, token, block, coupled.*typical, top-k, top-p"):
        rule_for(PLAIN, DRAWN, "blok")
    with pytest.raises(ConfigError):
        check_acceptance("greedy")


def test_only_the_named_ones_are_lossy():
    assert {name for name, verifier in VERIFIERS.items() if not verifier.lossless} == {"typical", "top-k", "top-p"}


def test_mixed_rules_verify_each_sequence_by_its_own():
    params = [GREEDY, PLAIN, SEEDED, SamplingParams(seed=2), PLAIN]
    laws = torch.rand(4, VOCAB, generator=torch.Generator().manual_seed(1)).softmax(-1)
    drafts = [Draft.chain([1, 2, 3]), Draft.chain([4, 5, 6], laws), Draft.chain([1]), Draft.empty(), Draft.empty()]
    rules = ["walk", "block", "coupled", "coupled", "walk"]
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
