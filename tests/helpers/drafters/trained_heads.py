"""Random heads of every kind in training, beside what a slow reference and the served head compute of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch
from torch import Tensor

import blocks
import heads
import medusa_heads
from forerun.drafters.models.block.model import BlockInput, BlockModel
from forerun.drafters.models.eagle.model import EagleModel
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.medusa.model import MedusaModel
from forerun.models import Model, Rows
from forerun.train.accelerator import columns_of
from forerun.train.block import BlockKind, position_weights
from forerun.train.eagle import EagleKind
from forerun.train.heads.loss import step_weights
from forerun.train.heads.module import HeadRows
from forerun.train.heads.options import BlockShape, BlockTraining, EagleTraining, MedusaShape, MedusaTraining
from forerun.train.heads.start import HeadKind
from forerun.train.heads.target_states import HeadInputs, TrainingTarget, learnt_layers
from forerun.train.medusa import MedusaKind

STEPS = 3
"""Tokens of a draft that are learnt."""
Place = tuple[Seq[int], int]
"""A document, and one of its rows: row i reads the target's state of token i, and predicts token i + 2 first."""


class TrainedHead(ABC):
    """A head of random weights, in float64.

    Attributes:
        head: as it is stored.
        module: its tensors as they are trained.
        vocabulary: [V] the tokens that it proposes.
        of_target: [V, H] the target's output rows of these.
    """

    def __init__(self, target: Model, head: StoredHead[Any], kind: HeadKind[Any]) -> None:
        self.head, self.kind, self.target = head, kind, target
        self.module = kind.module(head.config).double()
        self.module.load_state_dict({name: tensor.double() for name, tensor in head.tensors.items()})
        self.vocabulary = blocks.proposed(head)
        self.of_target = target.output_rows(self.vocabulary).double()
        self._states = cache(self._computed_states)

    def inputs(self, rows: HeadRows) -> HeadInputs:
        """The target's states and embeddings of the rows' documents."""
        computed_before: Any = None
        columns = columns_of(self.vocabulary, self.target.vocab_size)
        target = TrainingTarget(self.target, computed_before, self.of_target, columns)
        states = torch.cat([self.states(text) for text in texts(rows)])
        return HeadInputs(target, rows, states, self.target.embedding_rows(rows.token_ids).clone())

    def logits(self, rows: HeadRows) -> Tensor:
        """[J, A, V] of training."""
        parts = self.kind.predict(self.module, self.inputs(rows))
        return torch.stack([features @ layer.T for features, layer in parts]).sum(0).detach()

    def loss(self, rows: HeadRows, packed: Seq[Tensor]) -> Tensor:
        """Of training. packed: tokens, whether they are wanted, and documents of packed rows."""
        tokens, wanted, documents = packed
        return self.kind.summed_loss(
            self.module, self.inputs(rows), (tokens, wanted, documents, wanted, torch.arange(len(tokens)))
        )

    def states(self, text: Seq[int]) -> Tensor:
        """[n, layers, H] the target's states of a text: those that the head reads, and the last."""
        return self._states(tuple(text))

    def _computed_states(self, text: tuple[int, ...]) -> Tensor:
        rows = Rows(self.target.new_cache(), list(text), num_logits=0, num_hidden_outputs=len(text))
        layers = learnt_layers(self.head.config.layers, self.target.num_layers)
        hidden_outputs = self.target.forward([rows], layers).hidden_outputs
        assert hidden_outputs is not None
        return hidden_outputs.clone()

    def read_states(self, text: Seq[int]) -> Tensor:
        """[n, layers, H] those that the head reads."""
        return self.states(text)[:, : len(self.head.config.layers)]

    def weights(self) -> Tensor:
        """[J] of the tokens of a draft in the loss."""
        return step_weights(self.kind.options.step_weight, STEPS)

    def weight_of_row(self, num_wanted: int, num_active: int) -> float:
        """Of an active row in the loss. num_wanted: tokens of the packed row. num_active: its active rows."""
        return 1.0

    @abstractmethod
    def reference(self, text: Seq[int], row: int) -> Tensor:
        """[n, V] slow logits of the tokens that a row predicts, of which the text has n; none where they take more."""

    @abstractmethod
    def drafted(self, places: Seq[Place]) -> Tensor:
        """[J, n, V] logits of the served head, for drafts from several documents in one batch."""


