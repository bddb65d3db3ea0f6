"""What training computes of Medusa heads is what drafting computes, in float64; a shifted implementation must fail.

Two rows of three documents stand for a batch above one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from families import VOCAB, make_family
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.medusa.config import RANKS, MedusaConfig
from forerun.drafters.models.medusa.model import MedusaModel
from forerun.models import Model, Rows, load_model
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads.loss import step_weights
from forerun.train.heads.module import HeadRows, head_rows
from forerun.train.heads.options import MedusaShape, MedusaTraining
from forerun.train.heads.target_states import HeadInputs, TrainingTarget
from forerun.train.losses import divergence
from forerun.train.medusa import MedusaHead, MedusaKind, accuracies, head_outputs, output_layers
from medusa_heads import last_states, random_medusa, reference_logits

HEADS = 3
KINDS: dict[str, dict[str, Any]] = {
    "the target's rows": {"draft_vocab_size": 40},
    "one": {"draft_vocab_size": 40, "output_rows": "one"},
    "each": {"output_rows": "each", "num_layers": 2},
    "sequential": {"draft_vocab_size": 40, "sequential": True, "num_layers": 2},
}
LENGTHS = ((6, 4), (7,))
"""Of the documents of each row."""
Packed = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")), dtype="float64")


@pytest.fixture(scope="module")
def packed() -> Packed:
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


def module(head: StoredHead[MedusaConfig]) -> MedusaHead:
    made = MedusaHead(head.config).double()
    made.load_state_dict({name: tensor.double() for name, tensor in head.tensors.items()})
    return made


def vocabulary(head: StoredHead[MedusaConfig]) -> Tensor:
    return torch.arange(head.config.draft_vocab_size) + (0 if head.d2t is None else head.d2t)


def states_of(target: Model, head: StoredHead[MedusaConfig], rows: HeadRows) -> Tensor:
    return torch.cat([last_states(target, head.config, text) for text in texts(rows)])[:, None].clone()


def trained_logits(head: StoredHead[MedusaConfig], target: Model, rows: HeadRows) -> Tensor:
    """[J, A, V] of the draft vocabulary."""
    embeddings = target.embedding_rows(rows.token_ids).clone()
    outputs = head_outputs(module(head), rows, states_of(target, head, rows), embeddings, torch.float64).detach()
    layers = [layer.detach() for layer in output_layers(module(head), target.output_rows(vocabulary(head)).double())]
    return torch.stack([output @ layers[k % len(layers)].T for k, output in enumerate(outputs)])


def active_rows(rows: HeadRows) -> list[tuple[int, int, int]]:
    """Active row, document, place in the document."""
    document = torch.repeat_interleave(torch.arange(len(rows.lengths)), torch.tensor(rows.lengths))
    of = document[rows.states][rows.active].tolist()
    places = rows.positions[rows.active].tolist()
    return [(index, of[index], places[index]) for index in range(len(of))]


def predictions(rows: HeadRows) -> list[tuple[int, int, int, list[int]]]:
    """Active row, head, place of the token that is predicted among all, the document up to it."""
    starts = torch.tensor([0, *rows.lengths]).cumsum(0).tolist()
    return [
        (index, k, starts[document] + place + 2 + k, texts(rows)[document][: place + 2 + k])
        for index, document, place in active_rows(rows)
        for k in range(HEADS)
        if place + 2 + k < rows.lengths[document]
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_training_are_those_of_drafting(kind: str, target: Model, packed: Packed) -> None:
    """By the slow reference, and by the served heads for sequences in one forward."""
    head = random_medusa(target, **KINDS[kind])
    rows = head_rows(*packed, HEADS)
    logits = trained_logits(head, target, rows)
    served, batch, expected = MedusaModel(head, target), [], []
    found = predictions(rows)
    assert len(found) > 15
    for index, k, _, text in found:
        read = text[len(text) - 1 - k :]
        state = last_states(target, head.config, text[: len(text) - 1 - k])[-1]
        slow = reference_logits(head, target, state, read)[vocabulary(head)]
        assert torch.allclose(logits[k, index], slow, atol=1e-6), (index, k)
        cache = served.new_cache()
        cache.begin(len(text) - 1 - k)
        cache.num_heads = HEADS
        batch.append(Rows(cache, read, num_logits=1, states=state.expand(len(read), -1)))
        expected.append(logits[k, index])
    own = served.forward(batch).logits
    assert torch.allclose(own, torch.stack(expected), atol=1e-6)


MUTANTS: dict[str, Callable[[HeadRows], HeadRows]] = {
    "the token of the state": lambda rows: replace(rows, tokens=rows.tokens - 1),
    "the state of the token": lambda rows: replace(rows, states=rows.states + 1),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_shifted_implementation_is_another_one(mutant: str, target: Model, packed: Packed) -> None:
    head = random_medusa(target, **KINDS["sequential"])
    rows = head_rows(*packed, HEADS)
    wrong = MUTANTS[mutant](rows)
    difference = (trained_logits(head, target, rows) - trained_logits(head, target, wrong)).abs().amax(-1)
    assert difference.max() > 1e-2


@pytest.mark.parametrize(
    ("kind", "pace"), [*((kind, "decay") for kind in KINDS), ("sequential", "d-pace"), ("sequential", "on-policy")]
)
def test_the_loss_is_that_of_each_prediction_alone(
    kind: str, pace: str, target: Model, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_medusa(target, **KINDS[kind])
    rows = head_rows(*packed, HEADS)
    states, of_target = states_of(target, head, rows), target.output_rows(vocabulary(head)).double()
    shape = MedusaShape(num_heads=HEADS, output_rows=head.config.output_rows)
    options = MedusaTraining(shape=shape, num_draft_tokens=HEADS, position_weights=pace, loss="forward-kl")
    served: Any = None
    columns = torch.full((VOCAB,), -1)
    columns[vocabulary(head)] = torch.arange(len(of_target))
    fixed: Any = TrainingTarget(served, served, of_target, columns)
    read = HeadInputs(fixed, rows, states, target.embedding_rows(rows.token_ids).clone(), None)
    total = MedusaKind(options).summed_loss(module(head), read, packed)
    total.backward()
    if pace != "decay":
        assert float(total.detach()) > 0
        return
    logits, wanted = trained_logits(head, target, rows), packed[1][packed[2] != NO_DOCUMENT]
    weights = step_weights(options.step_weight, HEADS)
    assert torch.allclose(weights / weights[0], torch.tensor([1.0, 0.8, 0.64]))
    slow = torch.zeros((), dtype=torch.float64)
    for index, k, place, _ in predictions(rows):
        if wanted[place]:
            hoped = (of_target @ states[place - 1, -1]).softmax(-1)
            slow += weights[k] * divergence("forward-kl", logits[k, index].log_softmax(-1), hoped)
    assert torch.allclose(total, slow)


def test_accuracies_are_counted_along_chains() -> None:
    """One document of eight tokens, of which the last five are wanted."""
    tokens = torch.arange(8)[None]
    wanted = torch.tensor([[False] * 3 + [True] * 5])
    rows = head_rows(tokens, wanted, torch.zeros(1, 8, dtype=torch.int32), 2)
    ranks = torch.full((2, 8), -1)
    for source in rows.states[rows.active].tolist():
        for k in range(2):
            if wanted[0, min(7, source + 2 + k)] and source + 2 + k < 8:
                ranks[k, source + 1 + k] = 0
    ranks[0, 4] = 1  # the second choice was right there
    ranks[1, 6] = RANKS  # far off
    ranks[0, 6] = -1  # does not count
    found = accuracies([(rows, ranks)], 2)
    assert found[:2] == (0.75, 0.25) and sum(found[RANKS:]) == found[RANKS] == 0.75
    assert accuracies([], 2) == ()
