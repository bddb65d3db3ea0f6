"""A block head computes its formulas: compared with a slow reference without cache and batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blocks import FULL, KINDS, hidden_outputs_of, proposed, random_block, reference_block
from families import VOCAB, make_family
from forerun.drafters.models.block.model import BlockInput, BlockModel
from forerun.drafters.models.heads.config import StoredHead
from forerun.errors import IncompatibleDrafterError
from forerun.models import Model, Rows, load_model
from forerun.types import Cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Model:
    return load_model(folder, dtype="float64")


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fed(model: BlockModel, head: StoredHead, target: Model, texts: list[list[int]], chunks: list[slice]) -> list:
    """Caches with the context rows of all tokens but the last."""
    caches = [model.new_cache() for _ in texts]
    fused = [model.fuse(hidden_outputs_of(target, head, text)[:-1]) for text in texts]
    for chunk in chunks:
        batch = [
            Rows(cache, text[1:][chunk], num_logits=0, states=part[chunk])
            for cache, text, part in zip(caches, texts, fused, strict=True)
        ]
        model.forward(batch)
        for rows in batch:
            rows.cache.commit(range(len(rows.token_ids)))
    return caches


def behind(cache: Cache, model: BlockModel, head: StoredHead, target: Model, text: list[int], count: int) -> BlockInput:
    """Return a block after a text whose context rows are computed."""
    return BlockInput(cache, text[-1], count, model.fuse(hidden_outputs_of(target, head, text)[-2:-1])[0])


def laws(model: BlockModel, outputs: Tensor, logits: Tensor, before: list[int]) -> tuple[Tensor, Tensor]:
    """Return logits with the bias of the tokens before, and the confidence."""
    given = torch.tensor(before)
    bias, sure = model.bias(given), model.acceptance(outputs, given)
    return logits if bias is None else logits + bias, torch.zeros(len(before)) if sure is None else sure


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_formulas(kind: str, target: Model) -> None:
    """Compare two sequences in one pass, fed in chunks; blocks of different lengths, and a second block after more
    context."""
    head = random_block(target, **KINDS[kind])
    model = BlockModel(head, target)
    texts = [tokens(15, 1), tokens(9, 2)]
    caches = fed(model, head, target, texts, [slice(0, 5), slice(5, None)])
    counts = [4, 3]
    for _ in range(2):  # dropped, nothing of a block is left
        blocks = [behind(cache, model, head, target, text, count) for cache, text, count in zip(caches, texts, counts)]
        outputs, logits = model.draft(blocks)
        for cache in caches:
            cache.drop()
    for text, part, own in zip(texts, outputs.split(counts), logits.split(counts), strict=True):
        before = [text[-1], 5, 7, 2][: len(part)]
        found, sure = laws(model, part, own, before)
        expected, accept_probs = reference_block(head, target, text, before)
        assert torch.allclose(found, expected, atol=1e-5)  # angles are of float32
        assert torch.allclose(sure.double(), accept_probs, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16", "quantize": "int8"}]
)
def test_other_number_formats_are_near(options: dict[str, str], folder: Path, target: Model) -> None:
    head = random_block(target, **FULL)
    text = tokens(70, 4)
    found = []
    for each in (target, load_model(folder, **options)):  # type: ignore[arg-type]
        model = BlockModel(head, each)
        (cache,) = fed(model, head, each, [text], [slice(0, None)])
        found.append(
            laws(model, *model.draft([behind(cache, model, head, each, text, 4)]), [text[-1], 1, 2, 3])[0].double()
        )
    exact, near = found
    assert (near - exact).norm() < (0.002 if options["dtype"] == "float32" else 0.25) * exact.norm()
    assert torch.equal(model.widened(near).argmax(-1), proposed(head)[near.argmax(-1)])


def test_a_head_of_another_target_is_refused(target: Model) -> None:
    head = random_block(target)
    wide = replace(head, config=replace(head.config, vocab_size=VOCAB + 1))
    with pytest.raises(IncompatibleDrafterError, match="is of a target of"):
        BlockModel(wide, target)
