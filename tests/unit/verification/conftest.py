import pytest
import torch


class GivenNoise:
    """Uniform numbers as given, in the order they are asked for; Gumbel noise from a table of rows."""

    def __init__(self, uniforms=(), gumbel=None):
        self.uniforms = list(uniforms)
        self.table = gumbel

    def uniform(self, size):
        taken, self.uniforms = self.uniforms[:size], self.uniforms[size:]
        assert len(taken) == size
        return torch.tensor(taken, dtype=torch.float64)

    def gumbel(self, rows, vocab_size, token_ids=None):
        return self.table[list(rows), :vocab_size][:, slice(None) if token_ids is None else token_ids]


class FreshNoise:
    """Noise of a generator, for every row alike."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, size):
        return torch.rand(size, dtype=torch.float64, generator=self.generator)

    def gumbel(self, rows, vocab_size, token_ids=None):
        width = vocab_size if token_ids is None else len(token_ids)
        u = torch.rand(len(rows), width, dtype=torch.float64, generator=self.generator)
        return -torch.log(-torch.log(u.clamp(min=1e-300)))


@pytest.fixture
def given_noise():
    return GivenNoise


@pytest.fixture
def fresh_noise():
    return FreshNoise
