"""A small model of the same vocabulary drafts a chain (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

What it draws with its laws is judged by rejection; what it picks greedily, or with the noise that a seeded
request shares with the target (Daliri et al., 2408.07978), counts as chosen.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.cache import SequenceCache
from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET, PREFILL_CHUNK
from forerun.drafters.binding import Binding
from forerun.drafters.compatible import check_compatible
from forerun.errors import DrafterError, ModelLoadError
from forerun.models import Model, Rows, load_model, load_tokenizer
from forerun.sampling import LogitsPipeline, LogitsRow, NoiseKey, draw_tokens, keyed_gumbel, row_argmax
from forerun.types import Draft, Sequence, Step

_MAX_LAG = 32
"""Committed tokens the draft model may be behind before it catches up without being asked to draft."""


@dataclass(slots=True, eq=False)
class _Own:
    """The draft model's state for one sequence.

    Attributes:
        cache: of the draft model.
        guessed: tokens fed beyond the committed ones: the cache's last positions.
    """

    cache: SequenceCache
    guessed: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Chain:
    """One chain while it grows."""

    sequence: Sequence
    own: _Own
    budget: int
    token_ids: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)


class DraftModel:
    """Drafts with a causal language model that shares the target's vocabulary.

    Args:
        model: "bundled-draft", a folder, a hub id, or a loaded Model; None means the bundled draft, which belongs to
            the bundled target.
        num_draft_tokens: K; None takes the engine's.
        dtype: of its weights; None takes the target's.

    The model is loaded when an LLM takes the drafter (`bind`).
    """

    def __init__(
        self, model: str | Path | Model | None = None, num_draft_tokens: int | None = None, *, dtype: str | None = None
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._source = model
        self._dtype = dtype
        self._model: Model | None = None
        self._owned: dict[Sequence, _Own] = {}

    @property
    def model(self) -> Model:
        """The draft model. Raises DrafterError before `bind`."""
        if self._model is None:
            raise DrafterError("This DraftModel is not bound to a target yet. Give it to LLM(..., drafter=...).")
        return self._model

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
            model = self._model or load_model(self._source, dtype)
            try:
                tokenizer = load_tokenizer(self._source)
            except ModelLoadError:
                tokenizer = None  # check_compatible decides what that means
        else:
            model, tokenizer = self._source, binding.tokenizer
        check_compatible(target, binding.tokenizer, model, tokenizer)
        self._model = model
        self._vocab_size = target.vocab_size
        self._pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
        self._generator = torch.Generator()
        if binding.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(binding.seed)

    def start(self, sequence: Sequence) -> None:
        self._owned[sequence] = _Own(self.model.new_cache())
        self._pipeline.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        self._pipeline.stop(sequence)
        own = self._owned.pop(sequence, None)
        if own is not None:
            own.cache.free()

    def draft(self, sequences: Seq[Sequence], budgets: Seq[int], price: float = 0.0) -> list[Draft]:
        chains = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            # the deepest token that is fed stands at len + budget - 2
            room = min(self.model.context_length - len(sequence.token_ids) + 1, sequence.room)
            chains.append(_Chain(sequence, self._owned[sequence], max(0, min(budget, room))))
        growing = [chain for chain in chains if chain.budget > 0]
        self._catch_up([chain.sequence for chain in growing], PREFILL_CHUNK)
        fed = [self._owed(chain.sequence, chain.own) for chain in growing]
        simple = all(self._pipeline.is_identity(chain.sequence.params) for chain in growing)
        while growing:
            logits = self.model.forward(
                [Rows(chain.own.cache, ids, None, 1) for chain, ids in zip(growing, fed, strict=True)]
            )
            for chain, ids in zip(growing, fed, strict=True):
                chain.own.cache.commit(range(len(ids)))
                if chain.token_ids:
                    chain.own.guessed.append(chain.token_ids[-1])
            self._extend(growing, logits, simple)
            growing = [chain for chain in growing if len(chain.token_ids) < chain.budget]
            fed = [self._known(chain.token_ids[-1:]) for chain in growing]
        return [self._finish(chain) for chain in chains]

    def commit(self, steps: Seq[Step]) -> None:
        # most often nobody is late, and then nothing is computed here at all
        late = [step for step in steps if step.num_computed - self._owned[step.sequence].cache.length >= _MAX_LAG]
        if late:
            self._catch_up([step.sequence for step in late], _MAX_LAG, [step.num_computed for step in late])

    def _owed(self, sequence: Sequence, own: _Own) -> list[int]:
        """Committed tokens the draft model has not been fed, the last of them included.

        Guesses that were not committed are dropped from the cache; after full acceptance two tokens are owed.
        """
        tokens, cache = sequence.token_ids, own.cache
        if own.guessed:
            first = cache.length - len(own.guessed)
            known = first
            for guess in own.guessed:
                if known + 1 >= len(tokens) or tokens[known] != guess:
                    break
                known += 1
            cache.truncate(known)
            own.guessed = []
        if cache.length >= len(tokens):
            cache.truncate(len(tokens) - 1)
        return self._known(tokens[cache.length :])

    def _catch_up(self, sequences: Seq[Sequence], max_lag: int, num_computed: Seq[int] | None = None) -> None:
        """Feed what is owed to those who owe more than max_lag, but for the last token, in chunks."""
        while True:
            rows = []
            for i, sequence in enumerate(sequences):
                own = self._owned[sequence]
                end = len(sequence.token_ids) - 1 if num_computed is None else num_computed[i]
                if end >= self.model.context_length or end - own.cache.length < max_lag:
                    continue
                owed = self._owed(sequence, own)[: min(PREFILL_CHUNK, end - own.cache.length)]
                if len(owed) >= max_lag:
                    rows.append(Rows(own.cache, owed, None, 0))
            if not rows:
                return
            self.model.forward(rows)
            for row in rows:
                row.cache.commit(range(len(row.token_ids)))

    def _extend(self, chains: list[_Chain], logits: Tensor, simple: bool) -> None:
        """Choose or draw the next token of each chain.

        logits: [len(chains), draft vocabulary]. simple: all take the argmax of the raw logits.
        """
        width = min(logits.shape[1], self._vocab_size)
        if simple:
            for chain, token_id in zip(chains, row_argmax(logits[:, :width]).tolist(), strict=True):
                chain.token_ids.append(token_id)
            return
        if width < self._vocab_size:
            logits = functional.pad(logits, (0, self._vocab_size - width), value=-torch.inf)
        rows = [LogitsRow(chain.sequence, chain.token_ids) for chain in chains]
        self._choose(chains, self._pipeline.process(logits[:, : self._vocab_size], rows))

    def _choose(self, chains: list[_Chain], logprobs: Tensor) -> None:
        """Greedy chains take the argmax, seeded ones with the target's own noise added; the others draw."""
        groups: dict[str, list[int]] = {}
        for row, chain in enumerate(chains):
            params = chain.sequence.params
            way = "greedy" if params.greedy else "drawn" if params.seed is None else "seeded"
            groups.setdefault(way, []).append(row)
        for way, rows in groups.items():
            own = logprobs if len(groups) == 1 else logprobs[rows]
            members = [chains[row] for row in rows]
            if way == "drawn":
                laws = own.exp()
                uniforms = torch.rand(len(rows), dtype=torch.float64, generator=self._generator)
                picked = draw_tokens(laws, uniforms)
                for chain, law in zip(members, laws, strict=True):
                    chain.laws.append(law)
            elif way == "seeded":
                noise = keyed_gumbel([_noise_key(chain) for chain in members], self._vocab_size)
                picked = row_argmax(noise.add_(own))
            else:
                picked = row_argmax(own)
            for chain, token_id in zip(members, picked.tolist(), strict=True):
                chain.token_ids.append(token_id)

    def _finish(self, chain: _Chain) -> Draft:
        if not chain.token_ids:
            return Draft.empty()
        if not chain.laws:
            return Draft.chain(chain.token_ids)
        unread = torch.zeros_like(chain.laws[0])  # the row after the last node, whose children nobody drew
        return Draft.chain(chain.token_ids, torch.stack([*chain.laws, unread]))

    def _known(self, token_ids: list[int]) -> list[int]:
        """Tokens as the draft model may be fed: one that only the target's padding has becomes token 0."""
        size = self.model.vocab_size
        return token_ids if size >= self._vocab_size else [t if t < size else 0 for t in token_ids]


def _noise_key(chain: _Chain) -> NoiseKey:
    sequence = chain.sequence
    assert sequence.params.seed is not None
    return NoiseKey(sequence.params.seed, sequence.choice, len(sequence.token_ids) + len(chain.token_ids))
