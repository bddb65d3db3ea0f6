"""The distillation of a draft: from the states of the model that it was cut from, then from its target's labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.errors import ConfigError
from forerun.kernels.torch.elementwise import softcap
from forerun.models import LanguageModel, load_model
from forerun.models.decoders import llama_refusal
from forerun.models.families.table import description_of
from forerun.models.loading.configuration import MASK_TOKEN
from forerun.train.accelerator import (
    MICRO_TOKENS,
    copy_to_device,
    device_of,
    dtype_name,
    model_vocabulary,
    products_in,
    training_device,
)
from forerun.train.checkpoint import (
    CHECKPOINT,
    DTYPE,
    FITTED,
    LoopState,
    Weights,
    load_best,
    load_checkpoint,
    pin,
    pinned,
    pinned_weights,
    save_checkpoint,
)
from forerun.train.data.packed import NO_DOCUMENT, PackedShard, frequent_tokens, token_counts
from forerun.train.defaults import WARMUP_STEPS, DraftTraining, LossName
from forerun.train.draft.fit import can_fit, fit
from forerun.train.draft.judge import HeldOutRows
from forerun.train.draft.parallel import MaskLayout, mask_token_of, set_mask_token
from forerun.train.draft.prune import check_size, chosen_layers, cut, narrow, switch_off_dropout, target_parameters
from forerun.train.draft.samples import (
    MOST_COLUMNS,
    Labels,
    ShardBatches,
    output_tokens_of,
    restrict,
)
from forerun.train.evaluate import behind_first, masked_inputs, output_rows, packed_inputs
from forerun.train.heads.target_states import TargetStates
from forerun.train.loop import Batch, Evaluations, Loop, StageProgress, Workers
from forerun.train.losses import distillation_loss
from forerun.train.needs import RunNeeds
from forerun.train.optim import Optimisers
from forerun.utils.files import digest, write_json
from forerun.utils.json_file import Fields

SHARDS = "shards"
"""Key of the number of shards of soft labels that a draft learns from."""
LAYERS = "layers"
"""Key of the layers that it keeps; in the first stage, of those whose states it imitates."""
KEPT = "kept"
"""Key of the layers that it keeps, in the first stage."""
IMITATION = "imitation"
DISTILLATION = "distil"
START_STATES = "states of the start"
FIT = "fit"
START = "start"
"""Key of the fingerprint of what it starts from, whose weights that are not trained are in no checkpoint."""
CALIBRATION = (64, 128)
"""Rows and tokens of the text that ranks layers and channels."""
OUTPUT_TOKENS_KEPT = 16_384
"""Output tokens of a draft with a vocabulary of more than MOST_COLUMNS tokens, if nobody says how many."""
IMITATION_SHARE = 1 / 3
"""Share of the tokens, or of the time for training, in which a cut draft that cannot be fitted learns from what it was
cut from."""
LABELS_SHARE = 1 / 4
"""Share of bounded minutes that computing soft labels may take."""
EVALUATIONS = 8
"""Evaluations of a stage, wherever it ends."""
NUM_DRAFT_TOKENS = 4
"""Tokens of the chains that are measured, where nobody says how many."""
IMITATED_ROWS = 96
"""Packed rows from which it learns then, at most."""
FITTED_ROWS = 480
"""Packed rows from which a draft is fitted, at most: of 512 tokens, 50 tokens for each input of a matrix of 4,864."""
_STATES_BYTES = 1 << 31
"""Their states, the draft's own, and masks, which are kept in memory, at most: 442 rows of 512 tokens and three layers
of 896 numbers."""
_LEAST_VARIANCE = 1e-6
LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 29, "mps": 1 << 25}
"""Logits in memory at once, with their gradients; those of more positions are recomputed in the backward pass."""


@dataclass(slots=True)
class DistillationLoss:
    """The loss of a draft on rows of samples: logits at wanted positions, some positions at a time.

    Attributes:
        name: of the loss (`losses.divergence`).
        output_tokens: int64, those that the draft proposes, of which ids are columns; None for all.
        dtype: of products.
        parallel: tokens of the chains that are learnt; None for one token at a time.
    """

    name: LossName
    output_tokens: Tensor | None = None
    dtype: torch.dtype = torch.float32
    parallel: int | None = None

    def mean(self, draft: nn.Module, rows: Batch, variation_share: float) -> Tensor:
        """Average over the positions of the rows whose next token is wanted, those of mask tokens included.

        rows: as `ShardBatches.rows_of` gives them.
        """
        assert isinstance(draft, PreTrainedModel)
        where = device_of(draft)
        tokens, ids, probs, documents, wanted, numbers = (copy_to_device(tensor, where) for tensor in rows)
        tokens = tokens[:, :-1].long()
        documents = documents[:, :-1]
        ids = ids.long()
        counted = wanted[:, 1:]
        inputs = packed_inputs(draft, tokens, documents)
        mask_token = mask_token_of(draft)
        if self.parallel is not None and mask_token is not None:
            layout = MaskLayout.drawn(counted, self.parallel, int(numbers[0]))
            inputs = masked_inputs(draft, layout, tokens, documents, mask_token)
            ids = layout.at(ids)
            probs = layout.at(probs)
            counted = layout.at(counted) & layout.is_within(documents)
        ids = ids[counted]
        probs = probs.float()[counted]
        with products_in(self.dtype, where):
            if llama_refusal(draft.config) is not None:  # it may do more to its logits than one product
                logits = draft(**inputs, use_cache=False).logits[counted]
                return distillation_loss(logits, ids, probs, self.name, variation_share=variation_share)
            hidden = draft.base_model(**inputs, use_cache=False).last_hidden_state[counted]
            return self._of_states(draft, hidden, ids, probs, variation_share)

    def _of_states(
        self, draft: PreTrainedModel, hidden: Tensor, ids: Tensor, probs: Tensor, variation_share: float
    ) -> Tensor:
        """Average over hidden states. hidden: [N, H] after the final norm; ids, probs: [N, k]."""
        weight, bias = output_rows(draft, self.output_tokens)

        def total(part: Tensor, part_ids: Tensor, part_probs: Tensor) -> Tensor:
            logits = F.linear(part, weight, bias)
            mean = distillation_loss(logits, part_ids, part_probs, self.name, variation_share=variation_share)
            return mean * len(part)

        return _in_parts(total, hidden, ids, probs, columns=len(weight))


@dataclass(slots=True)
class ImitationLoss:
    """The loss of a cut draft on the states of the model that it was cut from.

    After each layer that it keeps, its state should be the one that enters the next of these there, as if the layers
    between were still computed: the squared difference over that state's variance, number by number. After the final
    norm, the forward KL of the logits, scaled and capped as the model's, of both comes to it.

    Attributes: as those of `DistillationLoss`.
    """

    output_tokens: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def mean(self, draft: nn.Module, rows: Batch) -> Tensor:
        """Average over the positions behind the first of their documents. rows: as `StartStates.batch` gives them."""
        assert isinstance(draft, PreTrainedModel)
        where = device_of(draft)
        tokens, documents, states = (copy_to_device(tensor, where) for tensor in rows)
        used = behind_first(documents)
        weight, bias = output_rows(draft, self.output_tokens)
        # not no_grad: autocast would keep the layer's cast weights without their gradient
        of_start_rows = weight.detach(), None if bias is None else bias.detach()
        inputs = packed_inputs(draft, tokens.long(), documents)
        wanted = states[used].float()
        spec = description_of(draft.config).served
        assert spec is not None
        output = spec.output

        def logits(some: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            found = F.linear(some, weight, bias).float() * output.scale
            return found if output.softcap is None else softcap(found, output.softcap)

        def total(part: Tensor, of_start: Tensor) -> Tensor:
            wanted_probs = logits(of_start, *of_start_rows).softmax(-1)
            return F.cross_entropy(logits(part, weight, bias), wanted_probs) * len(part)

        with products_in(self.dtype, where):
            found = draft.base_model(**inputs, use_cache=False, output_hidden_states=True).hidden_states[1:]
            own = torch.stack([each[used].float() for each in found], 1)
            distance = ((own - wanted).square() / wanted.var(0, correction=0).clamp(min=_LEAST_VARIANCE)).mean()
            return distance + _in_parts(total, own[:, -1], wanted[:, -1], columns=2 * len(weight))


def _in_parts(total: Callable[..., Tensor], hidden: Tensor, *others: Tensor, columns: int) -> Tensor:
    """Average what `total` sums over positions, some at a time: their logits are computed again in the backward pass.

    Args:
        hidden, others: [N, ...], of which `total` takes parts.
        columns: logits of a position.
    """
    if not len(hidden):  # none of these rows' tokens are wanted
        return hidden.sum() * 0.0
    size = max(1, LOGITS_AT_ONCE[hidden.device.type] // columns)
    parts = list(zip(*(torch.split(each, size) for each in (hidden, *others)), strict=True))
    if len(parts) == 1:
        return total(*parts[0]) / len(hidden)
    sums = [checkpoint(total, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(sums).sum() / len(hidden)


def variation_share(progress: float, start: float, ramp: float = 0.1) -> float:
    """Return the weight of total variation: 0 before `start`, rising over `ramp` of the run, then 1."""
    return min(1.0, max(0.0, (progress - start) / ramp))


@dataclass(frozen=True, slots=True)
class Start:
    """What a draft starts from.

    Attributes:
        name: by which it is loaded.
        weights: in float32, with its tokenizer; they become the draft's.
    """

    name: str
    weights: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


class StartStates:
    """Batches of packed rows with the states of the model that a draft was cut from, kept in memory once computed.

    Args:
        start: that one's name, by which it is loaded when states are needed.
        layers: which the states enter, rising; the number of its layers stands for the state after the final norm.
        width: numbers of a state.
        most_rows: that have states, if memory allows.
        per_step: rows of a batch.

    Attributes:
        computing: what computing the states took, as a stage of the run.
    """

    def __init__(
        self,
        start: str,
        layers: Sequence[int],
        width: int,
        rows: PackedShard,
        most_rows: int,
        per_step: int,
        options: DraftTraining,
        console: Console,
    ) -> None:
        self.computing = LoopState()
        self._start = start
        self._device = training_device(options.device)
        self._layers = layers
        number_bytes = len(layers) * TargetStates.dtype.itemsize + torch.float32.itemsize
        most = max(1, _STATES_BYTES // (rows.window * (width * number_bytes + rows.window)))
        self._rows = rows.batch(0, min(len(rows), most_rows, most), options.seed)
        self._width = width
        self._per_step = min(per_step, len(self._rows.tokens))
        self._seed = options.seed
        self._console = console

    def batch(self, step: int) -> Batch:
        """Return the batch of step `step`: tokens and documents [B, T], states bfloat16 [B, T, layers, H]."""
        count = len(self._rows.tokens)
        epoch, position = divmod(step, count // self._per_step)
        order = torch.from_numpy(np.random.default_rng([self._seed, epoch]).permutation(count))
        chosen = order[position * self._per_step :][: self._per_step]
        return self._rows.tokens[chosen, :-1], self._rows.documents[chosen, :-1], self._states[chosen]

    @property
    def whole(self) -> Batch:
        """Compute the states now, if that is to be done, and return those of all rows, as `batch` does."""
        return self._rows.tokens[:, :-1], self._rows.documents[:, :-1], self._states

    @cached_property
    def _states(self) -> Tensor:
        """Compute the states of all rows, [rows, T, layers, H]; 0 where there is no token."""
        began = time.monotonic()
        states = TargetStates(load_model(self._start, device=self._device), self._layers)
        shape = *self._rows.tokens[:, :-1].shape, len(self._layers), self._width
        found = torch.zeros(shape, dtype=TargetStates.dtype)
        with StageProgress(self._console, START_STATES, len(found)) as progress:
            rows = zip(found, self._rows.tokens[:, :-1], self._rows.documents[:, :-1], strict=True)
            for done, (row, tokens, documents) in enumerate(rows, 1):
                used = documents != NO_DOCUMENT
                lengths = torch.unique_consecutive(documents[used], return_counts=True)[1].tolist()
                row[used] = states.of(tokens[used], lengths).cpu()
                self.computing.tokens += int(used.sum())
                progress.show(done, tokens=self.computing.tokens)
        self.computing.seconds = time.monotonic() - began
        return found


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """A draft after its training.

    Attributes:
        weights: of the best evaluation.
        stages: what each took.
        judge: measures it on rows that it never learnt from.
        learnt: the rows that it learnt from.
    """

    weights: PreTrainedModel
    stages: dict[str, LoopState]
    judge: HeldOutRows
    learnt: ShardBatches


def train_stages(
    target: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: PackedShard,
    run_folder: Path,
    options: DraftTraining,
    dtype: torch.dtype,
    console: Console,
    start: Start,
) -> TrainedDraft:
    """Run all stages, each continuing from `run_folder`.

    At most `LABELS_SHARE` of the options' minutes are for the target's soft labels: rows without any are left out then.

    dtype: of products.

    Raises:
        ConfigError: the draft is too large, cannot be cut, or `run_folder` is of another run.
    """
    draft = start.weights
    of_start = _same_start(run_folder, draft)
    switch_off_dropout(draft)
    imitation, distillation = (pinned(run_folder / stage) for stage in (IMITATION, DISTILLATION))
    # a run that goes on learns the same way from the same rows
    num_layers: int = draft.config.num_hidden_layers
    kept = _prune(draft, rows, options, distillation.list_of(LAYERS, int, imitation.list_of(KEPT, int, None)), console)
    vocabulary = _vocabulary(draft, target, rows, options)
    check_size(draft, target_parameters(target), None if vocabulary is None else len(vocabulary))
    if vocabulary is not None:
        restrict(draft, vocabulary)
    _set_trained(draft, tokenizer, rows, options)
    labels, held_out = _labels(target, rows, run_folder, options, vocabulary, model_vocabulary(draft))
    judge = HeldOutRows(held_out, options.parallel or NUM_DRAFT_TOKENS, dtype)
    former = distillation.integer(SHARDS, imitation.integer(SHARDS, 0))
    run = _Stages(draft, of_start, run_folder, options, dtype, judge, console)
    run.say_needs(labels.missing_bytes(former or len(labels)) + held_out.missing_bytes(judge.num_shards))
    stages: dict[str, LoopState] = {}
    states = None
    if kept is not None and can_fit(draft):
        stages = run.fit(start.name, kept, num_layers, rows)
    elif kept is not None:
        states = run.start_states(start.name, [*kept[1:], num_layers], rows, IMITATED_ROWS)
        if SHARDS not in distillation:
            _ = states.whole  # computed now, they are no part of the minutes
    end = options.end()
    labelled = math.inf if former else _after(LABELS_SHARE, end)
    shards = _write_labels(labels, held_out, former or len(labels), judge.num_shards, console, labelled)
    stages["labels"] = labels.computing()
    batches = ShardBatches(labels, shards, options.tokens_per_step, options.seed)
    if kept is not None and states is not None:
        facts = {"data": dict(rows.made_from), LAYERS: [*kept[1:], num_layers], KEPT: kept, SHARDS: shards}
        imitated = run.imitate(states, facts, _after(IMITATION_SHARE, end))
        stages |= {START_STATES: states.computing, IMITATION: imitated}
    stages["distillation"] = run.distil(batches, kept, end)
    return TrainedDraft(draft, stages, judge, batches)


def _after(share: float, end: float) -> float:
    """Return when so much of the time until `end` will be over, on the clock of time.monotonic."""
    now = time.monotonic()
    return now + share * (end - now)


def _labels(
    target: LanguageModel,
    rows: PackedShard,
    run_folder: Path,
    options: DraftTraining,
    vocabulary: Tensor | None,
    size: int,
) -> tuple[Labels, Labels]:
    """Return the labels of the rows that are learnt, and of those that are held out.

    size: tokens that the draft has logits of.
    """
    if vocabulary is None and size < target.vocab_size and size <= MOST_COLUMNS:
        vocabulary = torch.arange(size)  # what the target has behind it is padding
    folder = run_folder / "samples"
    labels = Labels(target, rows, folder, options.top, vocabulary, size=size)
    return labels, Labels(target, rows.held_out(), folder, options.top, vocabulary, "held-out", size)


def _same_start(run_folder: Path, draft: PreTrainedModel) -> str:
    """Return the fingerprint of what a draft starts from, as a former run in the folder has pinned it.

    Raises:
        ConfigError: that one started from other weights.
    """
    found = target_fingerprint(Weights(draft))
    for stage in (IMITATION, DISTILLATION):
        refusal = f"{run_folder / stage} was started from other weights than those of {draft.name_or_path}."
        found = pinned_weights(run_folder / stage, START, found, refusal)
    return found


def _set_trained(
    draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: PackedShard, options: DraftTraining
) -> None:
    """Set which weights are trained, and the mask token, and move the draft to its device."""
    if options.parallel is not None:
        set_mask_token(draft, tokenizer, rows)  # its embedding is to be learnt
    else:
        if mask_token_of(draft) is not None:
            delattr(draft.config, MASK_TOKEN)  # what it is not trained for any more
        for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            module.requires_grad_(False)
    draft.to(training_device(options.device))


def _write_labels(labels: Labels, held_out: Labels, shards: int, judged: int, console: Console, end: float) -> int:
    """Compute the labels that their folder lacks; return how many shards of the first are there.

    Args:
        judged: shards of the held-out rows.
        end: see `Labels`.
    """
    labels.pin()
    there = labels.num_complete(shards) + held_out.num_complete(judged)
    before = 0
    with StageProgress(console, "soft labels", shards + judged, there, end=end) as progress:

        def show_judged(done: int, tokens: int) -> None:
            nonlocal before
            before = tokens
            progress.show(max(there, done), tokens=tokens)

        held_out.write(show_judged, judged)
        found = labels.write(
            lambda done, tokens: progress.show(max(there, judged + done), tokens=before + tokens), shards, end
        )
    if found < len(labels):
        rows = f"{found * labels.shard_rows:,} of {len(labels.rows):,} rows"
        console.print(f"{rows} have labels, and are learnt", highlight=False)
    return found


def _prune(
    draft: PreTrainedModel, rows: PackedShard, options: DraftTraining, former: list[int] | None, console: Console
) -> Sequence[int] | None:
    """Leave layers and channels out of the start; return the layers that it keeps, None for all, and print them.

    former: those that a run that goes on has kept.
    """
    pruning = options.pruning
    count, length = CALIBRATION
    text = rows.batch(0, count, options.seed).tokens[:, :length]
    kept: Sequence[int] | None = None
    num_layers: int = draft.config.num_hidden_layers
    if pruning.layers is not None:
        kept = former or chosen_layers(draft, pruning.layers, text)
        cut(draft, kept)
        if len(kept) == num_layers and pruning.width is None:
            kept = None  # there is nothing to imitate
    if pruning.width is not None:
        narrow(draft, pruning, text)
    if kept is not None:
        console.print(f"layers {', '.join(map(str, kept))} of {num_layers} are kept", highlight=False)
    return kept


def _vocabulary(
    draft: PreTrainedModel, target: LanguageModel, rows: PackedShard, options: DraftTraining
) -> Tensor | None:
    """Return the tokens that the draft will propose, int64; None for all."""
    former = output_tokens_of(draft)
    size = min(model_vocabulary(draft), target.vocab_size)
    count = options.output_tokens
    if count is None and former is None and size > MOST_COLUMNS and llama_refusal(draft.config) is None:
        count = OUTPUT_TOKENS_KEPT
    return former if count is None else frequent_tokens(token_counts(rows, size), count, target.eos_token_ids)


def first_gap(kept: Sequence[int]) -> int:
    """Return which of the layers kept, rising, is the first whose state has another layer to enter than it had: the
    last one if there is no gap among them, the first one if those before it are left out."""
    if kept[0] > 0:
        return 0
    return next((at for at, (layer, after) in enumerate(pairwise(kept)) if after > layer + 1), len(kept) - 1)


def _fit_stages(folder: Path) -> dict[str, LoopState]:
    """Read what a fit took; nothing of a run of an earlier version, which kept none."""
    path = folder / FITTED
    if not path.exists():
        return {}
    fields = Fields.read(path, ConfigError, remedy="Remove it: the card then lacks what the fit took.")
    told = {name: fields.fields(name) for name in (START_STATES, FIT)}
    return {
        name: LoopState(each.integer("step"), each.integer("tokens"), each.number("seconds"))
        for name, each in told.items()
    }


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of a draft's training, each in a folder of its own.

    Attributes:
        draft: on its device; trained in place.
        start: fingerprint of what it was cut from, or is.
        folder: of the run.
        dtype: of products.
        judge: measures the draft on rows that it never learns from.
    """

    draft: PreTrainedModel
    start: str
    folder: Path
    options: DraftTraining
    dtype: torch.dtype
    judge: HeldOutRows
    console: Console

    def say_needs(self, samples: int) -> None:
        """Print what the run needs. samples: bytes of labels that are to be written.

        Raises:
            ConfigError: the disk has too little room.
        """
        where = device_of(self.draft)
        workers = Workers(self.draft, self.options.threads).count
        tokens = min(self.options.tokens_per_step, MICRO_TOKENS[where.type] * workers)
        proposed = output_tokens_of(self.draft)
        columns = model_vocabulary(self.draft) if proposed is None else len(proposed)
        needs = RunNeeds.of(
            self.draft,
            self._optimisers(),
            self.folder / DISTILLATION,
            replicas=workers,
            tokens=tokens,
            logits=min(columns, LOGITS_AT_ONCE[where.type] * workers // tokens),
            keeps_best=len(self.judge) > 0,
            samples=samples,
        )
        needs.say(self.folder, self.console, where)

    @property
    def _imitation_steps(self) -> int:
        """Return the steps of the first stage."""
        return max(1, int(IMITATION_SHARE * self.options.tokens) // self.options.tokens_per_step)

    def start_states(self, start: str, layers: Sequence[int], rows: PackedShard, most_rows: int) -> StartStates:
        """Return the batches of the first stage. Arguments as those of `StartStates`."""
        per_step = max(1, self.options.tokens_per_step // rows.window)
        width: int = self.draft.config.hidden_size
        return StartStates(start, layers, width, rows, most_rows, per_step, self.options, self.console)

    def fit(self, start: str, kept: Sequence[int], num_layers: int, rows: PackedShard) -> dict[str, LoopState]:
        """Solve for what can be solved for, unless a run did, whose checkpoint has it; return what that took.

        Args:
            start: name of what the draft was cut from.
            kept: its layers that the draft has, of `num_layers`.
        """
        self._pin(DISTILLATION, self._distillation_facts(kept))
        folder = self.folder / DISTILLATION
        if (folder / CHECKPOINT).exists():
            return _fit_stages(folder)
        first = 0 if self.options.pruning.width is not None else first_gap(kept)
        states = self.start_states(start, [*kept[1:], num_layers][first:], rows, FITTED_ROWS)
        whole = states.whole
        began = time.monotonic()
        done = LoopState(step=fit(self.draft, *whole), tokens=states.computing.tokens)
        done.seconds = time.monotonic() - began
        self.console.print(f"fit: {done.step} matrices in {done.seconds:.0f} s", highlight=False)
        stages = {START_STATES: states.computing, FIT: done}
        write_json(folder / FITTED, {name: asdict(stage) for name, stage in stages.items()}, error=ConfigError)
        save_checkpoint(folder, self.draft, self._optimisers(), LoopState())
        return stages

    def imitate(self, states: StartStates, facts: dict[str, Any], end: float) -> LoopState:
        """Learn the states of the model that the draft was cut from. facts: to be pinned. end: as that of `Loop`."""
        losses = ImitationLoss(output_tokens_of(self.draft), self.dtype)
        return self._train(
            IMITATION,
            facts,
            self._imitation_steps,
            states.batch,
            lambda model, batch, _: losses.mean(model, batch),
            end,
            is_over=SHARDS in pinned(self.folder / DISTILLATION),  # which went on from its end
        )

    def distil(self, batches: ShardBatches, kept: Sequence[int] | None, end: float) -> LoopState:
        """Learn the target's soft labels, over the tokens that the draft proposes. end: see `Loop`."""
        options = self.options
        tokens = output_tokens_of(self.draft)
        losses = DistillationLoss(cast(LossName, options.loss), tokens, self.dtype, options.parallel)

        def loss(model: nn.Module, rows: Batch, progress: float) -> Tensor:
            return losses.mean(model, rows, variation_share(progress, options.variation_from))

        facts = self._distillation_facts(kept) | {SHARDS: len(batches.shards)}
        former = 0 if kept is None or can_fit(self.draft) else self._imitation_steps
        steps = max(1, options.tokens // options.tokens_per_step - former)
        return self._train(DISTILLATION, facts, steps, batches.batch, loss, end)

    def _distillation_facts(self, kept: Sequence[int] | None) -> dict[str, Any]:
        """Return what is to be pinned, but the number of shards, which is not known from the beginning."""
        tokens = output_tokens_of(self.draft)
        return {
            "loss": self.options.loss,
            "parallel": self.options.parallel,
            "output_tokens": None if tokens is None else digest(tokens.numpy().tobytes()),
            LAYERS: kept,
        }

    def _pin(self, name: str, facts: dict[str, Any]) -> None:
        """Pin the options of a stage, or compare them with those of a run that goes on. Raises ConfigError as `pin`."""
        chosen = {key: asdict(self.options)[key] for key in ("learning_rate", "tokens_per_step", "pruning")}
        pinned_facts = chosen | facts | {START: self.start, DTYPE: dtype_name(self.dtype)}
        pin(self.folder / name, pinned_facts, later=(KEPT, SHARDS))

    def _optimisers(self) -> Optimisers:
        return Optimisers(self.draft, self.options.optimisation, self.dtype)

    def _train(
        self,
        name: str,
        facts: dict[str, Any],
        total_steps: int,
        batch: Callable[[int], Batch],
        loss: Callable[[nn.Module, Batch, float], Tensor],
        end: float,
        *,
        is_over: bool = False,
    ) -> LoopState:
        """Train from the checkpoint of a stage; return its state. is_over: what is there is not trained further."""
        options = self.options
        folder = self.folder / name
        optimisers = self._optimisers()
        self._pin(name, facts)
        state = load_checkpoint(folder, self.draft, optimisers)
        if is_over and state.step:
            if state.scores and state.best_step < state.step and not state.is_finished:
                load_best(folder, self.draft, state.best_step)
            return state
        loop = Loop(
            folder=folder,
            model=self.draft,
            optimisers=optimisers,
            total_steps=total_steps,
            batch=batch,
            loss=loss,
            checkpoint_seconds=options.checkpoint_seconds,
            workers=Workers(self.draft, options.threads),
            evaluations=Evaluations(self.judge.length, count=EVALUATIONS) if len(self.judge) else None,
            end=end,
            goes_on=name == DISTILLATION,
            says_needs=False,
            warmup_steps=WARMUP_STEPS,
        )
        return loop.run(state, self.console, name)
