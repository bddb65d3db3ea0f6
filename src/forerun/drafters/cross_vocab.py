"""A draft with another tokenizer (Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies", 2502.05202).

The inner drafter lives in a shadow of every sequence: the same text in the draft's tokens. Two ways lead back:

- *tokens* (token-level intersection): the draft's distribution is restricted to the tokens that both vocabularies have
  before anything is drawn, so that drafts and distributions are translated one to one, and drawn drafts stay drawn.
- *text* (string-level match): the drafted text is tokenised again by the target's tokenizer, and what comes out counts
  as chosen. Any text can be drafted, but no distribution comes along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from forerun.config import BUNDLED_OTHER_VOCAB, BUNDLED_TARGET, SamplingParams
from forerun.drafters.base import UNKNOWN_ACCEPTANCE, Binding, Drafter, NamedModel, Traits, recorded_acceptance
from forerun.drafters.models.base import MAX_LAG
from forerun.drafters.models.draft_model import check_draft_quantization
from forerun.drafters.registry import DRAFTERS
from forerun.drafters.validation import check_drafter, checked_drafts
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.models import Forward, LanguageModel, Rows, StandIn, inherited_dtype, load_draft_model, load_tokenizer
from forerun.sampling import filters_only
from forerun.types import Cache, Draft, Pool, Sequence, Step, Verdict
from forerun.utils.tree import Tree
from forerun.utils.vocabulary import encode_text, shared_tokens, token_bytes


class RestrictedModel(StandIn):
    """A model that restricts some of its sequences to a set of tokens; otherwise the model itself.

    Attributes:
        restrict: whether the caches made from now on belong to such sequences.
    """

    def __init__(self, model: LanguageModel, allowed: Seq[int]) -> None:
        super().__init__(model)
        self._hidden = torch.ones(model.vocab_size, dtype=torch.bool, device=model.device)
        self._hidden[list(allowed)] = False
        self._restricted: WeakSet[Cache] = WeakSet()
        self.restrict = False

    def new_cache(self) -> Cache:
        cache = super().new_cache()
        if self.restrict:
            self._restricted.add(cache)
        return cache

    @torch.inference_mode()
    def forward(self, batch: Seq[Rows], layers: Seq[int] = ()) -> Forward:
        result = self.model.forward(batch, layers)
        at = 0
        for rows in batch:
            if rows.num_wanted and rows.cache in self._restricted:
                part = result.logits[at : at + rows.num_wanted]
                part.masked_fill_(self._hidden[: part.shape[1]], -torch.inf)
            at += rows.num_wanted
        return result


_LOOK_BEHIND = 32
"""Tokens at the end of a text that are encoded anew when it grows in another vocabulary."""


class Retokeniser:
    """Encodes text with one tokenizer, by the bytes that each of its tokens stands for.

    Args:
        tokenizer: a Transformers tokenizer.
        table: id -> bytes (`vocabulary.token_bytes`); ids without an entry stand for none.
    """

    def __init__(self, tokenizer: Any, table: Mapping[int, bytes]) -> None:
        self._tokenizer = tokenizer
        self._table = table

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return token ids. special: with whatever the tokenizer puts before a text."""
        return encode_text(self._tokenizer, text, special=special)

    def bytes_of(self, token_ids: Seq[int]) -> bytes:
        """Return the text that the tokens stand for."""
        return b"".join(self._table.get(token_id, b"") for token_id in token_ids)

    def extend(self, token_ids: Seq[int], added: str) -> list[int]:
        """Return the tokens of a text and of what is added to it.

        The last tokens (_LOOK_BEHIND) are encoded anew, together with the addition. Encoded from the middle
        of a text, the first tokens may be others than before; so the two are spliced at the first border, from the
        middle of the part that both hold, at which both have one.
        """
        behind, old, new_ids, new_borders = self._reencoded(token_ids, added)
        old_borders = self._borders(behind, 0)
        for border in sorted(old_borders.keys() & new_borders.keys()) if old else ():
            if border >= len(old) // 2:
                kept = len(token_ids) - len(behind) + old_borders[border]
                return [*token_ids[:kept], *new_ids[new_borders[border] :]]
        return [*token_ids, *self.encode(added)]

    def continuation(self, token_ids: Seq[int], added: str) -> list[int]:
        """Return the tokens of `added` alone, as they would follow tokens that must stay as they are."""
        _, old, new_ids, new_borders = self._reencoded(token_ids, added)
        start = new_borders.get(len(old)) if old else None
        return self.encode(added) if start is None else new_ids[start:]

    def _reencoded(self, token_ids: Seq[int], added: str) -> tuple[list[int], bytes, list[int], dict[int, int]]:
        """Encode the end of a text anew, together with what is added to it.

        Returns:
            The last tokens, from a character's beginning, and their text; the tokens of that text and the addition,
            and their borders, both empty where the last tokens stand for no text.
        """
        behind = list(token_ids[-_LOOK_BEHIND:])
        while behind and not _is_text(self.bytes_of(behind)):
            behind = behind[1:]  # begins inside a character
        old = self.bytes_of(behind)
        new_ids = self.encode(old.decode("utf-8") + added) if old else []
        shift = len(self.bytes_of(new_ids)) - len(old) - len(added.encode("utf-8"))
        return behind, old, new_ids, self._borders(new_ids, -shift)  # some tokenizers put a space before a text

    def _borders(self, token_ids: Seq[int], start: int) -> dict[int, int]:
        """Map the number of bytes before a border to the number of tokens before it."""
        borders = {start: 0}
        for count, token_id in enumerate(token_ids, 1):
            start += len(self._table.get(token_id, b""))
            borders[start] = count
        return borders


