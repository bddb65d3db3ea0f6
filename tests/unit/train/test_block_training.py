"""What only the training of block heads has: anchors, blocks at some of them, the confidence, weights of a block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocks import KINDS
from families import make_family
from forerun.errors import ConfigError
from forerun.models import Model, load_model
from forerun.train.block import choose_anchors, confidence_loss, keep_active, position_weights
from forerun.train.heads.module import head_rows
from forerun.train.heads.options import BlockTraining
from packed_documents import packed_documents
from trained_heads import STEPS, TrainedBlock, active_rows


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")), dtype="float64")


@pytest.fixture(scope="module")
def packed() -> tuple[Tensor, Tensor, Tensor]:
    return packed_documents()


def test_anchors_depend_on_their_row_alone(packed: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, wanted, documents = packed
    rows, numbers = head_rows(*packed, STEPS), torch.tensor([5, 9])
    chosen, counts = choose_anchors(rows, wanted, documents, numbers, 3)
    assert len(chosen) == 6 and chosen.tolist() == sorted(set(chosen.tolist()))
    assert counts.sum() == wanted.sum()
    few = keep_active(rows, chosen)
    places = [(of, place) for _, of, place in active_rows(few)]
    assert places == [each[1:] for each in active_rows(rows) if each[0] in chosen.tolist()]
    assert places[:3] != [(of, place) for _, of, place in active_rows(rows)][:3]  # not the first ones
    alone = head_rows(tokens[1:], wanted[1:], documents[1:], STEPS)
    own, _ = choose_anchors(alone, wanted[1:], documents[1:], numbers[1:], 3)
    assert [place for _, _, place in active_rows(keep_active(alone, own))] == [place for of, place in places if of == 2]
    every, _ = choose_anchors(rows, wanted, documents, numbers, 100)
    assert every.tolist() == list(range(len(rows.active)))
    drawn = {tuple(choose_anchors(rows, wanted, documents, torch.tensor([n, n]), 2)[0].tolist()) for n in range(30)}
    assert len(drawn) > 10


def test_blocks_at_some_anchors_are_those_at_all(target: Model, packed: tuple[Tensor, Tensor, Tensor]) -> None:
    trained, rows = TrainedBlock(target, KINDS["everything"]), head_rows(*packed, STEPS)
    chosen = torch.tensor([0, 3, 4, len(rows.active) - 1])
    assert torch.allclose(trained.logits(keep_active(rows, chosen)), trained.logits(rows)[:, chosen])


def test_the_confidence_learns_the_overlap_and_nothing_else(
    target: Model, packed: tuple[Tensor, Tensor, Tensor]
) -> None:
    trained = TrainedBlock(target, {"markov_rank": 3, "confidence": True})
    head, of_target = trained.module, trained.inputs(head_rows(*packed, STEPS)).target
    outputs = torch.randn(2, 3, 64, dtype=torch.float64, requires_grad=True)
    before = torch.tensor([[1, 2, 3], [4, 5, 6]])
    overlaps, weights = torch.rand(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    found = confidence_loss(head, of_target, outputs, before, overlaps, weights)
    layer = head.get_parameter("confidence_head.proj.weight")[0]
    expected = 0.0
    for row in range(2):
        for k in range(3):
            embedded = head.get_parameter("markov_head.markov_w1.weight")[before[row, k]]
            logit = layer @ torch.cat([outputs[row, k], embedded]) + head.get_parameter("confidence_head.proj.bias")[0]
            wanted = overlaps[row, k]
            expected -= weights[row, k] * (wanted * F.logsigmoid(logit) + (1 - wanted) * F.logsigmoid(-logit))  # type: ignore[assignment]
    assert torch.allclose(found, torch.as_tensor(expected))
    found.backward()
    changed = {name for name, parameter in head.named_parameters() if parameter.grad is not None}
    assert changed == {"confidence_head.proj.weight", "confidence_head.proj.bias"} and outputs.grad is None


def test_weights_decay_as_told() -> None:
    weights = position_weights(BlockTraining(gamma=2.0), 3)
    assert weights.sum() == pytest.approx(1)
    assert (weights[1:] / weights[:-1]).tolist() == pytest.approx([0.60653] * 2, 1e-4)


def test_more_tokens_than_a_block_has_are_refused(target: Model, packed: tuple[Tensor, Tensor, Tensor]) -> None:
    with pytest.raises(ConfigError, match="blocks of 3 tokens draft no 4 tokens"):
        TrainedBlock(target, {}).logits(head_rows(*packed, STEPS + 1))
