"""Models that draft: which states of the target they read, how they are fed, what their columns mean in the target's
tokens, and whose cache they write. How nodes are chosen is a growth's part (`growth/base.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence as Seq
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import compress, count
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from forerun.config import PREFILL_CHUNK
from forerun.drafters.base import UNKNOWN_ACCEPTANCE, Acceptance, Binding, NamedModel
from forerun.drafters.models.draft_vocabulary import Columns, DraftVocabulary, check_draft_vocab, chosen_vocabulary
from forerun.drafters.models.prefill_policy import PrefillPolicy
from forerun.drafters.models.state import DraftState
from forerun.models import Forward, LanguageModel, Rows
from forerun.models.draft_session import DraftSession, NextTokens, Pick
from forerun.models.model import first_non_finite_tensor
from forerun.sampling import DeadRows, LogitsPipeline, non_finite_rows, unfiltered
from forerun.types import Cache, Needs, Pool, Sequence, Step
from forerun.utils.vocabulary import special_tokens

_log = logging.getLogger(__name__)

MAX_LAG = 32
"""Uncomputed committed tokens at which the model prefills without a draft request."""


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model that has been read and fits its target.

    Attributes:
        needs: the target's states that it reads.
        acceptance: as the record beside it tells it.
    """

    model: LanguageModel
    columns: Columns
    needs: Needs = field(default_factory=Needs)
    acceptance: Acceptance = UNKNOWN_ACCEPTANCE


class DraftModelSource(Protocol):
    """Where a model that drafts comes from."""

    def to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """Return what `read` will load for a target of this name."""

    def read(self, binding: Binding) -> BoundModel | None:
        """Load the model, once, and fit it to the target; None, after a warning, where nothing is to be drafted.

        Raises:
            DrafterError, ModelLoadError: there is none, it cannot be read, or it does not fit the target.
        """


class Learnable(Protocol):
    """What of a bound model can go on learning while it drafts."""

    @property
    def name(self) -> str:
        """Return what messages call the model."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that may change, as they were loaded (`Adaptable.tensors`)."""

    def changed(self, tensors: Mapping[str, Tensor]) -> BoundModel:
        """Return the model with these tensors, on the same pages. Any thread may call this."""


_OTHER_WEIGHTS = count(1)
State = TypeVar("State", bound=DraftState)


