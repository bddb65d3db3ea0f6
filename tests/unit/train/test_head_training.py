"""What training computes of a head is what drafting computes, of every kind: against a slow reference and the served
head, in float64.

Two rows of three documents stand for a batch above one; a shifted implementation must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import blocks
from families import make_family
from forerun.errors import ConfigError
from forerun.models import Model, load_model
from forerun.train import block
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.defaults import LOSSES
from forerun.train.eagle import EagleHeadModule
from forerun.train.heads.loss import Targets, weighted_loss
from forerun.train.heads.module import HeadRows, head_rows, predicted
from forerun.train.heads.target_states import learnt_layers
from forerun.train.losses import divergence
from heads import random_head
from packed_documents import packed_documents
from trained_heads import KINDS, STEPS, TrainedHead, active_rows, texts

SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "eagle": {
        "first version": {"version": 1},
        "mtp": {"version": 1, "is_mtp": True, "norm_output": True, "sliding_window": 4},
        "reduced": {"draft_vocab_size": 40, "own_output_rows": True},
        "everything": {
            "draft_vocab_size": 40,
            "norm_before_fc": True,
            "norm_before_residual": True,
            "norm_output": True,
            "embedding_residual": True,
            "sliding_window": 4,
            "rope_theta": 500.0,
        },
        "not the last state": {"layers": (0, 1)},
    },
    "block": blocks.KINDS | {"not the last state": {"layers": (0, 1)}},
    "medusa": {
        "the target's rows": {"draft_vocab_size": 40},
        "one": {"draft_vocab_size": 40, "output_rows": "one"},
        "each": {"output_rows": "each", "num_layers": 2},
        "sequential": {"draft_vocab_size": 40, "sequential": True, "num_layers": 2},
    },
}
USUAL = {"eagle": "everything", "block": "shared bias", "medusa": "sequential"}
Packed = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")), dtype="float64")


@pytest.fixture(scope="module")
def packed() -> Packed:
    return packed_documents()


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("kind", "shape"), [(kind, shape) for kind in KINDS for shape in SHAPES[kind]])
def test_rows_of_training_are_those_of_drafting(kind: str, shape: str, target: Model, packed: Packed) -> None:
    """Every row of all documents at once; the served head drafts from some of them in one batch."""
    trained, rows = KINDS[kind](target, SHAPES[kind][shape]), head_rows(*packed, STEPS)
    logits, known, seen = trained.logits(rows), texts(rows), 0
    for index, document, row in active_rows(rows):
        expected = trained.reference(known[document], row)
        assert torch.allclose(logits[: len(expected), index], expected, atol=1e-5), (index, row)
        seen += len(expected)
    assert seen > 25
    whole = [each for each in active_rows(rows) if each[2] + 1 + STEPS < rows.lengths[each[1]]][::3]
    assert len({document for _, document, _ in whole}) > 1
    found = trained.drafted([(known[document], row) for _, document, row in whole])
    assert torch.allclose(found, logits[:, [index for index, *_ in whole]], atol=1e-5)


Change = Callable[[pytest.MonkeyPatch, HeadRows], HeadRows]
OF_ROWS: dict[str, Change] = {
    "the token before": lambda patch, rows: replace(rows, tokens=rows.tokens - 1),
    "the state of the token after": lambda patch, rows: replace(rows, states=rows.states + 1),
}
OF_ATTENTION: dict[str, Change] = {
    "no positions": lambda patch, rows: replace(rows, positions=rows.positions * 0),
    "documents see each other": lambda patch, rows: replace(
        rows,
        segments=[
            replace(rows.segments[0], last=rows.segments[1].last, last_active=rows.segments[1].last_active),
            *rows.segments[2:],
        ],
    ),
}
OF_BLOCKS: dict[str, Change] = {
    "the anchor's own state is seen": lambda patch, rows: shifted_mask(patch, rows, 1),
    "the last state is not seen": lambda patch, rows: shifted_mask(patch, rows, -1),
}
OF_PAIRS: dict[str, Change] = {
    "the token of the state itself": lambda patch, rows: shifted_tokens(patch, rows, -1),
    "the token after the one that follows": lambda patch, rows: shifted_tokens(patch, rows, 1),
}


def shifted_mask(patch: pytest.MonkeyPatch, rows: HeadRows, shift: int) -> HeadRows:
    """The same rows, under a mask that shows this many more."""

    def context_mask(rows: HeadRows, segment: Any, slots: int, window: int | None, like: Tensor) -> Tensor:
        last = rows.active[segment.first_active : segment.last_active, None] - segment.first
        hidden = torch.arange(segment.last - segment.first) > last + shift
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)

    patch.setattr(block, "context_mask", context_mask)
    return rows


def shifted_tokens(patch: pytest.MonkeyPatch, rows: HeadRows, shift: int) -> HeadRows:
    """The same rows, with embeddings of tokens this many places further on beside the states."""
    right = block.blocks_of_pairs

    def wrong(head: Any, config: Any, rows: Any, states: Any, embeddings: Tensor, dtype: Any, augment: Any) -> Tensor:
        return right(head, config, rows, states, embeddings.roll(-shift, 0), dtype, augment)

    patch.setattr(block, "blocks_of_pairs", wrong)
    return rows


MUTANTS: list[tuple[str, dict[str, Any], dict[str, Change]]] = [
    ("eagle", SHAPES["eagle"]["reduced"], OF_ROWS | OF_ATTENTION),
    ("block", {"markov_rank": 6}, OF_ROWS | OF_ATTENTION | OF_BLOCKS),
    ("block", {**SHAPES["block"]["tokens"], "markov_rank": 6}, OF_ROWS | OF_ATTENTION | OF_BLOCKS | OF_PAIRS),
    ("medusa", SHAPES["medusa"]["sequential"], OF_ROWS),
]


@pytest.mark.parametrize(
    ("kind", "shape", "mutant", "change"),
    [(kind, shape, mutant, change) for kind, shape, changes in MUTANTS for mutant, change in changes.items()],
)
def test_a_shifted_implementation_is_another_one(
    kind: str,
    shape: dict[str, Any],
    mutant: str,
    change: Change,
    target: Model,
    packed: Packed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained, rows = KINDS[kind](target, shape), head_rows(*packed, STEPS)
    right = trained.logits(rows)
    wrong = trained.logits(change(monkeypatch, rows))
    assert (right - wrong).nan_to_num(9.0).abs().amax() > 1e-2


def slow_loss(trained: TrainedHead, rows: HeadRows, packed: Packed, loss: Any, shift: int = 0) -> Tensor:
    """The weighted sum, prediction by prediction, by the definition; `shift` of the target's predictions."""
    _, wanted, documents = packed
    logits, of_document = trained.logits(rows), wanted[documents != NO_DOCUMENT].split(rows.lengths)
    packed_row = [row for row in range(len(documents)) for _ in documents[row][documents[row] >= 0].unique()]
    active = [packed_row[document] for _, document, _ in active_rows(rows)]
    total = torch.zeros((), dtype=torch.float64)
    for index, document, row in active_rows(rows):
        text, here = texts(rows)[document], packed_row[document]
        weight = trained.weight_of_row(int(wanted[here].sum()), active.count(here))
        for step in range(STEPS):
            place = row + 2 + step  # of the token that is predicted
            if place >= len(text) or not of_document[document][place]:
                continue
            hoped = (trained.of_target @ trained.states(text)[place - 1 + shift, -1]).softmax(-1)
            value = divergence(loss, logits[step, index].log_softmax(-1), hoped)
            total += weight * trained.weights()[step] * value
    return total


