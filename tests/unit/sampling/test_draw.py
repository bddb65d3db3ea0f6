import pytest
import torch

from forerun.sampling import draw_tokens, row_argmax


@pytest.mark.parametrize("vocab_size", [1, 3, 63, 64, 65, 200, 4096, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverts_the_cumulative_weights(vocab_size, dtype):
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(50, vocab_size, generator=generator, dtype=dtype)
    weights *= torch.rand(50, vocab_size, generator=generator) > 0.5
    weights[:, vocab_size // 2] += 0.1
    uniforms = torch.rand(50, generator=generator, dtype=torch.float64)
    tokens = draw_tokens(weights, uniforms)
    assert (weights[torch.arange(50), tokens] > 0).all()
    cumulative = weights.double().cumsum(-1)
    rounding = 1e-12 * cumulative[:, -1]
    threshold = uniforms * cumulative[:, -1]
    upper = cumulative[torch.arange(50), tokens]
    lower = upper - weights.double()[torch.arange(50), tokens]
    assert (lower - rounding <= threshold).all() and (threshold <= upper + rounding).all()


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("vocab_size", [5, 64, 100, 1000])
def test_weight_zero_is_never_drawn(uniform, vocab_size):
    for place in range(vocab_size):
        weights = torch.zeros(1, vocab_size)
        weights[0, place] = 1e-30
        assert draw_tokens(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [place]
    pair = torch.zeros(1, vocab_size)
    pair[0, 1], pair[0, -2] = 0.1, 1e-38
    assert int(draw_tokens(pair, torch.tensor([uniform], dtype=torch.float64))) in (1, vocab_size - 2)


def test_distribution():
    distribution = torch.zeros(130)
    distribution[[0, 63, 64, 129]] = torch.tensor([0.4, 0.1, 0.2, 0.3])
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = torch.bincount(draw_tokens(distribution.expand(10_000, -1), uniforms), minlength=130)
    assert counts[[0, 63, 64, 129]].tolist() == pytest.approx([4000, 1000, 2000, 3000], abs=2)


def test_improbable_tokens_are_not_rounded_away():
    weights = torch.full((1, 1001), 1e-9)
    weights[0, 0] = 1
    for place in (1, 500, 1000):
        uniform = (1 + (place - 0.5) * 1e-9) / (1 + 1e-6)
        assert abs(int(draw_tokens(weights, torch.tensor([uniform], dtype=torch.float64))) - place) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_row_argmax_is_torchs_with_ties_to_the_first(dtype):
    values = torch.randint(0, 5, (40, 333), generator=torch.Generator().manual_seed(1)).to(dtype)
    values[3] = -torch.inf
    assert torch.equal(row_argmax(values), values.float().argmax(-1))
    assert row_argmax(values).tolist() == [row.index(max(row)) for row in values.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_alone_gives_the_token_it_gives_among_others(dtype):
    generator = torch.Generator().manual_seed(8)
    weights = torch.rand(40, 300, generator=generator, dtype=dtype).pow(8)
    weights[:, ::7] = 0
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    together = draw_tokens(weights, uniforms)
    assert [int(draw_tokens(weights[i : i + 1], uniforms[i : i + 1])) for i in range(40)] == together.tolist()
    assert (weights[torch.arange(40), together] > 0).all()
