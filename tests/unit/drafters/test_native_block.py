"""A block head by the native kernels, with each instruction set, beside the same head in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blocks import FULL, KINDS, hidden_outputs_of, random_block
from families import VOCAB, make_family
from forerun.drafters.models.block.layers import NativeBlockLayers, PairLayers, ReferenceBlockLayers
from forerun.drafters.models.block.model import BlockInput, BlockModel
from forerun.drafters.models.eagle.layer import NativeEagleLayer, ReferenceEagleLayer
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import Rows, load_model
from kernel_cases import THREADS, threads

pytestmark = pytest.mark.usefixtures("instructions")
KINDS = {
    **KINDS,
    "narrow window": {"sliding_window": 9, "num_layers": 3, "num_kv_heads": 4},
    "odd widths": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 10, "intermediate_size": 33, "draft_vocab_size": 37},
}
COUNTS = [4, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("family"))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


TEXTS = [tokens(PAGE + 9, 1), tokens(9, 2)]


def fed(model: BlockModel, hidden_outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[BlockInput]]:
    """Feed the fused states, and blocks behind their context rows, in two chunks, side by side."""
    fused, caches = [model.fuse(each) for each in hidden_outputs], [model.new_cache() for _ in hidden_outputs]
    for chunk in (slice(0, 5), slice(5, None)):
        batch = [
            Rows(cache, text[1:][chunk], num_logits=0, states=part[chunk])
            for cache, part, text in zip(caches, fused, TEXTS, strict=True)
        ]
        model.forward(batch)
        for rows in batch:
            rows.cache.commit(range(len(rows.token_ids)))
    return fused, [
        BlockInput(cache, text[-1], count, part[-1])
        for cache, text, count, part in zip(caches, TEXTS, COUNTS, fused, strict=True)
    ]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_pytorch_does(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare heads with the same quantized weights: context rows over a page's end, then blocks of different
    lengths."""
    target = load_model(folder, dtype="float32", quantize="int8")
    head = random_block(target, **KINDS[kind])
    hidden_outputs = [hidden_outputs_of(target, head, text)[:-1] for text in TEXTS]
    found: list[list[Tensor]] = []
    for layers in ((NativeBlockLayers, NativeEagleLayer), (ReferenceBlockLayers, ReferenceEagleLayer)):
        model = BlockModel(head, target)
        computes = model._layers._layer if isinstance(model._layers, PairLayers) else model._layers
        assert isinstance(computes, layers)
        monkeypatch.setenv("FORERUN_KERNELS", "reference")  # a head's kernels are chosen when it is made
        fused, blocks = fed(model, hidden_outputs)
        found.append([*fused, *model.draft(blocks)])
    for native_part, reference_part in zip(*found, strict=True):
        assert native_part.shape == reference_part.shape
        assert (native_part - reference_part).norm() < 0.003 * reference_part.norm()


@pytest.mark.parametrize("kind", ["everything", "tokens and everything"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_block_has_the_same_bits_alone_and_in_company(quantize: str | None, kind: str, folder: Path) -> None:
    target = load_model(folder, quantize=quantize)
    head = random_block(target, **KINDS[kind])
    model = BlockModel(head, target)
    hidden_outputs = [hidden_outputs_of(target, head, text)[:-1] for text in TEXTS]
    _, blocks = fed(model, hidden_outputs)
    together = [each.split(COUNTS) for each in model.draft(blocks)]
    for block in blocks:
        block.cache.drop()
    for count in THREADS:
        with threads(count):
            for number, block in enumerate(blocks):
                for whole, alone in zip(together, model.draft([block]), strict=True):
                    assert torch.equal(whole[number], alone)
                block.cache.drop()


def test_rows_without_a_state_each_are_refused(folder: Path) -> None:
    target = load_model(folder)
    model = BlockModel(random_block(target), target)
    for states, num_logits in ((None, 0), (torch.zeros(2, 64), 0), (torch.zeros(3, 64), 1)):
        with pytest.raises(ValueError, match="context rows"):
            model.forward([Rows(model.new_cache(), [0, 0, 0], num_logits=num_logits, states=states)])


def greedy(model: BlockModel, logits: Tensor, block: BlockInput, start: int) -> list[int]:
    """Return the tokens of one chain, one by one."""
    chosen = [block.token_id]
    for row in logits[start : start + block.num_tokens]:
        bias = model.bias(torch.tensor(chosen[-1:]))
        wanted = row if bias is None else row + bias[0]
        if not wanted.isfinite().all():
            break
        chosen.append(int(model.token_ids[wanted.argmax()]))
    return chosen[1:]


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 40}, {"draft_vocab_size": 33, "markov_rank": 6}, FULL])
def test_likely_tokens_are_those_of_greedy_chains(options: dict[str, int], quantize: str | None, folder: Path) -> None:
    """Compare chains of different lengths at once; they end where a logit is not finite."""
    target = load_model(folder, quantize=quantize)
    model = BlockModel(random_block(target, **options), target)
    lasts, counts = [3, 1, VOCAB - 1, 7], [4, 1, 3, 4]
    blocks = [BlockInput(model.new_cache(), last, count) for last, count in zip(lasts, counts, strict=True)]
    logits = 0.5 * torch.randn(12, model.config.draft_vocab_size, generator=torch.Generator().manual_seed(3))
    starts = [0, 4, 5, 8]
    for bad in (None, (1, 0, "nan"), (5, -1, "inf"), (11, 20, "nan")):
        if bad is not None:
            logits[bad[0], bad[1]] = float(bad[2])
        expected = [greedy(model, logits, block, start) for block, start in zip(blocks, starts, strict=True)]
        for count in THREADS:
            with threads(count):
                assert model.likely(logits, blocks) == expected
    assert [len(chain) for chain in expected] == [1, 1, 0, 3]
