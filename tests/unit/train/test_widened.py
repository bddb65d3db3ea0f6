"""Models widened in memory compute their source's logits."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.errors import ConfigError
from forerun.lab.bench.padded_model import WideShape, wide_shape, widen

CPU = torch.device("cpu")


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (5, 5)])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_source(heads: int, kv_heads: int, tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=40,
        head_dim=8,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=48,
        num_hidden_layers=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    shape = wide_shape(model.config, 4_000_000)
    assert shape.factor > 1 and shape.num_layers > 2 and shape.intermediate_size > 48
    wide = widen(model, shape, CPU)
    assert wide.num_parameters() == shape.parameters
    assert abs(shape.parameters - 4_000_000) < 400_000
    tokens = torch.arange(50)[None]
    torch.testing.assert_close(wide(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-4)
    states = wide.model(tokens).last_hidden_state
    assert not states[..., 40:].any()


def test_shapes_are_about_those_of_published_models() -> None:
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=704, num_hidden_layers=16, tie_word_embeddings=True,
    )  # fmt: skip
    shape = wide_shape(config, 8_000_000_000)
    assert shape == WideShape(16, 4096, 32, 64, 16, 16896, shape.parameters)
    assert abs(shape.parameters / 8e9 - 1) < 0.01


def test_a_size_below_the_source_is_refused() -> None:
    config = LlamaConfig(hidden_size=256, head_dim=64, intermediate_size=700, num_hidden_layers=16, vocab_size=4096)
    with pytest.raises(ConfigError, match="too few"):
        wide_shape(config, 1_000_000)
