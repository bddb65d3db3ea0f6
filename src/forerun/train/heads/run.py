"""The training of a head on its target's states, as these are computed: batches, the loss of a batch, and the run."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from forerun.errors import ConfigError
from forerun.models import LanguageModel, load_transformers_model
from forerun.train.accelerator import columns_of, device_of, to_device
from forerun.train.checkpoint import LoopState, load_checkpoint, pin
from forerun.train.data.packed import NO_DOCUMENT, PackedShard
from forerun.train.heads.module import Augmentation, HeadModule, HeadRows, head_rows
from forerun.train.heads.options import HeadTraining
from forerun.train.heads.target_states import TargetStates, learnt_layers
from forerun.train.loop import Batch, Evaluations, Loop, Workers
from forerun.train.optim import Optimisers
from forerun.utils.files import digest, remove, write_bytes

_NAME = "states"


class StateCache:
    """A folder of states of one run, whose target and layers do not change.

    Args:
        bound: bytes of the files together, at most.
    """

    def __init__(self, folder: Path, bound: int) -> None:
        self._folder, self._bound, self._lock = folder, bound, threading.Lock()
        for path in folder.glob(".row-*.tmp"):  # of a process that was killed
            remove(path)
        self._nbytes = sum(path.stat().st_size for path in folder.glob("row-*.safetensors"))

    def of(self, states: TargetStates, tokens: Tensor, documents: Tensor) -> Tensor:
        """[N, layers, H] of the documents of packed rows, one after another. tokens, documents: [rows, window + 1].

        Raises:
            ConfigError: the disk is full.
        """
        return torch.cat([self._row(states, *row) for row in zip(tokens, documents, strict=True)])

    def _row(self, states: TargetStates, tokens: Tensor, documents: Tensor) -> Tensor:
        path = self._folder / f"row-{digest(tokens.numpy(), documents.numpy())}.safetensors"
        try:
            return load(path.read_bytes())[_NAME]
        except (OSError, SafetensorError, KeyError):
            pass
        used = documents != NO_DOCUMENT
        lengths = torch.unique_consecutive(documents[used], return_counts=True)[1].tolist()
        found = states.of(tokens[used], lengths)
        content = save({_NAME: found.cpu()})
        with self._lock:
            is_room = self._nbytes + len(content) <= self._bound
            self._nbytes += len(content) if is_room else 0
        if is_room:
            write_bytes(path, content, error=ConfigError)
        return found


_FREE = ("threads", "device", "checkpoint_seconds", "evaluate_every", "held_out_rows", "num_draft_tokens", "patience")
"""Options in which a resumed run may differ from the one that it goes on from."""
D_PACE_SMOOTHING = 0.5
"""Of the chances that weights follow: the authors' (2605.18810)."""
COMPUTE = {"cpu": torch.bfloat16, "cuda": torch.bfloat16, "mps": torch.float32}
"""Types of products by device. On a CPU without instructions for bfloat16 they are slower, and still right."""


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """What training reads of the target.

    Attributes:
        served: the model that the head will draft for: embeddings and output layer are its.
        states: its states of many documents.
        output_rows: [V, H] its output layer's rows of the draft vocabulary, in the type of products.
        columns: [vocabulary] int64 the place of each of the target's tokens in the draft vocabulary; -1 for none.
    """

    served: LanguageModel
    states: TargetStates
    output_rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, served: LanguageModel, model: Any, layers: Sequence[int], vocabulary: Tensor) -> TrainingTarget:
        """Of a target.

        Args:
            model: the same as `frozen_model` gives it; from then on it computes states alone.
            layers: that the head reads. vocabulary: [V] ids of the tokens that it proposes.
        """
        read = learnt_layers(layers, model.config.get_text_config().num_hidden_layers)
        output_rows = served.output_rows(vocabulary).to(COMPUTE[served.device.type], copy=True)
        return cls(served, TargetStates(model, read), output_rows, columns_of(vocabulary, served.vocab_size))

    def embeddings(self, token_ids: Tensor) -> Tensor:
        """[N, H] float32. token_ids: [N] int64."""
        found, place = torch.unique(token_ids, return_inverse=True)
        # outside of the model's inference mode, whose tensors no gradient may be computed beside
        return self.served.embedding_rows(found).clone()[place.to(self.served.device)]

    def all_output_rows(self) -> Tensor:
        """[vocabulary, H] of the whole output layer, in the type of products."""
        every = torch.arange(self.served.vocab_size)
        return self.served.output_rows(every).to(self.output_rows.dtype, copy=True)

    def replica(self) -> TrainingTarget:
        """The same for another thread."""
        return replace(self, states=self.states.replica())


def frozen_model(name: str, where: torch.device) -> Any:
    """A target as Transformers computes it, on a device."""
    return load_transformers_model(name, "bfloat16").eval().requires_grad_(False).to(where)


Options = TypeVar("Options", bound=HeadTraining)


