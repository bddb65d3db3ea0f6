"""What training computes of a block head is what drafting computes: against a slow reference and the served head, in
float64.

Two rows of three documents stand for a batch above one; a shifted implementation must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocks import KINDS, hidden_outputs_of, proposed, random_block, reference_block
from families import VOCAB, make_family
from forerun.drafters.models.block.model import BlockInput, BlockModel
from forerun.drafters.models.heads.config import StoredHead
from forerun.errors import ConfigError
from forerun.models import Model, Rows, load_model
from forerun.train import block as block_module
from forerun.train.block import BlockHead, blocks, choose_anchors, confidence_loss, keep_active, logit_parts
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads.module import HeadRows, head_rows, predicted

K = 4
LENGTHS = ((9, 5), (12,))
"""Of the documents of each row."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")), dtype="float64")


@pytest.fixture(scope="module")
def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Rows of 15 tokens; the first tokens of the longer documents are a prompt."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (len(LENGTHS), 15), generator=generator)
    documents = torch.full(tokens.shape, NO_DOCUMENT, dtype=torch.int32)
    wanted = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            documents[row, start : start + length] = number
            wanted[row, start + min(3, length - 3) : start + length] = True
            start += length
    return tokens, wanted, documents


def texts(rows: HeadRows) -> list[list[int]]:
    return [part.tolist() for part in rows.token_ids.split(rows.lengths)]


def anchored(rows: HeadRows) -> list[tuple[int, int, int]]:
    """Active row, document, place of the anchor in the document."""
    document = torch.repeat_interleave(torch.arange(len(rows.lengths)), torch.tensor(rows.lengths))
    of = document[rows.states][rows.active].tolist()
    places = (rows.positions[rows.active] + 1).tolist()
    return [(index, of[index], places[index]) for index in range(len(of))]


def module(head: StoredHead[Any]) -> BlockHead:
    made = BlockHead(head.config).double()
    made.load_state_dict({name: tensor.double() for name, tensor in head.tensors.items()})
    return made


class Served:
    """What `logit_parts` reads of a target."""

    def __init__(self, head: StoredHead[Any], target: Model) -> None:
        self.output_rows = target.output_rows(proposed(head)).double()
        self._target = target

    def embeddings(self, token_ids: Tensor) -> Tensor:
        return self._target.embedding_rows(token_ids).clone()