class DraftingModel(Generic[State]):
    """A model that drafts for a target, with its state of every sequence.

    As it is, it is a causal language model that is fed the sequence's tokens and keeps caches of its own. Kinds that
    differ override `forward` and what else is different.

    Attributes:
        source: where it comes from.
        states: of each sequence that was started.
        given: the model as it was read, with all that it can propose, and the target's side; after `bind`.

    Args:
        new_state: makes the state of a sequence from it, its cache, and how the sampling pipeline sees it.
        draft_vocab: as `size` of `chosen_vocabulary`.

    Raises:
        ConfigError: draft_vocab is too small.
    """

    has_own_caches = True
    """It adopts, publishes and frees the caches; otherwise the engine does."""
    reads_states = False
    """It reads hidden states of the target."""
    follows: int | None = None
    """`Traits.follows`."""

    def __init__(
        self,
        source: DraftModelSource,
        new_state: Callable[[Sequence, Cache, Sequence], State],
        draft_vocab: int | None = 0,
    ) -> None:
        check_draft_vocab(draft_vocab)
        self.source = source
        self.states: dict[Sequence, State] = {}
        self._new_state = new_state
        self._bound: BoundModel | None = None
        self._draft_vocab = draft_vocab
        self.given: tuple[BoundModel, Binding]
        self._vocabulary: DraftVocabulary | None = None
        self._reported = False
        self._weights: int | None = None  # the number of a copy's, which others' pages do not fit
        self._prefill_policy = PrefillPolicy(is_cheap=self.reads_states)  # a head has a layer or a few

    @property
    def is_bound(self) -> bool:
        """Return whether the model has been read."""
        return self._bound is not None

    @property
    def bound(self) -> BoundModel:
        """Return the model with what belongs to it, after `bind`."""
        assert self._bound is not None
        return self._bound

    @property
    def model(self) -> LanguageModel:
        """Return the model, after `bind`."""
        return self.bound.model

    @property
    def columns(self) -> Columns:
        """Return what its columns are, after `bind`."""
        return self.bound.columns

    @property
    def needs(self) -> Needs:
        """Return the target's states that it reads; complete after `bind`."""
        return Needs() if self._bound is None else self._bound.needs

    @property
    def acceptance(self) -> Acceptance:
        """Return what the record beside it tells; complete after `bind`."""
        return UNKNOWN_ACCEPTANCE if self._bound is None else self._bound.acceptance

    @property
    def learnable(self) -> Learnable | None:
        """Return what of it can go on learning; complete after `bind`. None: nothing."""
        return None

    @property
    def options(self) -> tuple[str, ...]:
        """Return what drafting time depends on beside the model; complete after `bind`."""
        return () if self._vocabulary is None else (f"{self._vocabulary.size} tokens",)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Return the page pool of its caches, if they are its own."""
        pool = self._bound.model.pool if self._bound is not None and self.has_own_caches else None
        return () if pool is None else (pool,)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its caches."""
        return sum(state.cache.nbytes for state in self.states.values())

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """Return what `bind` will load for a target of this name."""
        return () if self.is_bound else self.source.to_load(target_name)

    def bind(self, binding: Binding) -> None:
        """Read the model and fit it to the target. Raises as `ModelSource.read`."""
        bound = self.source.read(binding)
        if bound is not None:
            self.use(bound, binding)

    def use(self, bound: BoundModel, binding: Binding) -> None:
        """Draft with this model, which fits the target."""
        target = binding.target
        self._bound = bound
        self.given = bound, binding
        always = [*target.eos_token_ids, *special_tokens(binding.tokenizer).values()]
        self._vocabulary = chosen_vocabulary(self._draft_vocab, bound.model, bound.columns, always)
        self._prefix_reuse = binding.prefix_reuse
        self.vocab_size = target.vocab_size
        self.pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)

    def with_model(self, bound: BoundModel) -> Self:
        """Return the same for another model of the same shapes, with no sequence."""
        made = copy(self)
        made.states = {}
        made._weights = next(_OTHER_WEIGHTS)
        made._prefill_policy = PrefillPolicy(is_cheap=self.reads_states)
        made.use(bound, self.given[1])
        return made

    # The state of a sequence, as `Drafter` has it.

    def start(self, sequence: Sequence) -> None:
        """Begin a sequence."""
        view = sequence
        if sequence.params.greedy and not self.pipeline.is_identity(sequence.params):
            view = replace(sequence, params=replace(unfiltered(sequence.params), temperature=1.0))
        self.states[sequence] = state = self._new_state(sequence, self.cache_for(sequence), view)
        self._prefill_policy.start(sequence)
        if self.has_own_caches and self._prefix_reuse:
            self.adopt_prefix(state)

    def stop(self, sequence: Sequence) -> None:
        """Free a sequence's state."""
        state = self.states.pop(sequence, None)
        self._prefill_policy.stop(sequence)
        if state is not None:
            self.pipeline.stop(state.view)
            if self.has_own_caches:
                state.cache.free()

    def commit(self, steps: Seq[Step]) -> None:
        """Take in committed tokens, and prefill those of sequences that draft often."""
        behind = []
        for step in steps:
            state = self.states[step.sequence]
            if state.drafted is not None:
                state.count_trials()
            state.settle()
            if not self._prefill_policy.prefills(step):
                state.skip_prefill()
            elif step.num_computed - state.shift - state.cache.length >= MAX_LAG:
                behind.append((state, step.num_computed))
        if behind:
            self.prefill([state for state, _ in behind], MAX_LAG, [end for _, end in behind])
        for step in steps:
            self._publish(self.states[step.sequence])

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Forget what was computed of the tokens from `length` on."""
        self.states[sequence].rewind(length)

    # Whose cache it writes.

    def cache_for(self, sequence: Sequence) -> Cache:
        """Return where the model keeps a sequence's keys and values."""
        return self.model.new_cache()

    def adopt_prefix(self, state: State) -> None:
        """Adopt what was computed for other requests into a new cache."""
        sequence = state.sequence
        state.num_published = state.cache.adopt(self.prefix_ids(sequence), self._owner(sequence))

    def _owner(self, sequence: Sequence) -> str | None:
        """Return whose pages a sequence adopts: its tenant's, of those that this model's weights have computed."""
        tenant = sequence.params.tenant
        return tenant if self._weights is None else f"\n{self._weights}\n{tenant or ''}"

    def prefix_ids(self, sequence: Sequence) -> list[int]:
        """Return what a cache that holds the whole sequence contains, position by position."""
        return self.columns.readable(sequence.token_ids)

    def _publish(self, state: State) -> None:
        """Publish for adoption by others the whole pages that have been computed since."""
        if self.has_own_caches and self._prefix_reuse and state.may_publish():
            state.publish(self.prefix_ids(state.sequence), self._owner(state.sequence))

    # How it is fed.

    def affordable(self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], num_rows: Seq[int]) -> list[int]:
        """Record that these sequences draft, let the model propose their tokens, and return their numbers of draft
        tokens, 0 where the pool lacks pages.

        Called before anything is drawn: to drop a draft, or to choose what it is drawn from, for what it contains would
        change the output's distribution.

        num_rows: rows of each draft, which are fed beside the sequence's tokens.
        """
        self._prefill_policy.record_drafts(compress(sequences, num_draft_tokens))
        if self._vocabulary is not None:
            self._vocabulary.include(t for each in sequences for t in self.states[each].unseen_tokens())
            self._bound = replace(self.bound, model=self._vocabulary.model, columns=self._vocabulary.columns)
        pool = self.model.pool
        affordable = []
        if pool is None or pool.num_pages is None:
            return list(num_draft_tokens)
        available = pool.num_available
        for sequence, max_nodes, rows in zip(sequences, num_draft_tokens, num_rows, strict=True):
            cache = self.states[sequence].cache
            num_pages = cache.pages_wanted(len(sequence.token_ids) + rows) if max_nodes > 0 else 0
            fits = num_pages <= available
            affordable.append(max_nodes if fits else 0)
            available -= num_pages if fits else 0
        return affordable

    def max_depth(self, sequence: Sequence, max_nodes: int) -> int:
        """Return how deep a draft may be: the deepest token that is fed stands at len + depth - 2."""
        num_fed = len(sequence.token_ids) - self.states[sequence].shift
        room = min(self.model.context_length - num_fed + 1, sequence.room)
        return max(0, min(max_nodes, room))

    def longest_chain(self, max_nodes: int) -> int:
        """Return the tokens of the longest chain, of at most `max_nodes`, that it can draft."""
        return max_nodes

    def unfed(self, state: State) -> list[int]:
        """Return the committed tokens to be fed before drafting."""
        return self.columns.readable(state.unfed())

    def prefill(self, states: Seq[State], min_tokens: int, num_computed: Seq[int] | None = None) -> None:
        """Feed committed tokens, except the last one, in chunks, where at least min_tokens of them are not fed yet."""
        pool = self.model.pool
        while True:
            rows: list[Rows] = []
            fed: list[State] = []
            reserved = 0
            for i, state in enumerate(states):
                end = len(state.sequence.token_ids) - 1 if num_computed is None else num_computed[i]
                end -= state.shift
                if end >= self.model.context_length or end - state.cache.length < min_tokens:
                    continue
                unfed = self.unfed(state)[: min(PREFILL_CHUNK, end - state.cache.length)]
                if len(unfed) < min_tokens:
                    continue
                if pool is not None and pool.num_pages is not None:
                    num_pages = state.cache.pages_wanted(state.cache.length + len(unfed))
                    if reserved + num_pages > pool.num_available:
                        continue
                    reserved += num_pages
                rows.append(Rows(state.cache, unfed, None, 0))
                fed.append(state)
            if not rows:
                return
            self.feed(rows, fed, final=True)

    def feed(self, rows: Seq[Rows], states: Seq[State], final: bool = False) -> Forward:
        """Compute rows of these sequences' caches.

        final: they are committed tokens; otherwise they are scratch until `DraftState.settle`.
        """
        try:
            result = self.forward(rows, states)
        except BaseException:  # an interrupt too: keys that were not computed must not be taken for a prefix
            for state in states:
                state.drop()
            raise
        for row, state in zip(rows, states, strict=True):
            if final:
                state.cache.commit(range(len(row.token_ids)))
            else:
                state.add(row)
        return result

    def forward(self, rows: Seq[Rows], states: Seq[State]) -> Forward:
        """Run the model on rows of these sequences."""
        return self.model.forward(rows)

    def draft_session(self, states: Seq[State], pick: Pick) -> DraftSession | None:
        """Return a session that computes the chains of these sequences row by row; None if there is none."""
        return self.model.draft_session([state.cache for state in states], pick)

    def advance(
        self, chains: DraftSession, tokens: Seq[list[int]], states: Seq[State], read: Tensor | None = None
    ) -> NextTokens:
        """Feed the chains of these sequences their next tokens, as `feed` does.

        read: [rows, S] what a head's rows of committed tokens read, which are final; None: the rows are scratch.
        """
        try:
            found = chains.advance(tokens, read)
        except BaseException:
            for state in states:
                state.drop()
            raise
        for each, state in zip(tokens, states, strict=True):
            if read is None:
                state.add(Rows(state.cache, each))
            else:
                state.cache.commit(range(len(each)))
        return found

    # What its columns mean in the target's tokens.

    def logprobs(self, logits: Tensor, rows: Seq[tuple[State, Seq[int]]], dead: DeadRows | None = None) -> Tensor:
        """Return [R, V] processed log-probabilities.

        Args:
            logits: [R, draft vocabulary].
            rows: the sequence and the drafted path that each row stands after.
            dead: gets the rows that have no token which the model can propose. Nothing is to be picked there.
        """
        places = [state.logits_row(path) for state, path in rows]
        return self.pipeline.process(self.columns.widened(logits), places, dead)

    def probs(self, logits: Tensor, rows: Seq[tuple[State, Seq[int]]], dead: DeadRows | None = None) -> Tensor:
        """Return [R, V] processed probabilities. Arguments as of `logprobs`."""
        places = [state.logits_row(path) for state, path in rows]
        return self.pipeline.probabilities(self.columns.widened(logits), places, dead)

    def takes_largest(self, sequence: Sequence) -> bool:
        """Return whether the tokens of a request are those of the largest logits, whatever these are otherwise."""
        return sequence.params.greedy and self.pipeline.is_identity(sequence.params)

    def non_finite_rows(self, logits: Tensor) -> frozenset[int]:
        """Return the rows with logits that are not finite; report the first ones, once."""
        rows = non_finite_rows(logits)
        if rows and not self._reported:
            self._reported = True
            tensor = first_non_finite_tensor(self.model)
            _log.warning(
                "The draft model %s computed logits that are NaN or infinite%s. Nothing is drafted from these; the "
                "target's text is not affected. Take another draft model.",
                self.model.name,
                "" if tensor is None else f" (its weights hold such numbers, first in {tensor})",
            )
        return frozenset(rows)
