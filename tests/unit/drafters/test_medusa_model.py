"""Medusa heads compute their formulas: compared with a slow reference without batch and tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from families import VOCAB, make_family
from forerun.drafters.models.medusa.model import MedusaModel
from forerun.errors import IncompatibleDrafterError
from forerun.models import Model, Rows, load_model
from medusa_heads import last_states, random_medusa, reference_logits

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"draft_vocab_size": 40},
    "rows of its own": {"draft_vocab_size": 40, "output_rows": "one"},
    "rows for each head": {"output_rows": "each", "num_layers": 2},
    "sequential": {"sequential": True, "draft_vocab_size": 40, "num_layers": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Model:
    return load_model(folder, dtype="float64")


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def difference(own: Tensor, expected: Tensor) -> float:
    """Return the largest difference where both are finite, and check that both are not finite at the same entries."""
    assert torch.equal(own.isinf(), expected.isinf())
    return float((own - expected).nan_to_num(0.0, 0.0, 0.0).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formulas(kind: str, target: Model) -> None:
    """Compare two sequences in one forward: a chain of two at once, then one more each; then a tree."""
    head = random_medusa(target, **KINDS[kind])
    model = MedusaModel(head, target)
    texts = [tokens(14, 1), tokens(9, 2)]
    states = [last_states(target, head.config, text[:-1])[-1:] for text in texts]
    caches = [model.new_cache() for _ in texts]
    for cache, text in zip(caches, texts, strict=True):
        cache.begin(len(text) - 1)
        cache.num_heads = 3

    def rows(token_ids: list[list[int]], parents: list[int] | None = None) -> list[Rows]:
        return [
            Rows(cache, ids, parents, states=state.expand(len(ids), -1))
            for cache, ids, state in zip(caches, token_ids, states, strict=True)
        ]

    first = model.forward(rows([[text[-1], 3] for text in texts])).logits
    second = model.forward(rows([[5], [7]])).logits
    for place, (text, state) in enumerate(zip(texts, states, strict=True)):
        read = [text[-1], 3, (5, 7)[place]]
        for k, own in enumerate((*first[2 * place : 2 * place + 2], second[place])):
            expected = reference_logits(head, target, state[0], read[: k + 1])
            assert difference(model.widened(own[None])[0], expected) < 1e-6
    for cache, text in zip(caches, texts, strict=True):
        cache.drop()
        cache.begin(len(text) - 1)
    model.forward(rows([text[-1:] for text in texts]))
    for cache in caches:
        cache.commit([0])
    model.forward(rows([[8, 9], [8, 9]], [-1, -1]))
    leaves = model.forward(rows([[1, 2], [1, 2]], [1, 0])).logits
    for place, (text, state) in enumerate(zip(texts, states, strict=True)):
        for leaf, path in enumerate(([9, 1], [8, 2])):
            expected = reference_logits(head, target, state[0], [text[-1], *path])
            assert difference(model.widened(leaves[[2 * place + leaf]])[0], expected) < 1e-6


@pytest.mark.parametrize("kind", ["reduced", "sequential"])
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantize": "int8"}])
def test_other_number_formats_are_near(kind: str, options: dict[str, str], folder: Path, target: Model) -> None:
    head = random_medusa(target, **KINDS[kind])
    state, found = last_states(target, head.config, tokens(20, 4))[-1:], []
    for each in (target, load_model(folder, **options)):  # type: ignore[arg-type]
        model = MedusaModel(head, each)
        cache = model.new_cache()
        cache.begin(20)
        cache.num_heads = 3
        found.append(model.forward([Rows(cache, [3, 4, 5], states=state.expand(3, -1))]).logits.double())
    assert difference(*found) < 0.15 * float(found[0][found[0].isfinite()].std())


def test_heads_of_another_size_are_refused(target: Model) -> None:
    head = random_medusa(target)
    for change in ({"vocab_size": VOCAB + 1}, {"target_hidden_size": 8}):
        with pytest.raises(IncompatibleDrafterError, match="is of a target"):
            MedusaModel(replace(head, config=replace(head.config, **change)), target)  # type: ignore[arg-type]