def trained(head: StoredHead[Any], target: Model, rows: HeadRows) -> tuple[Tensor, Tensor, Tensor]:
    """[A, K, V] logits, [A, K, H] outputs, and [A, K] the tokens before."""
    states = torch.cat([hidden_outputs_of(target, head, text) for text in texts(rows)])
    embeddings = target.embedding_rows(rows.token_ids).clone().double()
    made = module(head)
    mask = head.tensors.get("mask_embedding.weight")
    if mask is None and head.config.mask_token_id is not None:
        mask = target.embedding_rows(torch.tensor([head.config.mask_token_id]))[0].clone()
    outputs = blocks(made, rows, states, embeddings, mask, torch.float64)
    before = rows.token_ids[rows.tokens.T]
    parts = logit_parts(made, Served(head, target), outputs.flatten(0, 1), before.flatten())  # type: ignore[arg-type]
    logits = sum(features @ layer.T for features, layer in parts)
    return logits.view(*before.shape, -1).detach(), outputs.detach(), before  # type: ignore[union-attr]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_reference_and_of_drafting(
    kind: str, target: Model, packed: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Every anchor, of all documents at once; the served head drafts from some of them in one batch."""
    head = random_block(target, **KINDS[kind])
    rows = head_rows(*packed, K)
    logits, _, before = trained(head, target, rows)
    whole = [(index, of, place) for index, of, place in anchored(rows) if place + K < rows.lengths[of]]
    assert len(whole) > 8
    for index, of, place in whole:
        text = texts(rows)[of]
        given = text[place : place + K]
        assert before[index].tolist() == given
        expected, _ = reference_block(head, target, text[: place + 1], given)
        assert torch.allclose(logits[index], expected, atol=1e-5), (index, place)
    served, chosen = BlockModel(head, target), whole[::3]
    drafted = []
    for _, of, place in chosen:
        cache, text = served.new_cache(), texts(rows)[of]
        hidden_outputs = hidden_outputs_of(target, head, text)
        states = served.fuse(hidden_outputs[:place])
        served.forward([Rows(cache, text[1 : place + 1], num_logits=0, states=states)])
        cache.commit(range(place))
        drafted.append(BlockInput(cache, text[place], K, states[-1]))
    _, found = served.draft(drafted)
    for part, (index, *_) in zip(found.split(K), chosen, strict=True):
        bias = served.bias(before[index])
        assert torch.allclose(part if bias is None else part + bias, logits[index], atol=1e-5)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch, HeadRows], HeadRows]] = {
    "the anchor's own state is seen": lambda patch, rows: shifted_mask(patch, rows, 1),
    "the last state is not seen": lambda patch, rows: shifted_mask(patch, rows, -1),
    "the token before the anchor": lambda patch, rows: replace(rows, tokens=rows.tokens - 1),
    "no positions": lambda patch, rows: replace(rows, positions=rows.positions * 0),
    "the state of the token after": lambda patch, rows: replace(rows, states=rows.states + 1),
    "documents see each other": lambda patch, rows: replace(
        rows,
        segments=[
            replace(rows.segments[0], last=rows.segments[1].last, last_active=rows.segments[1].last_active),
            *rows.segments[2:],
        ],
    ),
}


def shifted_mask(patch: pytest.MonkeyPatch, rows: HeadRows, shift: int) -> HeadRows:
    """The same rows, under a mask that shows this many more."""

    def context_mask(rows: HeadRows, segment: Any, slots: int, window: int | None, like: Tensor) -> Tensor:
        last = rows.active[segment.first_active : segment.last_active, None] - segment.first
        hidden = torch.arange(segment.last - segment.first) > last + shift
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)

    patch.setattr(block_module, "context_mask", context_mask)
    return rows


def shifted_tokens(patch: pytest.MonkeyPatch, rows: HeadRows, shift: int) -> HeadRows:
    """The same rows, with embeddings of tokens this many places further on beside the states."""
    right = block_module.blocks_of_pairs

    def wrong(head: Any, config: Any, rows: Any, states: Any, embeddings: Tensor, dtype: Any, augment: Any) -> Tensor:
        return right(head, config, rows, states, embeddings.roll(-shift, 0), dtype, augment)

    patch.setattr(block_module, "blocks_of_pairs", wrong)
    return rows


OF_TOKENS: dict[str, Callable[[pytest.MonkeyPatch, HeadRows], HeadRows]] = {
    "the token of the state itself": lambda patch, rows: shifted_tokens(patch, rows, -1),
    "the token after the one that follows": lambda patch, rows: shifted_tokens(patch, rows, 1),
}
CASES = [(mutant, {}) for mutant in MUTANTS] + [(mutant, KINDS["tokens"]) for mutant in MUTANTS | OF_TOKENS]


@pytest.mark.parametrize(("mutant", "options"), CASES)
def test_a_shifted_implementation_is_another_one(
    mutant: str,
    options: dict[str, Any],
    target: Model,
    packed: tuple[Tensor, Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = random_block(target, markov_rank=6, **options)
    rows = head_rows(*packed, K)
    right, *_ = trained(head, target, rows)
    wrong, *_ = trained(head, target, (MUTANTS | OF_TOKENS)[mutant](monkeypatch, rows))
    assert (right - wrong).nan_to_num(9.0).abs().amax() > 1e-2


def test_anchors_depend_on_their_row_alone(packed: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, wanted, documents = packed
    rows, numbers = head_rows(*packed, K), torch.tensor([5, 9])
    chosen, counts = choose_anchors(rows, wanted, documents, numbers, 3)
    assert len(chosen) == 6 and chosen.tolist() == sorted(set(chosen.tolist()))
    assert counts.sum() == wanted.sum()
    few = keep_active(rows, chosen)
    places = [(of, place) for _, of, place in anchored(few)]
    assert places == [each[1:] for each in anchored(rows) if each[0] in chosen.tolist()]
    assert places[:3] != [(of, place) for _, of, place in anchored(rows)][:3]  # not the first ones
    alone = head_rows(tokens[1:], wanted[1:], documents[1:], K)
    own, _ = choose_anchors(alone, wanted[1:], documents[1:], numbers[1:], 3)
    assert [place for _, _, place in anchored(keep_active(alone, own))] == [place for of, place in places if of == 2]
    every, _ = choose_anchors(rows, wanted, documents, numbers, 100)
    assert every.tolist() == list(range(len(rows.active)))
    drawn = {tuple(choose_anchors(rows, wanted, documents, torch.tensor([n, n]), 2)[0].tolist()) for n in range(30)}
    assert len(drawn) > 10


def test_blocks_at_some_anchors_are_those_at_all(target: Model, packed: tuple[Tensor, Tensor, Tensor]) -> None:
    head, rows = random_block(target, **KINDS["everything"]), head_rows(*packed, K)
    chosen = torch.tensor([0, 3, 4, len(rows.active) - 1])
    few, *_ = trained(head, target, keep_active(rows, chosen))
    assert torch.allclose(few, trained(head, target, rows)[0][chosen])


def test_the_confidence_learns_the_overlap_and_nothing_else(target: Model) -> None:
    stored = random_block(target, markov_rank=3, confidence=True)
    head = module(stored)
    outputs = torch.randn(2, 3, 64, dtype=torch.float64, requires_grad=True)
    before = torch.tensor([[1, 2, 3], [4, 5, 6]])
    overlaps, weights = torch.rand(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    found = confidence_loss(head, Served(stored, target), outputs, before, overlaps, weights)  # type: ignore[arg-type]
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


def test_what_is_wanted_of_a_chain(packed: tuple[Tensor, Tensor, Tensor]) -> None:
    rows = head_rows(*packed, K)
    wanted = packed[1][packed[2] != NO_DOCUMENT].split(rows.lengths)
    found = predicted(rows)
    for index, of, place in anchored(rows):
        expected = [place + 1 + k < rows.lengths[of] and bool(wanted[of][place + 1 + k]) for k in range(K)]
        assert found[index].tolist() == expected


def test_weights_decay_as_told() -> None:
    from forerun.train.heads.options import BlockTraining

    weights = block_module.position_weights(BlockTraining(gamma=2.0), 3)
    assert weights.sum() == pytest.approx(1)
    assert (weights[1:] / weights[:-1]).tolist() == pytest.approx([0.60653] * 2, 1e-4)


def test_more_tokens_than_a_block_has_are_refused(target: Model, packed: tuple[Tensor, Tensor, Tensor]) -> None:
    with pytest.raises(ConfigError, match="blocks of 4 tokens draft no 5 tokens"):
        trained(random_block(target), target, head_rows(*packed, K + 1))
