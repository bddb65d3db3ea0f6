import math

import pytest
import torch

from forerun.config import MAX_SEED, SamplingParams
from forerun.sampling import NoiseKey, StepNoise, keyed_gumbel, keyed_uniform
from forerun.sampling.noise import _hash_key, _mix, _token_steps, _uniform_tensor
from forerun.types import Draft, PackedDrafts, Sequence

KEYS = [NoiseKey(seed, choice, position) for seed in (0, 1, MAX_SEED) for choice in (0, 1) for position in (5, 6, 900)]


def chi2_p(statistic, freedom):
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2)))


def test_splitmix_of_the_paper():
    """First outputs of SplitMix64 with seed 1234567, as published with its reference code."""
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    outputs = [_mix((1234567 + i * gamma) & mask) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_tensor_hash_is_the_integer_hash():
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    uniform = keyed_uniform(KEYS, 50)
    for key, row in zip(KEYS, uniform.tolist()):
        for token, value in enumerate(row):
            bits = _mix((_hash_key(key) + (token + 1) * gamma) & mask) >> 12
            assert value == (2 * bits + 1) / 2**53


def test_the_hash_on_a_device_is_the_one_on_the_cpu():
    starts = [_hash_key(key) for key in KEYS]
    steps = _token_steps(5000, torch.device("cpu"))
    assert torch.equal(_uniform_tensor(starts, steps), keyed_uniform(KEYS, 5000))


@pytest.mark.parametrize("ids", [[], [0], [4095], [7, 8, 30, 900, 901], list(range(0, 4096, 3))])
def test_noise_of_some_tokens_is_that_of_all(ids):
    some = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(keyed_uniform(KEYS, 4096, token_ids=some), keyed_uniform(KEYS, 4096)[:, some])
    assert torch.equal(keyed_gumbel(KEYS, 4096, token_ids=some), keyed_gumbel(KEYS, 4096)[:, some])


def test_values_stay():
    """A seed gives the same text in every release: these numbers are part of the contract."""
    assert keyed_uniform([NoiseKey(42, 0, 17)], 3)[0].tolist() == [
        0.34794411656852653,
        0.3665476179591386,
        0.2160211596800513,
    ]


def test_value_does_not_depend_on_vocabulary_or_batch():
    whole = keyed_gumbel(KEYS, 4096)
    for index, key in enumerate(KEYS):
        assert torch.equal(keyed_gumbel([key], 4096)[0], whole[index])
        assert torch.equal(keyed_gumbel([key], 77)[0], whole[index, :77])
    assert torch.equal(keyed_gumbel(KEYS[::-1], 999), whole.flip(0)[:, :999])


def test_uniform():
    uniform = keyed_uniform([NoiseKey(7, 0, position) for position in range(250)], 4000).flatten()
    assert uniform.min() > 0 and uniform.max() < 1
    counts = torch.histc(uniform, bins=1000, min=0, max=1)
    assert chi2_p(float(((counts - 1000) ** 2 / 1000).sum()), 999) > 1e-3
    low_bits = (uniform * 2**53).to(torch.int64) >> 1 & 1023
    counts = torch.bincount(low_bits, minlength=1024).double()
    mean = len(uniform) / 1024
    assert chi2_p(float(((counts - mean) ** 2 / mean).sum()), 1023) > 1e-3
    assert len(uniform.unique()) == len(uniform)


@pytest.mark.parametrize("part", ["seed", "choice", "position", "token"])
def test_neighbours_are_independent(part):
    """Pairs of neighbouring keys or tokens fill the unit square evenly."""
    if part == "token":
        uniform = keyed_uniform([NoiseKey(3, 0, position) for position in range(100)], 4001)
        first, second = uniform[:, :-1], uniform[:, 1:]
    else:
        keys = [NoiseKey(9, 2, 40)._replace(**{part: value}) for value in range(101)]
        uniform = keyed_uniform(keys, 4000)
        first, second = uniform[:-1], uniform[1:]
    cells = ((first * 20).long() * 20 + (second * 20).long()).flatten()
    counts = torch.bincount(cells, minlength=400).double()
    mean = len(cells) / 400
    assert chi2_p(float(((counts - mean) ** 2 / mean).sum()), 399) > 1e-3
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.006


def test_gumbel_moments():
    noise = keyed_gumbel([NoiseKey(1, 1, position) for position in range(100)], 10_000)
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=0.005)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.01)


def test_argmax_with_noise_draws_from_the_distribution():
    distribution = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    noise = keyed_gumbel([NoiseKey(seed, 0, 10) for seed in range(50_000)], 4)
    counts = torch.bincount((distribution.log() + noise).argmax(-1), minlength=4).double()
    expected = distribution * 50_000
    assert counts[1] == 0
    assert chi2_p(float(((counts - expected) ** 2 / expected)[[0, 2, 3]].sum()), 2) > 1e-3


def sequences():
    seeded = Sequence(0, [1, 2, 3], 2, SamplingParams(seed=5), choice=1)
    other = Sequence(1, [1, 2, 3, 4, 5], 2, SamplingParams())
    return [seeded, other, Sequence(2, [1], 1, SamplingParams(seed=5))]


def test_step_noise_keys_rows_by_the_position_they_draw():
    tree = Draft([1, 2, 3, 4], [-1, 0, 0, 2])
    packed = PackedDrafts.of([tree, Draft.chain([7]), Draft.empty()])
    noise = StepNoise(torch.Generator().manual_seed(1), sequences(), packed)
    # token_ids has length 3, so row 0 draws token 3; the two children of node 0 draw the same position
    positions = [3, 4, 5, 5, 6]
    keys = [noise.key(row) for row in range(8)]
    assert keys == [*(NoiseKey(5, 1, position) for position in positions), None, None, NoiseKey(5, 0, 1)]
    gumbel = noise.gumbel(range(8), 20)
    for row in (0, 1, 2, 3, 4, 7):
        assert torch.equal(gumbel[row], keyed_gumbel([keys[row]], 20)[0])
    assert torch.equal(gumbel[2], gumbel[3])
    assert torch.isfinite(gumbel).all()
    assert torch.equal(noise.gumbel([7, 0], 20), gumbel[[7, 0]])
    some = noise.gumbel(range(8), 20, torch.tensor([3, 17]))
    assert torch.equal(some[[0, 1, 2, 3, 4, 7]], gumbel[[0, 1, 2, 3, 4, 7]][:, [3, 17]]) and some.shape == (8, 2)
    again = noise.gumbel(range(8), 20)
    assert not torch.equal(again[5:7], gumbel[5:7])


def test_step_noise_uniform_is_fresh_and_follows_the_generator():
    packed = PackedDrafts.of([Draft.empty()] * 3)
    noise = StepNoise(torch.Generator().manual_seed(1), sequences(), packed)
    first, second = noise.uniform(4), noise.uniform(4)
    assert first.dtype == torch.float64 and first.shape == (4,) and not torch.equal(first, second)
    again = StepNoise(torch.Generator().manual_seed(1), sequences(), packed)
    assert torch.equal(again.uniform(4), first)
