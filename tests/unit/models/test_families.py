"""Every model family against Transformers, by both decoders, and the self-test against longer trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from families import FAMILIES, ONLY_FUSED, SCANNED, VOCAB, Folders, make_family
from forerun.errors import ConfigError, UnsupportedModelError
from forerun.models import Model, Rows, load_model
from forerun.models.families.table import refusal

# Transformers computes norms and the rotation in float32 even then, so paths agree to float32, not to float64
FLOAT64_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Folders(tmp_path_factory.mktemp("families"))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["fused", "general"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family: str, kind: str, folders: dict[str, Path]) -> None:
    if kind == "fused" and refusal(AutoConfig.from_pretrained(folders[family])):
        with pytest.raises(ConfigError, match="decoder cannot serve"):
            load_model(folders[family], dtype="float64", kind="fused")
        return
    if kind == "general" and family in ONLY_FUSED:
        with pytest.raises(UnsupportedModelError):
            load_model(folders[family], dtype="float64", kind="general")
        return
    model = load_model(folders[family], dtype="float64", kind=kind)  # type: ignore[arg-type]
    reference = AutoModelForCausalLM.from_pretrained(
        folders[family], dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    prompt = tokens(70)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].double()
    cache = model.new_cache()
    first = model.forward([Rows(cache, prompt[:50])]).logits
    cache.commit(range(50))
    rest = model.forward([Rows(cache, prompt[50:])]).logits
    tolerance = 1e-4 if family in SCANNED else FLOAT64_TOLERANCE
    torch.testing.assert_close(torch.cat([first, rest]), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("kimi_linear", {}, "layers of type linear_attention keep a state that cannot be rolled back"),
        ("qwen3_next", {"hidden_act": "gelu"}, "fused decoder alone, which does not take hidden_act='gelu'"),
    ],
)
def test_layers_that_keep_a_state_are_named(family: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path, **options)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(folder)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_tree_computes_each_path_as_a_chain_would(family: str, folders: dict[str, Path]) -> None:
    model = load_model(folders[family], dtype="float64")
    prompt, nodes = tokens(30), tokens(7, seed=1)
    parents = [-1, 0, 0, 1, 1, 2, 4]
    cache = model.new_cache()
    model.forward([Rows(cache, prompt, num_logits=0)])
    cache.commit(range(30))
    tree = model.forward([Rows(cache, nodes, parents)]).logits
    for leaf, path in ((3, [0, 1, 3]), (5, [0, 2, 5]), (6, [0, 1, 4, 6])):
        chain_cache = model.new_cache()
        chain = model.forward([Rows(chain_cache, [*prompt, *(nodes[node] for node in path)])]).logits
        torch.testing.assert_close(tree[leaf], chain[-1], atol=FLOAT64_TOLERANCE, rtol=0)
    cache.commit([0, 1, 4, 6])
    again = model.forward([Rows(cache, [7])]).logits
    reference = model.new_cache()
    expected = model.forward([Rows(reference, [*prompt, *(nodes[node] for node in (0, 1, 4, 6)), 7])]).logits
    torch.testing.assert_close(again[0], expected[-1], atol=FLOAT64_TOLERANCE, rtol=0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_models_keep_their_word(family: str, dtype: str, folders: dict[str, Path]) -> None:
    """Compare rows one by one with rows in groups, across a block of keys; inexact models name a module."""
    model = load_model(folders[family], dtype=dtype)
    assert model.exactness.exact, model.exactness.reason
    text = tokens(290)
    assert torch.equal(in_groups(model, text, [1] * 50), in_groups(model, text, [4, 9, 2, 17, 6, 8, 4]))


def in_groups(model: Model, text: list[int], sizes: list[int]) -> torch.Tensor:
    done = len(text) - sum(sizes)
    cache = model.new_cache()
    model.forward([Rows(cache, text[:done], num_logits=0)])
    cache.commit(range(done))
    logits = []
    for size in sizes:
        logits.append(model.forward([Rows(cache, text[done : done + size])]).logits)
        cache.commit(range(size))
        done += size
    return torch.cat(logits)


def test_packed_order_and_wanted_logits(folders: dict[str, Path]) -> None:
    model = load_model(folders["llama"], dtype="float64")
    a, b = tokens(6), tokens(3, seed=2)
    full_a = model.forward([Rows(model.new_cache(), a)]).logits
    full_b = model.forward([Rows(model.new_cache(), b)]).logits
    batch = [Rows(model.new_cache(), a, num_logits=2), Rows(model.new_cache(), b, num_logits=0)]
    torch.testing.assert_close(model.forward(batch).logits, full_a[-2:])
    batch = [Rows(model.new_cache(), a, num_logits=1), Rows(model.new_cache(), b)]
    torch.testing.assert_close(model.forward(batch).logits, torch.cat([full_a[-1:], full_b]))
    assert model.forward([Rows(model.new_cache(), a, num_logits=0)]).logits.shape == (0, VOCAB)
