"""Early exit: the first layers are computed once, and verification continues from them, to the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor

from families import VOCAB, make_family
from forerun.errors import UnsupportedModelError
from forerun.kv_cache import SequenceCache
from forerun.models import Model, Rows, load_model

LAYERS = 4
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SHAPE, head_dim=32)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SHAPE, sliding_window=24)),
}


@pytest.fixture(scope="module", params=[(f, d) for f in FAMILIES for d in ("float32", "bfloat16")], ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, dtype = request.param
    torch.manual_seed(0)
    made = FAMILIES[family]()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    folder = tmp_path_factory.mktemp(family)
    made.save_pretrained(folder)
    return load_model(folder, dtype=dtype)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompted(model: Model, prompt: list[int]) -> SequenceCache:
    cache = model.new_cache()
    model.forward([Rows(cache, prompt, num_logits=0)])
    cache.commit(range(len(prompt)))
    return cache


def drafted(model: Model, cache: SequenceCache, new: Sequence[int], first: int) -> Tensor:
    """Return hidden states entering layer `first`, fed one row at a time beyond the cache's length."""
    return torch.cat([model.forward_first([Rows(cache, [token_id])], first)[0] for token_id in new])


def held(cache: SequenceCache) -> list[Tensor]:
    return [stored[:, : cache.length].clone() for layer in range(len(cache.shapes)) for stored in cache.read(layer)]


@pytest.mark.sampled(18)
@pytest.mark.parametrize("first", range(1, LAYERS))
@pytest.mark.parametrize(("length", "k"), [(1, 1), (253, 4), (255, 8), (62, 2)])
def test_verification_goes_on_from_the_draft(model: Model, first: int, length: int, k: int) -> None:
    """Verify beside a prompt chunk, a plain sequence, and another sequence that resumes."""
    prompt, new = tokens(length), tokens(k + 1, seed=1)
    other_prompt, other_new = tokens(40, seed=2), tokens(3, seed=3)
    chunk, plain_new = tokens(33, seed=4), tokens(2, seed=5)

    def batch(caches: list[SequenceCache], hidden: Tensor | None, other: Tensor | None) -> list[Rows]:
        at = 0 if hidden is None else first
        return [
            Rows(caches[0], chunk, num_logits=1),
            Rows(caches[1], new, None, None, hidden, at),
            Rows(caches[2], plain_new),
            Rows(caches[3], other_new, None, 2, other, at),
        ]

    def caches() -> list[SequenceCache]:
        return [model.new_cache(), prompted(model, prompt), prompted(model, chunk), prompted(model, other_prompt)]

    expected_caches, own_caches = caches(), caches()
    expected = model.forward(batch(expected_caches, None, None)).logits
    hidden = drafted(model, own_caches[1], new, first)
    other = drafted(model, own_caches[3], other_new, first)
    assert own_caches[1].length == length
    assert hidden.is_floating_point()
    assert torch.equal(model.forward(batch(own_caches, hidden, other)).logits, expected)
    for own, wanted in zip(own_caches, expected_caches, strict=True):
        own.commit(range(2))
        wanted.commit(range(2))
        assert all(torch.equal(a, b) for a, b in zip(held(own), held(wanted), strict=True))
    going_on = [model.forward([Rows(cache, [7]) for cache in own]).logits for own in (own_caches, expected_caches)]
    assert torch.equal(*going_on)


def test_alone(model: Model) -> None:
    """Resume with one row only, which is padded."""
    expected = model.forward([Rows(prompted(model, tokens(9)), [5])]).logits
    cache = prompted(model, tokens(9))
    hidden, _ = model.forward_first([Rows(cache, [5])], 2)
    assert hidden.shape == (1, 64)
    assert torch.equal(model.forward([Rows(cache, [5], hidden=hidden, first_layer=2)]).logits, expected)


def test_logits_are_those_of_a_model_with_the_first_layers_only(model: Model) -> None:
    reference = tf.AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float32)
    reference.model.layers = reference.model.layers[:2]
    text = tokens(12)
    with torch.inference_mode():
        expected = reference(torch.tensor([text])).logits[0]
    hidden, logits = model.forward_first([Rows(model.new_cache(), text, num_logits=5)], 2)
    assert hidden.shape == (12, 64)
    tolerance = 2e-4 if model.dtype == torch.float32 else 0.5
    torch.testing.assert_close(logits, expected[-5:], atol=tolerance, rtol=0)


def test_growth_keeps_what_was_drafted(model: Model) -> None:
    cache = prompted(model, tokens(250))
    expected = model.forward([Rows(prompted(model, tokens(250)), list(range(10)))]).logits
    hidden = drafted(model, cache, range(10), 3)
    assert cache.length == 250
    assert torch.equal(model.forward([Rows(cache, range(10), hidden=hidden, first_layer=3)]).logits, expected)


def test_refusals(model: Model) -> None:
    cache = prompted(model, tokens(5))
    hidden, _ = model.forward_first([Rows(cache, [1, 2, 3])], 1)
    other = Rows(prompted(model, tokens(5)), [1, 2, 3], hidden=hidden, first_layer=2)
    with pytest.raises(ValueError, match="same"):
        model.forward([Rows(cache, [1, 2, 3], hidden=hidden, first_layer=1), other])
    with pytest.raises(ValueError, match="tree"):
        model.forward([Rows(cache, [1, 2, 3], [-1, 0, 0], hidden=hidden, first_layer=1)])
    with pytest.raises(ValueError, match="3 hidden states"):
        model.forward([Rows(cache, [1, 2], hidden=hidden, first_layer=1)])
    with pytest.raises(ValueError, match="already"):
        model.forward_first([Rows(cache, [1, 2, 3], hidden=hidden, first_layer=1)], 2)
    for number in (0, LAYERS):
        with pytest.raises(ValueError, match="from 1 to 3"):
            model.forward_first([Rows(cache, [1])], number)
        with pytest.raises(ValueError, match="from 1 to 3"):
            model.forward([Rows(cache, [1, 2, 3], hidden=hidden, first_layer=number)])
    assert model.can_exit_early
    assert model.num_layers == LAYERS


def test_the_general_path_refuses(tmp_path: Path) -> None:
    general = load_model(make_family("codegen", tmp_path), dtype="float32")
    assert not general.can_exit_early
    assert general.num_layers == 2
    with pytest.raises(UnsupportedModelError, match=r"cannot exit early.*general path"):
        general.forward_first([Rows(general.new_cache(), [1])], 1)
    with pytest.raises(UnsupportedModelError, match="cannot go on"):
        general.forward([Rows(general.new_cache(), [1], hidden=torch.zeros(1, 64), first_layer=1)])