class TrainedEagle(TrainedHead):
    """An EAGLE head or an MTP layer."""

    def __init__(self, target: Model, shape: dict[str, Any], **options: Any) -> None:
        super().__init__(target, heads.random_head(target, **shape), EagleKind(EagleTraining(unroll=STEPS, **options)))

    def reference(self, text: Seq[int], row: int) -> Tensor:
        count = min(STEPS, len(text) - row - 2)
        states = self.read_states(text)[: row + 1]
        logits = heads.reference_logits(self.head, self.target, text[1 : row + 1 + count], states, count - 1)
        return logits[-count:, self.vocabulary]

    def drafted(self, places: Seq[Place]) -> Tensor:
        """One row after another, its own states fed back."""
        served = EagleModel(self.head, self.target)
        caches = [served.new_cache() for _ in places]
        fused = [served.fuse(self.read_states(text)) for text, _ in places]
        batch = [
            Rows(cache, text[1 : row + 2], num_logits=1, num_hidden_outputs=1, states=states[: row + 1])
            for cache, (text, row), states in zip(caches, places, fused)
        ]
        found = [served.forward(batch)]
        for step in range(1, STEPS):
            states = found[-1].hidden_outputs
            assert states is not None
            batch = [
                Rows(cache, [text[row + 1 + step]], states=state)
                for cache, (text, row), state in zip(caches, places, states)
            ]
            found.append(served.forward(batch))
        return torch.stack([each.logits for each in found])


class TrainedBlock(TrainedHead):
    """A block head, whose block of a row is anchored at the token after it."""

    def __init__(self, target: Model, shape: dict[str, Any], **options: Any) -> None:
        kind = BlockKind(BlockTraining(shape=BlockShape(block_size=STEPS), **options))
        super().__init__(target, blocks.random_block(target, **{"block_size": STEPS, **shape}), kind)

    def weights(self) -> Tensor:
        return position_weights(self.kind.options, STEPS)

    def weight_of_row(self, num_wanted: int, num_active: int) -> float:
        """As if there were a block for each wanted token."""
        return num_wanted / num_active

    def reference(self, text: Seq[int], row: int) -> Tensor:
        given = text[row + 1 : row + 1 + STEPS]
        if row + 1 + STEPS >= len(text):
            return torch.empty(0, len(self.vocabulary), dtype=torch.float64)
        return blocks.reference_block(self.head, self.target, text[: row + 2], given)[0]

    def drafted(self, places: Seq[Place]) -> Tensor:
        served = BlockModel(self.head, self.target)
        batch = []
        for text, row in places:
            cache = served.new_cache()
            states = served.fuse(self.read_states(text)[: row + 1])
            served.forward([Rows(cache, text[1 : row + 2], num_logits=0, states=states)])
            cache.commit(range(row + 1))
            batch.append(BlockInput(cache, text[row + 1], STEPS, states[-1]))
        _, logits = served.draft(batch)
        bias = served.bias(torch.tensor([text[row + 1 : row + 1 + STEPS] for text, row in places]).flatten())
        return (logits if bias is None else logits + bias).view(len(places), STEPS, -1).transpose(0, 1)


class TrainedMedusa(TrainedHead):
    """Medusa heads, of which each predicts one token further on."""

    def __init__(self, target: Model, shape: dict[str, Any], **options: Any) -> None:
        head = medusa_heads.random_medusa(target, **shape)
        heads_shape = MedusaShape(num_heads=STEPS, output_rows=head.config.output_rows)
        super().__init__(target, head, MedusaKind(MedusaTraining(shape=heads_shape, **options)))

    def reference(self, text: Seq[int], row: int) -> Tensor:
        count = min(STEPS, len(text) - row - 2)
        state = self.states(text)[row, -1]
        rows = [
            medusa_heads.reference_logits(self.head, self.target, state, text[row + 1 : row + 2 + k])
            for k in range(count)
        ]
        return torch.stack(rows)[:, self.vocabulary]

    def drafted(self, places: Seq[Place]) -> Tensor:
        served, batch = MedusaModel(self.head, self.target), []
        for k in range(STEPS):
            for text, row in places:
                cache = served.new_cache()
                cache.begin(row + 1)
                cache.num_heads = STEPS
                state = self.states(text)[row, -1]
                batch.append(Rows(cache, text[row + 1 : row + 2 + k], num_logits=1, states=state.expand(k + 1, -1)))
        return served.forward(batch).logits.view(STEPS, len(places), -1)


KINDS: dict[str, type[Any]] = {"eagle": TrainedEagle, "block": TrainedBlock, "medusa": TrainedMedusa}
"""By name, a head of random weights by its target, the options of its shape, and those of its training."""


def texts(rows: HeadRows) -> list[list[int]]:
    """The documents."""
    return [part.tolist() for part in rows.token_ids.split(rows.lengths)]


def active_rows(rows: HeadRows) -> list[tuple[int, int, int]]:
    """Active row, document, row in the document."""
    document = torch.repeat_interleave(torch.arange(len(rows.lengths)), torch.tensor(rows.lengths))
    of = document[rows.states][rows.active].tolist()
    places = rows.positions[rows.active].tolist()
    return [(index, of[index], places[index]) for index in range(len(of))]