def whole_characters(data: bytes) -> bytes:
    """Return the bytes without the incomplete character at the end, if there is one."""
    for cut in range(min(3, len(data)) + 1):
        part = data[: len(data) - cut]
        if _is_text(part):
            return part
    return data


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


MODES = ("auto", "tokens", "text")


@dataclass(slots=True, eq=False)
class _Shadow:
    """A sequence in the draft's tokens.

    Attributes:
        sequence: that the inner drafter sees; holds the text as far as its characters are complete.
        incomplete: bytes of an incomplete character after it.
        seen: committed target tokens that it holds.
        by_tokens: how its drafts are translated.
        drafted: the inner draft that the last draft was made from.
    """

    sequence: Sequence
    incomplete: bytes
    seen: int
    by_tokens: bool
    drafted: Draft = field(default_factory=Draft.empty)


class CrossVocab(Drafter):
    """Wraps a drafter whose vocabulary is another than the target's.

    That drafter is a model and a growth, both in the draft's tokens: noise, draws and options are of these. What is
    translated is the sequence, before, and the draft, after it has grown.

    Args:
        model: folder, hub id or loaded draft model with a tokenizer of its own; None means the bundled one, which
            belongs to the bundled target.
        drafter: the inner one: a name of the table, of a drafter that runs a model, or what makes it from the draft
            model.
        mode: "tokens" or "text" for all requests, or "auto": tokens for drawn drafts, text for the others.
        tokenizer: of the draft model; None takes the one beside it.
        quantize: "int8" or "int4", what the draft model's weights are kept in; None: as its files are.

    Raises:
        ConfigError: there is no such mode or quantization, or a loaded model is to be quantized.
        DrafterError: the inner drafter's name is not that of a drafter that runs a model.
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | None = None,
        drafter: str | Callable[[LanguageModel], Drafter] = "draft-model",
        mode: str = "auto",
        *,
        tokenizer: Any = None,
        quantize: str | None = None,
    ) -> None:
        check_draft_quantization(quantize, model)
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}, but must be one of {', '.join(MODES)}.")
        self._source = model
        self._make = _maker(drafter) if isinstance(drafter, str) else drafter
        self._mode = mode
        self._tokenizer = tokenizer
        self._quantize = quantize
        self._shadows: dict[Sequence, _Shadow] = {}
        self._inner: Drafter | None = None
        self._acceptance = UNKNOWN_ACCEPTANCE

    @property
    def traits(self) -> Traits:
        inner = Traits() if self._inner is None else self._inner.traits
        return Traits(
            ("CrossVocab", self._mode, *inner.cost_key),
            inner.fixed_length_draft,
            acceptance=self._acceptance,
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes that the inner drafter holds."""
        return 0 if self._inner is None else self._inner.nbytes

    @property
    def pools(self) -> tuple[Pool, ...]:
        return () if self._inner is None else self._inner.pools

    @property
    def inner(self) -> Drafter:
        """Return the drafter in the draft's vocabulary. Raises DrafterError before `bind`."""
        if self._inner is None:
            raise DrafterError("This CrossVocab is not bound to a target yet. Give it to LLM(drafter=...).")
        return self._inner

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        source = BUNDLED_OTHER_VOCAB if self._source is None else self._source
        return (NamedModel(source, None, self._quantize),) if isinstance(source, (str, Path)) else ()

    def bind(self, binding: Binding) -> None:
        """Load the draft model and compare the vocabularies.

        Raises:
            DrafterError: no draft model was named, or one side has no tokenizer.
            IncompatibleDrafterError: the vocabularies share nothing.
            ModelLoadError: the draft model cannot be read.
        """
        target = binding.target
        if self._source is None:
            if target.name != BUNDLED_TARGET:
                raise DrafterError(
                    "'cross-vocab' without a model means the bundled draft of another vocabulary, which belongs to the "
                    f"bundled target, not to {target.name}. Say which: drafter='cross-vocab:model=path/to/draft'."
                )
            self._source = BUNDLED_OTHER_VOCAB
        if binding.tokenizer is None:
            raise DrafterError(
                f"{target.name} has no tokenizer, and without text there is no way into another vocabulary. "
                "Put its tokenizer beside its weights."
            )
        model = self._source
        if isinstance(model, (str, Path)):
            dtype = inherited_dtype(model, target.dtype, self._quantize)
            self._acceptance = recorded_acceptance(model)
            model = load_draft_model(model, dtype, device=target.device, quantize=self._quantize)
        if self._tokenizer is None:
            if not isinstance(self._source, (str, Path)):
                raise DrafterError(f"{model.name} was given as a loaded model: give its tokenizer as well.")
            self._tokenizer = load_tokenizer(self._source)
        self._bind_vocabularies(binding, model)
        self._model = RestrictedModel(model, list(self._to_target))
        self._inner = self._make(self._model)
        check_drafter(self._inner)
        self._inner.bind(Binding(self._model, self._tokenizer, binding.seed, binding.prefix_reuse))

    def _bind_vocabularies(self, binding: Binding, model: LanguageModel) -> None:
        self._target_bytes = token_bytes(binding.tokenizer)
        draft_bytes = {i: data for i, data in token_bytes(self._tokenizer).items() if i < model.vocab_size}
        self._vocab_size = binding.target.vocab_size
        target_bytes = {i: data for i, data in self._target_bytes.items() if i < self._vocab_size}
        self._to_target = shared_tokens(target_bytes, draft_bytes)
        if not self._to_target:
            raise IncompatibleDrafterError(
                f"{model.name} and {binding.target.name} have no token in common. Choose a draft model for text of the "
                "same kind."
            )
        # one to one here too, or the probability of a token would be lost: each end of text has a partner of its own
        self._target_ends = binding.target.eos_token_ids
        free = sorted(self._target_ends - set(self._to_target.values()))
        self._to_target |= dict(zip(sorted(model.eos_token_ids - set(self._to_target)), free, strict=False))
        self._ends = model.eos_token_ids
        self._draft_text = Retokeniser(self._tokenizer, draft_bytes)
        self._target_text = Retokeniser(binding.tokenizer, self._target_bytes)
        self._draft_ids = torch.tensor(list(self._to_target))
        self._target_ids = torch.tensor(list(self._to_target.values()))

    def start(self, sequence: Sequence) -> None:
        params = sequence.params
        drawn = not params.greedy and params.seed is None
        by_tokens = self._mode == "tokens" or (self._mode == "auto" and drawn)
        data = self._target_text.bytes_of(sequence.token_ids)
        text = whole_characters(data)
        ids = self._draft_text.encode(text.decode("utf-8", errors="replace"), special=True)
        if not ids:  # a model cannot draft from nothing
            ids = sorted(self._ends)[:1] or [0]
        shadow = Sequence(sequence.id, ids, len(ids), _shadow_params(params, by_tokens and drawn), sequence.choice)
        self._shadows[sequence] = _Shadow(shadow, data[len(text) :], len(sequence.token_ids), by_tokens)
        self._model.restrict = by_tokens
        self.inner.start(shadow)

    def stop(self, sequence: Sequence) -> None:
        shadow = self._shadows.get(sequence)
        if shadow is not None:
            self.inner.stop(shadow.sequence)
            self._shadows.pop(sequence, None)

    def reset(self) -> None:
        self.inner.reset()

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        shadows = [self._shadows[sequence] for sequence in sequences]
        inner_max_nodes = []
        for sequence, shadow, max_nodes in zip(sequences, shadows, num_draft_tokens, strict=True):
            self._follow(sequence, shadow)
            shadow.sequence.max_length = len(shadow.sequence.token_ids) + max(sequence.room, 0) + 1
            inner_max_nodes.append(0 if shadow.incomplete else max(0, min(max_nodes, sequence.room)))
        drafts = checked_drafts(
            self.inner,
            [shadow.sequence for shadow in shadows],
            inner_max_nodes,
            min_acceptance_prob,
            self._model.vocab_size,
        )
        translated = []
        for sequence, shadow, draft, max_nodes in zip(sequences, shadows, drafts, inner_max_nodes, strict=True):
            shadow.drafted = draft
            translate = self._by_tokens if shadow.by_tokens else self._by_text
            translated.append(translate(sequence, draft, max_nodes) if len(draft) else Draft.empty())
        return translated

    def commit(self, steps: Seq[Step]) -> None:
        inner = []
        for step in steps:
            shadow = self._shadows[step.sequence]
            if step.draft is None:  # as much of the shadow's prompt as of the sequence's
                share = step.num_computed / max(1, step.sequence.num_prompt)
                done = min(len(shadow.sequence.token_ids) - 1, int(share * len(shadow.sequence.token_ids)))
                inner.append(Step(shadow.sequence, None, None, done))
                continue
            if not len(shadow.drafted) and len(step.sequence.token_ids) - shadow.seen < MAX_LAG:
                continue  # no draft was requested: the text is translated with the next draft, or after MAX_LAG tokens
            shadow.drafted = Draft.empty()
            self._follow(step.sequence, shadow)
            followed = shadow.sequence
            verdict = Verdict([], followed.token_ids[-1])
            inner.append(Step(followed, Draft.empty(), verdict, len(followed.token_ids) - 1))
        if inner:
            self.inner.commit(inner)

    def _follow(self, sequence: Sequence, shadow: _Shadow) -> None:
        """Bring the shadow to the text of the committed tokens."""
        if shadow.seen == len(sequence.token_ids):
            return
        data = shadow.incomplete + self._target_text.bytes_of(sequence.token_ids[shadow.seen :])
        text = whole_characters(data)
        shadow.incomplete = data[len(text) :]
        shadow.seen = len(sequence.token_ids)
        old = shadow.sequence.token_ids
        new = self._draft_text.extend(old, text.decode("utf-8", errors="replace"))
        kept = _common_length(old, new)
        shadow.sequence.token_ids = new
        if kept < len(old):
            self.inner.rewind(shadow.sequence, kept)

    def _by_tokens(self, sequence: Sequence, draft: Draft, max_nodes: int) -> Draft:
        """Translate the tree token by token, with every distribution, into the target's vocabulary."""
        tokens = [self._to_target[token_id] for token_id in draft.ids]
        probs = None
        if draft.probs is not None:
            probs = draft.probs.new_zeros(len(draft.probs), self._vocab_size)
            probs[:, self._target_ids] = draft.probs[:, self._draft_ids]
        return Draft(tokens, draft.parents, probs, draft.replacement, draft.num_candidates)

    def _by_text(self, sequence: Sequence, draft: Draft, max_nodes: int) -> Draft:
        """Retokenise the texts of the draft's paths with the target's tokenizer, and merge them into one tree."""
        drafted = draft.ids
        tree = Tree()
        for leaf in sorted(set(range(len(draft))) - set(draft.parents)):
            path = [drafted[node] for node in draft.path_to(leaf)]
            tree.graft(self._retokenised(sequence, path)[: max(sequence.room, 0)], max_nodes)
        return Draft(tree.ids, tree.parents)

    def _retokenised(self, sequence: Sequence, path: list[int]) -> list[int]:
        ended = next((i for i, token_id in enumerate(path) if token_id in self._ends), None)
        text = whole_characters(self._draft_text.bytes_of(path if ended is None else path[:ended])).decode(
            "utf-8", "replace"
        )
        ids = self._target_text.continuation(sequence.token_ids, text) if text else []
        if ended is not None and self._target_ends:
            ids = [*ids, self._to_target.get(path[ended], min(self._target_ends))]
        return [token_id for token_id in ids if token_id < self._vocab_size]


def _maker(name: str) -> Callable[[LanguageModel], Drafter]:
    rows = {name: row for name, row in DRAFTERS.items() if row.kind == "model" and name != "cross-vocab"}
    names = [name for name, row in rows.items() if row.needed_option == "model"]
    if name not in names:
        raise DrafterError(f"'cross-vocab' wraps a drafter that runs a model ({', '.join(names)}), not {name!r}.")
    return DRAFTERS[name].make


def _shadow_params(params: SamplingParams, drawn: bool) -> SamplingParams:
    """Return options that mean the same in any vocabulary; chosen drafts take the most probable token."""
    return replace(filters_only(params) if drawn else SamplingParams(temperature=0), tenant=params.tenant)


def _common_length(old: list[int], new: list[int]) -> int:
    """Return the length of the common prefix; most often all of the old list."""
    length = min(len(old), len(new))
    if old[:length] == new[:length]:
        return length
    return next(i for i in range(length) if old[i] != new[i])