@pytest.mark.parametrize(
    ("kind", "shape", "loss"),
    [
        *(("eagle", "everything", loss) for loss in LOSSES if loss not in ("kl-then-tv", "hybrid")),
        *(("eagle", shape, "forward-kl") for shape in ("reduced", "not the last state")),
        *(("block", shape, "forward-kl") for shape in ("plain", "not the last state")),
        *(("medusa", shape, "forward-kl") for shape in SHAPES["medusa"]),
    ],
)
def test_the_loss_is_that_of_each_prediction_alone(
    kind: str, shape: str, loss: Any, target: Model, packed: Packed
) -> None:
    trained, rows = KINDS[kind](target, SHAPES[kind][shape], loss=loss), head_rows(*packed, STEPS)
    found = trained.loss(rows, packed).detach()
    assert torch.allclose(found, slow_loss(trained, rows, packed, loss))
    assert not torch.allclose(found, slow_loss(trained, rows, packed, loss, shift=-1), rtol=1e-3)


@pytest.mark.parametrize("pace", ["d-pace", "on-policy"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_of_the_tokens_give_a_loss_and_a_gradient(
    kind: str, pace: str, target: Model, packed: Packed
) -> None:
    trained = KINDS[kind](target, SHAPES[kind][USUAL[kind]], position_weights=pace)
    total = trained.loss(head_rows(*packed, STEPS), packed)
    total.backward()
    assert float(total.detach()) > 0
    assert any(parameter.grad is not None for parameter in trained.module.parameters())


def test_what_is_wanted_of_a_chain(packed: Packed) -> None:
    rows = head_rows(*packed, STEPS)
    wanted = packed[1][packed[2] != NO_DOCUMENT].split(rows.lengths)
    found = predicted(rows)
    for index, document, row in active_rows(rows):
        places = range(row + 2, row + 2 + STEPS)
        expected = [place < rows.lengths[document] and bool(wanted[document][place]) for place in places]
        assert found[index].tolist() == expected


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_which_nothing_is_wanted_are_passed_over(
    kind: str, row: int, target: Model, packed: Packed
) -> None:
    tokens, wanted, documents = packed[0], packed[1].clone(), packed[2]
    wanted[row, documents[row] == 0] = False
    shape = "not the last state" if kind == "block" else USUAL[kind]
    trained, rows = KINDS[kind](target, SHAPES[kind][shape]), head_rows(tokens, wanted, documents, STEPS)
    expected = slow_loss(trained, rows, (tokens, wanted, documents), "forward-kl")
    assert torch.allclose(trained.loss(rows, (tokens, wanted, documents)).detach(), expected)


@pytest.mark.parametrize(("loss", "chunk"), [("forward-kl", 4), ("total-variation", 4), ("hybrid", 7)])
def test_the_gradient_in_chunks_is_the_gradient(loss: Any, chunk: int) -> None:
    """The hybrid goes by the overlap of its chunk: only in one is it that of all."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    outputs, layer = draw(2, 6, 5).requires_grad_(), draw(11, 5).requires_grad_()
    states, of_target = draw(7, 5), draw(11, 5)
    rows = torch.randint(0, 6, (2, 7), generator=generator)
    weights = torch.rand((2, 7), generator=generator, dtype=torch.float64)
    targets = Targets(states, of_target, rows, weights, loss)
    found = weighted_loss(outputs, layer, targets, chunk=chunk)
    gradients = torch.autograd.grad(3 * found, (outputs, layer))
    wanted = (states @ of_target.T).softmax(-1)
    whole = sum(
        (divergence(loss, (outputs[step, rows[step]] @ layer.T).log_softmax(-1), wanted) * weights[step]).sum()
        for step in range(2)
    )
    assert torch.allclose(found, whole)
    for one, other in zip(gradients, torch.autograd.grad(3 * whole, (outputs, layer))):
        assert torch.allclose(one, other)


def test_the_targets_distribution_is_learnt_whatever_states_are_read() -> None:
    assert learnt_layers((2, 8), 16) == learnt_layers((2, 8, 16), 16) == (2, 8, 16)


def test_a_head_that_was_never_set_is_refused(target: Model) -> None:
    head = EagleHeadModule(random_head(target).config)
    with pytest.raises(ConfigError, match="NaN"):
        head.check()
