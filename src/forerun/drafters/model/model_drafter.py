"""What every drafter with a model of its own must do: load it, and keep its caches level with what is committed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET, PREFILL_CHUNK
from forerun.drafters.base import Binding, Drafter, Traits
from forerun.drafters.ranked_tree import RankedTree
from forerun.errors import DrafterError, ModelLoadError
from forerun.models import Forward, LanguageModel, Rows, identity, load_model, load_tokenizer
from forerun.policy import Rates
from forerun.sampling import LogitsPipeline, LogitsRow, unfiltered
from forerun.tree import Tree
from forerun.types import Cache, Sequence, Step
from forerun.vocabulary import Vocabulary, check_same_tokens

MAX_LAG = 32
"""Committed tokens the draft model may be behind before it catches up without being asked to draft."""


@dataclass(slots=True, eq=False)
class Own:
    """The draft model's state for one sequence.

    Attributes:
        sequence: whose.
        cache: of the draft model.
        view: the sequence as the sampling pipeline sees it: a greedy one at temperature 1, so that there are laws.
        scratch: tokens of the rows fed since the cache's last commit.
        drafted: the last draft, and the rates that its trials are counted in; None where nobody counts.
        drafted_at: length of the sequence when it was made.
    """

    sequence: Sequence
    cache: Cache
    view: Sequence
    scratch: Tree = field(default_factory=Tree)
    drafted: tuple[RankedTree, Rates] | None = None
    drafted_at: int = 0


class Way(Enum):
    """How a request's tokens are picked."""

    GREEDY = "greedy"
    SEEDED = "with the noise that the target adds too"
    DRAWN = "drawn from the draft model's own laws"