class HeadLoss(ABC, Generic[Options]):
    """The mean loss of some rows of a batch, for each replica of a head.

    Args:
        targets: one for each of `replicas`, whose threads compute at the same time.
        cache: of the target's states; None: they are computed whenever they are read.
    """

    def __init__(
        self,
        options: Options,
        replicas: list[nn.Module],
        targets: list[TrainingTarget],
        cache: StateCache | None = None,
    ) -> None:
        self.options, self._cache = options, cache
        self._targets = {id(replica): target for replica, target in zip(replicas, targets, strict=True)}

    @abstractmethod
    def steps(self, model: nn.Module) -> int:
        """Tokens of a draft that are learnt."""

    @abstractmethod
    def summed(self, model: nn.Module, read: Read, piece: Batch) -> Tensor:
        """The sum of the loss over wanted tokens; weights of the tokens of a draft sum up to 1."""

    def __call__(self, model: nn.Module, piece: Batch, progress: float) -> Tensor:
        """piece: as `HeadBatches.batch` gives it."""
        options, target, where = self.options, self._targets[id(model)], device_of(model)
        tokens, wanted, documents, shares, numbers = piece
        rows = head_rows(tokens, wanted, documents, self.steps(model))
        if not len(rows.active):
            return sum((parameter * 0).sum() for parameter in model.parameters())  # type: ignore[return-value]
        if self._cache is None:
            states = target.states.of(rows.token_ids, rows.lengths)
        else:
            states = self._cache.of(target.states, tokens, documents).to(where)
        augment = None
        if options.dropout or options.noise:
            augment = Augmentation(options.dropout, options.noise, int(numbers[0]))
        embeddings = target.embeddings(to_device(rows.token_ids, where))
        total = self.summed(model, Read(target, rows, states, embeddings, augment), piece)
        return total * (float(shares[0]) / len(tokens))


@dataclass(frozen=True, slots=True)
class Read:
    """What a head reads of some rows of a batch.

    Attributes:
        rows: on the CPU.
        states: [N, layers, hidden] of all tokens, the target's after its final norm last. embeddings: [N, hidden].
    """

    target: TrainingTarget
    rows: HeadRows
    states: Tensor
    embeddings: Tensor
    augment: Augmentation | None


LossOf = Callable[[Options, list[nn.Module], list[TrainingTarget], StateCache | None], HeadLoss[Options]]


@dataclass(frozen=True, slots=True)
class HeadBatches:
    """Batches by the number of their step."""

    rows: PackedShard
    per_step: int
    seed: int

    def batch(self, step: int) -> Batch:
        """Tokens, wanted and documents, [rows, window + 1], of each row the factor that makes a sum over the wanted
        tokens the batch's mean, and the number that its noise is drawn by."""
        batch = self.rows.batch(step, self.per_step, self.seed)
        count = len(batch.tokens)
        shares = torch.full((count,), count / max(1, int(batch.wanted.sum())), dtype=torch.float64)
        numbers = (self.seed << 32) + step * self.per_step + torch.arange(count)
        return batch.tokens, batch.wanted, batch.documents, shares, numbers


def num_steps(rows: PackedShard, options: HeadTraining) -> int:
    """Steps of a run."""
    steps = max(1, round(options.epochs * len(rows) / rows_per_step(rows, options)))
    return min(steps, options.max_steps) if options.max_steps else steps


def rows_per_step(rows: PackedShard, options: HeadTraining) -> int:
    """Packed rows of a step."""
    return max(1, options.tokens_per_step // rows.window)


def train(
    head: HeadModule,
    target: TrainingTarget,
    rows: PackedShard,
    folder: Path,
    options: Options,
    console: Console,
    evaluate: Callable[[Any], float] | None,
    loss: LossOf[Options],
) -> LoopState:
    """Train a head in place, going on from the checkpoint in `folder` if there is one.

    loss: makes its loss.
    """
    total = num_steps(rows, options)
    optimisation = replace(
        options.optimisation,
        adam_lr=options.learning_rate,
        weight_decay=options.weight_decay,
        warmup=min(0.5, options.warmup_steps / total),
    )
    optimisers = Optimisers(head, optimisation)
    pinned = {key: value for key, value in asdict(options).items() if key not in _FREE}
    pin(folder, {**pinned, "data": dict(rows.made_from), "steps": total, "head": asdict(head.config)})
    state = load_checkpoint(folder, head, optimisers)
    workers = Workers(head, options.threads)
    targets = [target, *(target.replica() for _ in workers.replicas[1:])]
    cache = StateCache(folder / "states", round(options.cached_states * 1e9)) if options.cached_states else None
    evaluations = None
    if evaluate is not None and options.evaluate_every:
        evaluations = Evaluations(lambda _: evaluate(head), options.evaluate_every, options.patience)
    loop = Loop(
        folder=folder,
        model=head,
        optimisers=optimisers,
        total_steps=total,
        batch=HeadBatches(rows, rows_per_step(rows, options), options.seed).batch,
        loss=loss(options, list(workers.replicas), targets, cache),
        checkpoint_seconds=options.checkpoint_seconds,
        workers=workers,
        evaluations=evaluations,
    )
    loop.announce(state, console)
    return loop.run(state, console, "training the head")
