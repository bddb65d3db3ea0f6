"""What training computes of a head is what drafting computes: against a slow reference and the served head, in float64.

Two rows of three documents stand for a batch above one; a shifted implementation must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from families import VOCAB, make_family
from forerun.drafters.models.eagle.model import EagleModel
from forerun.drafters.models.heads.config import StoredHead
from forerun.errors import ConfigError
from forerun.models import Model, Rows, load_model
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.defaults import LOSSES
from forerun.train.eagle import EagleHeadModule, unrolled
from forerun.train.heads.loss import Targets, weighted_loss
from forerun.train.heads.module import HeadRows, head_rows
from forerun.train.heads.target_states import learnt_layers
from forerun.train.losses import divergence
from heads import random_head, reference_logits

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
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
}
LENGTHS = ((6, 4), (7,))
"""Of the documents of each row."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")), dtype="float64")


@pytest.fixture(scope="module")
def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Rows of 11 tokens; the first tokens of the longer documents are a prompt."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (len(LENGTHS), 11), generator=generator)
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


def true_states(target: Model, head: StoredHead, text: list[int]) -> Tensor:
    batch = [Rows(target.new_cache(), text, num_logits=0, num_hidden_outputs=len(text))]
    hidden_outputs = target.forward(batch, head.config.layers).hidden_outputs
    assert hidden_outputs is not None
    return hidden_outputs.clone()


def module(head: StoredHead) -> EagleHeadModule:
    made = EagleHeadModule(head.config).double()
    made.load_state_dict({name: tensor.double() for name, tensor in head.tensors.items()})
    return made


def vocabulary(head: StoredHead) -> Tensor:
    return torch.arange(head.config.draft_vocab_size) + (0 if head.d2t is None else head.d2t)


def output_layer(head: StoredHead, target: Model) -> Tensor:
    if head.config.own_output_rows:
        return head.tensors["lm_head.weight"].double()
    return target.output_rows(vocabulary(head)).double()


def trained_logits(head: StoredHead, target: Model, rows: HeadRows) -> Tensor:
    """[J, A, V] of the draft vocabulary."""
    states = torch.cat([true_states(target, head, text) for text in texts(rows)])
    embeddings = target.embedding_rows(rows.token_ids).clone()
    outputs, _ = unrolled(module(head), rows, states, embeddings, torch.float64)
    return outputs.detach() @ output_layer(head, target).T


