"""Whole native layers of any shape, with weights of all kinds mixed: near the decoder in PyTorch, and exact."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import example, given, strategies as st
from torch import Tensor, nn

from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.cpu.page_layout import CACHE_FORMATS
from forerun.kernels.partition import AttentionShape
from forerun.kernels.quantize import GROUP, QuantizedWeight, quantize_int4, quantize_int8, quantize_symmetric
from forerun.kernels.torch.linear import QuantizedLinear
from forerun.models.attention.base import Layout
from forerun.models.attention.reference import ReferenceAttention
from forerun.models.base import Rows
from forerun.models.fused.decoder import FusedDecoder
from forerun.models.fused.native import NativeDecoder
from forerun.models.linear import LinearPart, make_linear
from forerun.models.model import lay_out
from fuzzing import examples
from kernel_cases import BFLOAT16_READERS, as_read, each_set, threads

VOCAB = 23
FAMILIES = {
    "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
    "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM),
    "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
    "mistral": (tf.MistralConfig, tf.MistralForCausalLM),
}
_LEAST = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
TINY = "mistral", _LEAST | {"hidden_size": 1, "intermediate_size": 1, "head_dim": 2, "tie_word_embeddings": True}
"""A rounded key changes much of what it computes."""
SMALL = "llama", _LEAST | {"hidden_size": 6, "intermediate_size": 8, "head_dim": 6}
"""Rounded activations change some of what it computes."""


def in_groups(weight: Tensor, bits: int) -> QuantizedWeight:
    """GGUF's Q8_0 and Q4_0: groups about their zero."""
    most, zero = (127, 128) if bits == 8 else (7, 8)
    padded = nn.functional.pad(weight, (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)
    scale = (padded.abs().amax(-1) / most).half()
    codes = (padded / scale.float().clamp_min(1e-8)[..., None]).round().clamp(-most, most) + zero
    codes = codes.to(torch.uint8).view(len(weight), -1)[:, : weight.shape[1]].contiguous()
    return QuantizedWeight(bits, codes, zero, scale, None, GROUP)


class Beside(nn.Module):
    """Layers one after another, as one."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self._layers = layers
        self.out_features = sum(layer.out_features for layer in layers)
        self.in_features = layers[0].in_features

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer.forward(x) for layer in self._layers], -1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self.forward(x)


class AsRead(nn.Module):
    """The product of a float weight, in float32, with rows as the instruction set in use reads them."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._library, self._weight, self._product = library, weight, make_linear(weight.float(), bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        return self._product.forward(as_read(self._library, self._weight, x))


class AsCached(ReferenceAttention):
    """Attention to keys and values as a cache of this type has them: a few coarse numbers may move all that follows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(torch.float32)
        self._cached = dtype

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, layout: Layout, form: AttentionShape
    ) -> Tensor:
        return super().forward(layer, query, self._as_cached(key), self._as_cached(value), layout, form)

    def _as_cached(self, x: Tensor) -> Tensor:
        if self._cached == torch.int8:
            codes, scale = quantize_symmetric(x)
            return codes * scale
        return x.to(self._cached).float()


class MixedMaker:
    """Makes layers of a kind drawn for each parameter: native ones, or by the references."""

    def __init__(self, seed: int, library: Library, *, is_native: bool) -> None:
        self._seed, self._library, self._is_native = seed, library, is_native

    def linear(self, parts: Sequence[LinearPart], bias: Tensor | None = None, *, is_head: bool = False) -> Any:
        if self._is_native:
            return NativeLinear(self._library, self._weight(parts[0]), bias)
        biases = [None] * len(parts) if bias is None else bias.split([len(part.weight) for part in parts])
        return Beside([self._reference(part, each) for part, each in zip(parts, biases, strict=True)])

    def embedding(self, part: LinearPart) -> Tensor:
        weight = self._weight(part)
        return weight.dequantize(torch.float32) if isinstance(weight, QuantizedWeight) else weight.float()

    def _reference(self, part: LinearPart, bias: Tensor | None) -> Any:
        weight = self._weight(part)
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(weight if part.rows is None else weight.rows(part.rows), bias)
        return AsRead(self._library, weight if part.rows is None else weight[part.rows], bias)

    def _weight(self, part: LinearPart) -> Tensor | QuantizedWeight:
        weight = part.weight.detach()
        kinds = [
            lambda: weight,
            weight.bfloat16,
            lambda: quantize_int8(weight),
            lambda: quantize_int4(weight),
            lambda: in_groups(weight, 8),
            lambda: in_groups(weight, 4),
        ]
        return random.Random(f"{self._seed} {part.name}").choice(kinds)()


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 4))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    options = {
        "hidden_size": heads * draw(st.integers(1, 12)),  # Transformers wants a multiple
        "intermediate_size": draw(st.integers(1, 90)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 20)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family == "mistral":
        options["sliding_window"] = draw(st.one_of(st.none(), st.integers(1, 70)))
    return family, options


def drawn_model(family: str, options: dict[str, Any], seed: int) -> Any:
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(vocab_size=VOCAB, max_position_embeddings=512, **options)
    model = model_class(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(1 if parameter.dim() == 1 else 0, 0.3)
    return model


def logits_of(decoder: Any, batch: Sequence[Rows]) -> Tensor:
    return decoder.forward(lay_out(batch, decoder.planner))[0][: sum(len(rows.token_ids) for rows in batch)]


@given(
    config=configs(),
    cache_dtype=st.sampled_from(list(CACHE_FORMATS)),
    length=st.one_of(st.integers(0, 80), st.sampled_from([63, 64])),
    n=st.integers(1, 64),
    seed=st.integers(0, 1 << 30),
)
@example(config=TINY, cache_dtype=torch.bfloat16, length=9, n=6, seed=98)
@example(config=SMALL, cache_dtype=torch.float32, length=0, n=4, seed=5905382)
@examples(4)
@pytest.mark.filterwarnings("ignore")
@torch.inference_mode()
def test_layers(
    config: tuple[str, dict[str, Any]],
    cache_dtype: torch.dtype,
    length: int,
    n: int,
    seed: int,
    native_library: Library,
) -> None:
    rng = random.Random(seed)
    prompt, tokens = ([rng.randrange(VOCAB) for _ in range(count)] for count in (length, n))
    parents = [max(-1, i - 1 - rng.choice((0, 0, 1, 5))) for i in range(n)]
    node = rng.randrange(n)
    maker = partial(MixedMaker, seed, native_library)
    ours = NativeDecoder(drawn_model(*config, seed), native_library, maker(is_native=True), cache_dtype)
    reference = FusedDecoder(drawn_model(*config, seed), maker(is_native=False))
    reference.attention = AsCached(cache_dtype)

    def sequence(decoder: Any, start: Sequence[int] = prompt) -> Any:
        cache = decoder.planner.new_cache()
        if start:
            logits_of(decoder, [Rows(cache, list(start))])
            cache.commit(range(len(start)))
        return cache

    for name in each_set(native_library):
        crowd = [Rows(sequence(ours, tokens[:9]), tokens[:7]), Rows(sequence(ours), tokens, parents)]
        rows = logits_of(ours, crowd)[len(tokens[:7]) :]
        expected = logits_of(reference, [Rows(sequence(reference), tokens, parents)])
        error = (rows - expected).norm() / expected.norm()
        is_exact = cache_dtype == torch.float32 and name not in BFLOAT16_READERS
        assert error < (0.001 if is_exact else 0.03), name  # what lies between two rounded numbers goes to either
        for count in (1, 2):
            with threads(count):
                assert torch.equal(logits_of(ours, [Rows(sequence(ours), tokens, parents)]), rows), (name, count)
                alone, path, row = sequence(ours), [], node
                while row >= 0:
                    path.insert(0, row)
                    row = parents[row]
                for row in path:
                    assert torch.equal(logits_of(ours, [Rows(alone, [tokens[row]])])[0], rows[row]), (name, count)
                    alone.commit([0])
