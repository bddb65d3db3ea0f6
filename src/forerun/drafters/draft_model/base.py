"""The base of drafters that run a draft model: loading, caches, draft prefill."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import compress
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from forerun.config import PREFILL_CHUNK
from forerun.drafters.base import UNKNOWN_ACCEPTANCE, Binding, Drafter, NamedModel, Traits, recorded_acceptance
from forerun.drafters.draft_model.source import DraftSource, check_draft_quantization
from forerun.drafters.models.prefill_policy import PrefillPolicy
from forerun.drafters.models.state import DraftState
from forerun.errors import DrafterError
from forerun.models import Forward, LanguageModel, Rows, identity
from forerun.models.draft_session import DraftSession, NextTokens
from forerun.models.non_finite import first_non_finite_tensor
from forerun.sampling import LogitsPipeline, non_finite_rows, unfiltered
from forerun.types import Cache, Pool, Sequence, Step
from forerun.utils.vocabulary import Vocabulary, check_same_tokens

_log = logging.getLogger(__name__)


MAX_LAG = 32
"""Uncomputed committed tokens at which the draft model prefills without a draft request."""


class ModelDrafter(Drafter):
    """The base of drafters that run a causal language model that shares the target's vocabulary.

    Args:
        model: "bundled-draft", a folder, a hub id, or a loaded Model; None means the bundled draft, which belongs to
            the bundled target, and for other targets, with `quantize`, the target itself.
        dtype: of its weights; None takes the target's, or float32 where that is float64 and the draft
            is quantized.
        quantize: "int8" or "int4", what its weights are kept in; None: as its files are.

    The model is loaded when an LLM takes the drafter (`bind`).
    """

    _has_own_caches = True
    """The drafter adopts, publishes and frees the caches; otherwise the engine does."""
    _follows: int | None = None
    """`Traits.follows`. A head prefills only as far as it holds the target's states."""
    _state_type: type[DraftState] = DraftState

    def __init__(self, model: str | Path | LanguageModel | None, dtype: str | None, quantize: str | None) -> None:
        check_draft_quantization(quantize, model, dtype)
        self._source = DraftSource(model, dtype, quantize)
        self._model: LanguageModel | None = None
        self._acceptance = UNKNOWN_ACCEPTANCE
        self._states: dict[Sequence, DraftState] = {}
        self._reported = False
        self._prefill_policy = PrefillPolicy()

    @property
    def pools(self) -> tuple[Pool, ...]:
        pool = self._model.pool if self._model is not None and self._has_own_caches else None
        return () if pool is None else (pool,)

    @property
    def model(self) -> LanguageModel:
        """Return the draft model. Raises DrafterError before `bind`."""
        if self._model is None:
            raise DrafterError(f"This {type(self).__name__} is not bound to a target yet. Give it to LLM(drafter=...).")
        return self._model

    @property
    def traits(self) -> Traits:
        model = () if self._model is None else (identity(self._model),)
        return Traits((type(self).__name__, *model), follows=self._follows, can_sleep=True, acceptance=self._acceptance)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the draft model's caches."""
        return sum(state.cache.nbytes for state in self._states.values())

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        return () if self._model is not None else self._source.to_load(target_name)

    def bind(self, binding: Binding) -> None:
        """Load the model and fit it to the target.

        Raises:
            ModelLoadError: the model cannot be read.
            IncompatibleDrafterError: its vocabulary is another.
            DrafterError: no model was named, and there is none for the target.
        """
        target = binding.target
        model, tokenizer = self._source.read(binding, self._model)
        for named in self._source.to_load(target.name):
            self._acceptance = recorded_acceptance(named.name)
        check_same_tokens(
            Vocabulary(target.name, target.vocab_size, binding.tokenizer),
            Vocabulary(model.name, model.vocab_size, tokenizer),
        )
        self._use_model(model, binding)

    def _use_model(self, model: LanguageModel, binding: Binding) -> None:
        """Draft with this model, which fits the target."""
        target = binding.target
        self._model = model
        self._prefix_reuse = binding.prefix_reuse
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
        self._states[sequence] = state = self._state_type(sequence, self._cache_for(sequence), view)
        self._prefill_policy.start(sequence)
        if self._has_own_caches and self._prefix_reuse:
            self._adopt_prefix(state)

    def stop(self, sequence: Sequence) -> None:
        state = self._states.pop(sequence, None)
        self._prefill_policy.stop(sequence)
        if state is not None:
            self._pipeline.stop(state.view)
            self._free(state)

    def commit(self, steps: Seq[Step]) -> None:
        behind = []
        for step in steps:
            state = self._states[step.sequence]
            if state.drafted is not None:
                state.count_trials()
            state.settle()
            if not self._prefill_policy.prefills(step):
                state.skip_prefill()
            elif step.num_computed - state.shift - state.cache.length >= MAX_LAG:
                behind.append((state, step.num_computed))
        if behind:
            self._prefill([state for state, _ in behind], MAX_LAG, [end for _, end in behind])
        for step in steps:
            self._publish(self._states[step.sequence])

    def rewind(self, sequence: Sequence, length: int) -> None:
        self._states[sequence].rewind(length)

    def _adopt_prefix(self, state: DraftState) -> None:
        """Adopt what was computed for other requests into a new cache."""
        sequence = state.sequence
        state.num_published = state.cache.adopt(self._prefix_ids(sequence), sequence.params.tenant)

    def _prefix_ids(self, sequence: Sequence) -> list[int]:
        """Return what a cache that holds the whole sequence contains, position by position."""
        return self._within_vocabulary(sequence.token_ids)

    def _cache_for(self, sequence: Sequence) -> Cache:
        """Return where the model keeps a sequence's keys and values."""
        return self.model.new_cache()

    def _free(self, state: DraftState) -> None:
        state.cache.free()

    def _publish(self, state: DraftState) -> None:
        """Publish for adoption by others the whole pages that have been computed since."""
        if self._has_own_caches and self._prefix_reuse and state.may_publish():
            state.publish(self._prefix_ids(state.sequence))

    def _affordable(self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], num_rows: Seq[int]) -> list[int]:
        """Record that these sequences draft, and return their numbers of draft tokens, 0 where the pool lacks pages.

        Called before anything is drawn: to drop a draft for what it contains would change the output's distribution.

        num_rows: rows of each draft, which are fed beside the sequence's tokens.
        """
        self._prefill_policy.record_drafts(compress(sequences, num_draft_tokens))
        pool, affordable = self.model.pool, []
        if pool is None or pool.num_pages is None:
            return list(num_draft_tokens)
        available = pool.num_available
        for sequence, max_nodes, rows in zip(sequences, num_draft_tokens, num_rows, strict=True):
            cache = self._states[sequence].cache
            num_pages = cache.pages_wanted(len(sequence.token_ids) + rows) if max_nodes > 0 else 0
            fits = num_pages <= available
            affordable.append(max_nodes if fits else 0)
            available -= num_pages if fits else 0
        return affordable

    def _max_depth(self, sequence: Sequence, max_nodes: int) -> int:
        """Return how deep a draft may be: the deepest token that is fed stands at len + depth - 2."""
        room = min(self.model.context_length - len(sequence.token_ids) + 1, sequence.room)
        return max(0, min(max_nodes, room))

    def _unfed(self, state: DraftState) -> list[int]:
        """Return the committed tokens to be fed before drafting."""
        return self._within_vocabulary(state.unfed())

    def _feed(self, rows: Seq[Rows], states: Seq[DraftState], final: bool = False) -> Forward:
        """Compute rows of these sequences' caches.

        final: they are committed tokens; otherwise they are scratch until `DraftState.settle`.
        """
        try:
            result = self._forward(rows, states)
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

    def _advance(
        self, chains: DraftSession, tokens: Seq[list[int]], states: Seq[DraftState], read: Tensor | None = None
    ) -> NextTokens:
        """Feed the chains of these sequences their next tokens, as `_feed` does.

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

    def _non_finite_rows(self, logits: Tensor) -> frozenset[int]:
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

    def _forward(self, rows: Seq[Rows], states: Seq[DraftState]) -> Forward:
        """Run the draft model on rows of these sequences."""
        return self.model.forward(rows)

    def _prefill(self, states: Seq[DraftState], min_tokens: int, num_computed: Seq[int] | None = None) -> None:
        """Feed committed tokens, except the last one, in chunks, where at least min_tokens of them are not fed yet."""
        pool = self.model.pool
        while True:
            rows: list[Rows] = []
            fed: list[DraftState] = []
            reserved = 0
            for i, state in enumerate(states):
                end = len(state.sequence.token_ids) - 1 if num_computed is None else num_computed[i]
                end -= state.shift
                if end >= self.model.context_length or end - state.cache.length < min_tokens:
                    continue
                unfed = self._unfed(state)[: min(PREFILL_CHUNK, end - state.cache.length)]
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
            self._feed(rows, fed, final=True)

    def _logprobs(self, logits: Tensor, rows: Seq[tuple[DraftState, Seq[int]]]) -> Tensor:
        """Return [R, V] processed log-probabilities.

        Args:
            logits: [R, draft vocabulary].
            rows: the sequence and the drafted path that each row stands after.
        """
        return self._pipeline.process(self._widened(logits), [state.logits_row(path) for state, path in rows])

    def _probs(self, logits: Tensor, rows: Seq[tuple[DraftState, Seq[int]]]) -> Tensor:
        """Return [R, V] processed probabilities. Arguments as of `_logprobs`."""
        return self._pipeline.probabilities(self._widened(logits), [state.logits_row(path) for state, path in rows])

    def _widened(self, logits: Tensor) -> Tensor:
        """Widen [R, draft vocabulary] to [R, V], the target's tokens: -inf where the model has none."""
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    def _named(self, columns: Tensor) -> Tensor:
        """Return the target's tokens of columns of the logits, before these are widened."""
        return columns

    @property
    def _num_columns(self) -> int:
        """Return how many columns of the logits, from the first, can be drafted from."""
        return min(self.model.vocab_size, self._vocab_size)

    def _names(self, columns: list[int]) -> list[int]:
        """Return the target's tokens of columns, as a list."""
        return columns

    def _within_vocabulary(self, token_ids: list[int]) -> list[int]:
        """Return the tokens as the draft model can read them: ids that only the target's padding has become token 0."""
        size = self.model.vocab_size
        return token_ids if size >= self._vocab_size else [t if t < size else 0 for t in token_ids]
