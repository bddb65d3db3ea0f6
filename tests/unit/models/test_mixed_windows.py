"""Sliding and full layers in one model, in the fused decoder: each layer has its own window."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

from families import VOCAB
from forerun.models import Model, Rows, load_model

WINDOW = 24
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


def save(folder: Path, kinds: list[str]) -> Path:
    torch.manual_seed(0)
    config = tf.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=None,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=0,
        layer_types=kinds,
    )
    model = tf.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("mixed"), KINDS)


def tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def in_parts(model: Model, text: list[int], sizes: list[int]) -> torch.Tensor:
    cache, done, logits = model.new_cache(), 0, []
    for size in sizes:
        logits.append(model.forward([Rows(cache, text[done : done + size])]).logits)
        cache.commit(range(size))
        done += size
    return torch.cat(logits)


def reference(folder: Path, text: list[int]) -> torch.Tensor:
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([text])).logits[0]
    return logits


@pytest.mark.parametrize("kind", ["fused", "general"])
def test_logits_match_transformers(folder: Path, kind: str) -> None:
    model = load_model(folder, dtype="float64", kind=kind)  # type: ignore[arg-type]
    text = tokens(90)
    expected = reference(folder, text)
    torch.testing.assert_close(in_parts(model, text, [50, 7, 1, 32]), expected, atol=2e-5, rtol=0)


def test_the_kinds_make_a_difference(folder: Path, tmp_path: Path) -> None:
    """Check that the layer types matter: otherwise a model that treats all layers alike would pass."""
    text = tokens(90)
    expected = reference(folder, text)
    for kinds in (["full_attention"] * 4, ["sliding_attention"] * 4, KINDS[1:] + KINDS[:1]):
        other = reference(save(tmp_path / "-".join(kinds), kinds), text)
        assert float((other - expected)[WINDOW + 1 :].abs().max()) > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_company(folder: Path, dtype: str) -> None:
    model = load_model(folder, dtype=dtype)
    assert model.kind == "fused" and model.exactness.exact, model.exactness.reason
    text = tokens(270)
    assert torch.equal(in_parts(model, text, [240, *[1] * 30]), in_parts(model, text, [240, 5, 9, 2, 14]))


def test_a_tree_sees_its_own_path_through_both_kinds(folder: Path) -> None:
    model = load_model(folder, dtype="float64")
    text, nodes, parents = tokens(40), [3, 4, 5, 6, 7, 8], [-1, 0, 0, 1, 1, 4]
    cache = model.new_cache()
    model.forward([Rows(cache, text, num_logits=0)])
    cache.commit(range(40))
    tree = model.forward([Rows(cache, nodes, parents)]).logits
    for leaf, path in ((2, [0, 2]), (3, [0, 1, 3]), (5, [0, 1, 4, 5])):
        expected = reference(folder, [*text, *(nodes[node] for node in path)])
        torch.testing.assert_close(tree[leaf], expected[-1], atol=2e-5, rtol=0)