def active_rows(rows: HeadRows) -> list[tuple[int, int, int]]:
    """Active row, document, row in the document."""
    document = torch.repeat_interleave(torch.arange(len(rows.lengths)), torch.tensor(rows.lengths))
    of = document[rows.states][rows.active].tolist()
    places = rows.positions[rows.active].tolist()
    return [(index, of[index], places[index]) for index in range(len(of))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_rows_are_those_of_drafting(kind: str, target: Model, packed: tuple[Tensor, Tensor, Tensor]) -> None:
    head = random_head(target, **KINDS[kind])
    rows = head_rows(*packed, STEPS)
    logits = trained_logits(head, target, rows)
    seen = 0
    for index, document, row in active_rows(rows):
        text = texts(rows)[document]
        hidden_outputs = true_states(target, head, text)[: row + 1]
        for step in range(STEPS):
            if row + 2 + step >= len(text):
                continue
            read = text[1 : row + 2 + step]
            expected = reference_logits(head, target, read, hidden_outputs, num_drafted=step)[-1, vocabulary(head)]
            assert torch.allclose(logits[step, index], expected, atol=1e-5), (index, step)
            seen += 1
    assert seen > 15


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_several_sequences_gives_the_logits_of_training(
    kind: str, target: Model, packed: tuple[Tensor, Tensor, Tensor]
) -> None:
    """The served head, one row after another, its own states fed back: a batch of all documents."""
    head = random_head(target, **KINDS[kind])
    rows = head_rows(*packed, STEPS)
    logits = trained_logits(head, target, rows)
    served = EagleModel(head, target)
    rows_of = {(document, row): index for index, document, row in active_rows(rows)}
    known = texts(rows)
    caches = [served.new_cache() for _ in known]
    fused = [served.fuse(true_states(target, head, text)) for text in known]
    first = [len(text) - 2 - STEPS for text in known]  # the row at which each draft begins
    batch = [
        Rows(cache, text[1 : row + 2], num_logits=1, num_hidden_outputs=1, states=state[: row + 1])
        for cache, text, row, state in zip(caches, known, first, fused)
        if row >= 0
    ]
    there = [document for document, row in enumerate(first) if row >= 0]
    assert len(there) > 1
    states = torch.empty(0)
    for step in range(STEPS):
        if step:
            batch = [
                Rows(caches[document], [known[document][first[document] + 1 + step]], states=states[place])
                for place, document in enumerate(there)
            ]
        found = served.forward(batch)
        assert found.hidden_outputs is not None
        states = found.hidden_outputs
        for place, document in enumerate(there):
            index = rows_of[document, first[document]]
            assert torch.allclose(found.logits[place], logits[step, index], atol=1e-5)


MUTANTS: dict[str, Callable[[HeadRows], HeadRows]] = {
    "the token of the state": lambda rows: replace(rows, tokens=rows.tokens - 1),
    "the state of the token": lambda rows: replace(rows, states=rows.states + 1),
    "no positions": lambda rows: replace(rows, positions=rows.positions * 0),
    "documents see each other": lambda rows: replace(
        rows,
        segments=[
            replace(rows.segments[0], last=rows.segments[1].last, last_active=rows.segments[1].last_active),
            *rows.segments[2:],
        ],
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_shifted_implementation_is_another_one(
    mutant: str, target: Model, packed: tuple[Tensor, Tensor, Tensor]
) -> None:
    head = random_head(target, **KINDS["reduced"])
    rows = head_rows(*packed, STEPS)
    wrong = MUTANTS[mutant](rows)
    difference = (trained_logits(head, target, rows) - trained_logits(head, target, wrong)).abs().amax(-1)
    assert difference.max() > 1e-2


def slow_loss(head: StoredHead, target: Model, rows: HeadRows, wanted: Tensor, loss: Any, shift: int = 0) -> Tensor:
    """Sum of .8^j times the loss, prediction by prediction, by the definition; `shift` of the target's predictions."""
    logits = trained_logits(head, target, rows)
    all_wanted = wanted.split(rows.lengths)
    total = torch.zeros((), dtype=torch.float64)
    for index, document, row in active_rows(rows):
        text = texts(rows)[document]
        last = true_states(target, head, text)[:, -1]
        for step in range(STEPS):
            place = row + 2 + step  # of the token that is predicted
            if place >= len(text) or not all_wanted[document][place]:
                continue
            of_target = target.output_rows(vocabulary(head)).double() @ last[place - 1 + shift]
            value = divergence(loss, logits[step, index].log_softmax(-1), of_target.softmax(-1))
            total += 0.8**step * value
    return total


@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in ("kl-then-tv", "hybrid")])
def test_the_loss_is_that_of_each_prediction_alone(
    loss: Any, target: Model, packed: tuple[Tensor, Tensor, Tensor]
) -> None:
    head = random_head(target, **KINDS["everything"])
    rows = head_rows(*packed, STEPS)
    wanted = packed[1][packed[2] != NO_DOCUMENT]
    states = torch.cat([true_states(target, head, text) for text in texts(rows)])
    outputs, _ = unrolled(module(head), rows, states, target.embedding_rows(rows.token_ids).clone(), torch.float64)
    weights = 0.8 ** torch.arange(STEPS, dtype=torch.float64)[:, None] * rows.valid
    targets = Targets(states[rows.predictors, -1], output_layer(head, target), rows.rows, weights, loss)
    found = weighted_loss(outputs, None, targets, chunk=4)
    assert torch.allclose(found, slow_loss(head, target, rows, wanted, loss))
    assert not torch.allclose(found, slow_loss(head, target, rows, wanted, loss, shift=-1), rtol=1e-3)


@pytest.mark.parametrize("row", [0, 1])
def test_documents_of_which_nothing_is_wanted_are_passed_over(
    row: int, target: Model, packed: tuple[Tensor, Tensor, Tensor]
) -> None:
    tokens, wanted, documents = packed[0], packed[1].clone(), packed[2]
    wanted[row, documents[row] == 0] = False
    head, rows = random_head(target, **KINDS["everything"]), head_rows(tokens, wanted, documents, STEPS)
    states = torch.cat([true_states(target, head, text) for text in texts(rows)])
    outputs, _ = unrolled(module(head), rows, states, target.embedding_rows(rows.token_ids).clone(), torch.float64)
    weights = 0.8 ** torch.arange(STEPS, dtype=torch.float64)[:, None] * rows.valid
    targets = Targets(states[rows.predictors, -1], output_layer(head, target), rows.rows, weights, "forward-kl")
    expected = slow_loss(head, target, rows, wanted[documents != NO_DOCUMENT], "forward-kl")
    assert torch.allclose(weighted_loss(outputs, None, targets, chunk=4), expected)


@pytest.mark.parametrize("loss", ["forward-kl", "total-variation", "hybrid"])
def test_the_gradient_in_chunks_is_the_gradient(loss: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    outputs, layer = draw(2, 6, 5).requires_grad_(), draw(11, 5).requires_grad_()
    states, of_target = draw(7, 5), draw(11, 5)
    rows = torch.randint(0, 6, (2, 7), generator=generator)
    weights = torch.rand((2, 7), generator=generator, dtype=torch.float64)
    targets = Targets(states, of_target, rows, weights, loss)
    found = weighted_loss(outputs, layer, targets, chunk=7)
    gradients = torch.autograd.grad(3 * found, (outputs, layer))
    wanted = (states @ of_target.T).softmax(-1)
    whole = sum(
        (divergence(loss, (outputs[step, rows[step]] @ layer.T).log_softmax(-1), wanted) * weights[step]).sum()
        for step in range(2)
    )
    assert torch.allclose(found, whole)
    for one, other in zip(gradients, torch.autograd.grad(3 * whole, (outputs, layer))):
        assert torch.allclose(one, other)


def test_the_targets_distribution_is_learnt_whatever_states_are_read(
    target: Model, packed: tuple[Tensor, Tensor, Tensor]
) -> None:
    """A head that reads no state after the final norm is given it beside those that it reads, and does not read it."""
    assert learnt_layers((2, 8), 16) == learnt_layers((2, 8, 16), 16) == (2, 8, 16)
    head, rows = random_head(target, **KINDS["everything"]), head_rows(*packed, STEPS)
    states = torch.cat([true_states(target, head, text) for text in texts(rows)])
    more, embeddings = torch.cat([states, states[:, :1]], 1), target.embedding_rows(rows.token_ids).clone()
    one, other = (unrolled(module(head), rows, each, embeddings, torch.float64)[0] for each in (states, more))
    assert torch.equal(one, other)


def test_a_head_that_was_never_set_is_refused(target: Model) -> None:
    head = EagleHeadModule(random_head(target).config)
    with pytest.raises(ConfigError, match="NaN"):
        head.check()