class OwnModel(Drafter):
    """The base of drafters that run a causal language model that shares the target's vocabulary.

    Args:
        model: "bundled-draft", a folder, a hub id, or a loaded Model; None means the bundled draft, which belongs to
            the bundled target.
        dtype: of its weights; None takes the target's.

    The model is loaded when an LLM takes the drafter (`bind`).
    """

    def __init__(self, model: str | Path | LanguageModel | None, dtype: str | None) -> None:
        self._source = model
        self._dtype = dtype
        self._model: LanguageModel | None = None
        self._owned: dict[Sequence, Own] = {}

    @property
    def model(self) -> LanguageModel:
        """The draft model. Raises DrafterError before `bind`."""
        if self._model is None:
            raise DrafterError(f"This {type(self).__name__} is not bound to a target yet. Give it to LLM(drafter=...).")
        return self._model

    @property
    def traits(self) -> Traits:
        model = () if self._model is None else (identity(self._model),)
        return Traits((type(self).__name__, *model))

    @property
    def nbytes(self) -> int:
        """Bytes of the draft model's caches."""
        return sum(own.cache.nbytes for own in self._owned.values())

    def bind(self, binding: Binding) -> None:
        """Load the model and fit it to the target.

        Raises:
            ModelLoadError: the model cannot be read.
            IncompatibleDrafterError: its vocabulary is another.
        """
        target = binding.target
        if self._source is None:
            if target.name != BUNDLED_TARGET:
                raise DrafterError(
                    "A draft model without a name means the bundled draft, which belongs to the bundled target, not to "
                    f"{target.name}. Pass the folder or id of a draft model: drafter='path/to/draft'."
                )
            self._source = BUNDLED_DRAFT
        tokenizer: Any = None
        if isinstance(self._source, (str, Path)):
            dtype = self._dtype or str(target.dtype).removeprefix("torch.")
            model = self._model or load_model(self._source, dtype, device=target.device)
            try:
                tokenizer = load_tokenizer(self._source)
            except ModelLoadError:
                tokenizer = None  # check_same_tokens decides what that means
        else:
            model, tokenizer = self._source, binding.tokenizer
        check_same_tokens(
            Vocabulary(target.name, target.vocab_size, binding.tokenizer),
            Vocabulary(model.name, model.vocab_size, tokenizer),
        )
        self._serve(model, binding)

    def _serve(self, model: LanguageModel, binding: Binding) -> None:
        """Draft with this model, which fits the target."""
        target = binding.target
        self._model = model
        self._vocab_size = target.vocab_size
        self._pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
        self._generator = torch.Generator()
        if binding.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(binding.seed)

    def start(self, sequence: Sequence) -> None:
        view = sequence
        if sequence.params.greedy and not self._pipeline.is_identity(sequence.params):
            view = replace(sequence, params=replace(unfiltered(sequence.params), temperature=1.0))
        self._owned[sequence] = Own(sequence, self._cache_for(sequence), view)
        self._pipeline.start(view)

    def stop(self, sequence: Sequence) -> None:
        own = self._owned.pop(sequence, None)
        if own is not None:
            self._pipeline.stop(own.view)
            self._free(own)

    def commit(self, steps: Seq[Step]) -> None:
        late = []
        for step in steps:
            own = self._owned[step.sequence]
            if own.drafted is not None:
                _count_trials(own)
            if len(own.scratch):
                self._settle(own)
            if step.num_computed - own.cache.length >= MAX_LAG:
                late.append((own, step.num_computed))
        if late:  # most often nobody is, and then nothing is computed here at all
            self._catch_up([own for own, _ in late], MAX_LAG, [end for _, end in late])

    def rewind(self, sequence: Sequence, length: int) -> None:
        """The sequence's tokens from `length` on are others than before: forget what was computed of them."""
        own = self._owned[sequence]
        own.drafted = None
        self._settle(own, length)
        own.cache.truncate(min(length, own.cache.length))

    def _cache_for(self, sequence: Sequence) -> Cache:
        """Where the model keeps a sequence's keys and values."""
        return self.model.new_cache()

    def _free(self, own: Own) -> None:
        own.cache.free()

    def _room(self, sequence: Sequence, budget: int) -> int:
        """How deep a draft may be: the deepest token that is fed stands at len + depth - 2."""
        room = min(self.model.context_length - len(sequence.token_ids) + 1, sequence.room)
        return max(0, min(budget, room))

    def _owed(self, own: Own) -> list[int]:
        """Committed tokens the draft model has not been fed, the last of them included; after full acceptance two."""
        tokens = own.sequence.token_ids
        self._settle(own)
        if own.cache.length >= len(tokens):
            own.cache.truncate(len(tokens) - 1)
        return self._within_vocabulary(tokens[own.cache.length :])

    def _settle(self, own: Own, end: int = -1) -> None:
        """Of what was fed, keep what agrees with the committed tokens up to `end`, and drop the rest."""
        if len(own.scratch):
            own.cache.commit(own.scratch.follow(own.sequence.token_ids[own.cache.length : end]))
            own.scratch = Tree()

    def _feed(self, rows: Seq[Rows], owned: Seq[Own], final: bool = False) -> Forward:
        """Compute rows of these sequences' caches.

        final: they are committed tokens; otherwise they join the scratch until `_settle`.
        """
        try:
            result = self._forward(rows, owned)
        except BaseException:  # an interrupt too: keys that were not computed must not be taken for a prefix
            for own in owned:
                own.cache.drop()
                own.scratch = Tree()
            raise
        for row, own in zip(rows, owned, strict=True):
            if final:
                own.cache.commit(range(len(row.token_ids)))
                continue
            first = len(own.scratch)
            parents = range(first - 1, first + len(row.token_ids) - 1) if row.parents is None else row.parents
            for token_id, parent in zip(row.token_ids, parents, strict=True):
                own.scratch.add(token_id, parent)
        return result

    def _forward(self, rows: Seq[Rows], owned: Seq[Own]) -> Forward:
        """The draft model's forward, of rows of these sequences."""
        return self.model.forward(rows)

    def _catch_up(self, owned: Seq[Own], max_lag: int, num_computed: Seq[int] | None = None) -> None:
        """Feed what is owed to those who owe more than max_lag, but for the last token, in chunks."""
        while True:
            rows: list[Rows] = []
            behind: list[Own] = []
            for i, own in enumerate(owned):
                end = len(own.sequence.token_ids) - 1 if num_computed is None else num_computed[i]
                if end >= self.model.context_length or end - own.cache.length < max_lag:
                    continue
                owed = self._owed(own)[: min(PREFILL_CHUNK, end - own.cache.length)]
                if len(owed) >= max_lag:
                    rows.append(Rows(own.cache, owed, None, 0))
                    behind.append(own)
            if not rows:
                return
            self._feed(rows, behind, final=True)

    def _logprobs(self, logits: Tensor, rows: Seq[tuple[Own, Seq[int]]]) -> Tensor:
        """[R, V] processed log-probabilities.

        Args:
            logits: [R, draft vocabulary].
            rows: the sequence and the drafted path that each row stands after.
        """
        width = logits.shape[1]
        if width < self._vocab_size:
            logits = functional.pad(logits, (0, self._vocab_size - width), value=-torch.inf)
        return self._pipeline.process(logits[:, : self._vocab_size], _places(rows))

    def _laws(self, logits: Tensor, rows: Seq[tuple[Own, Seq[int]]]) -> Tensor:
        """[R, V] processed probabilities; arguments as of `_logprobs`."""
        if logits.shape[1] < self._vocab_size:
            return self._logprobs(logits, rows).exp_()
        return self._pipeline.probabilities(logits[:, : self._vocab_size], _places(rows))

    def _remember(self, own: Own, drafted: tuple[RankedTree, Rates] | None) -> None:
        """Let `commit` count what becomes of this draft; None: nothing is to be counted."""
        own.drafted, own.drafted_at = drafted, len(own.sequence.token_ids)

    def _within_vocabulary(self, token_ids: list[int]) -> list[int]:
        """Tokens as the draft model may be fed: one that only the target's padding has becomes token 0."""
        size = self.model.vocab_size
        return token_ids if size >= self._vocab_size else [t if t < size else 0 for t in token_ids]


def _places(rows: Seq[tuple[Own, Seq[int]]]) -> list[LogitsRow]:
    """Where rows stand, for the pipeline."""
    for own, _ in rows:
        own.view.token_ids = own.sequence.token_ids
    return [LogitsRow(own.view, path) for own, path in rows]


def way_of(sequence: Sequence) -> Way:
    """How a request's tokens are picked."""
    params = sequence.params
    return Way.GREEDY if params.greedy else Way.DRAWN if params.seed is None else Way.SEEDED


def _count_trials(own: Own) -> None:
    """By tokens, not by the step's verdict: what was verified may be another draft, of which this was a part."""
    assert own.drafted is not None
    tree, rates = own.drafted
    own.drafted = None
    tree.observe_tokens(rates, own.sequence.token_ids[own.drafted_at :])
