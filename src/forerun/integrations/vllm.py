"""Drafters without a model inside vLLM's worker, by its method `custom_class`.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "forerun.integrations.vllm.Proposer",
    "num_speculative_tokens": 8}' --additional-config '{"forerun": {"drafter": "suffix"}}'

vLLM 0.32 calls `propose` after each step, with rows of tokens and no request ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forerun.config import DEFAULT_DRAFTER, HYBRID_SOURCES, MAX_NUM_DRAFT_TOKENS, SamplingParams
from forerun.drafters import DRAFTERS, Binding, Drafter, build_drafter
from forerun.drafters.parse_text import K_OPTION, source_texts, split_spec
from forerun.drafters.validation import checked_drafts
from forerun.errors import ConfigError, DrafterError, ForerunError
from forerun.integrations.versions import untried
from forerun.models import Exactness, Forward, LanguageModel, Rows, find_tokenizer
from forerun.types import Cache, Draft, Needs, Sequence, Step, TokenIds, Verdict
from forerun.utils.fields import check_options, described, documented, option


@documented
@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of drafting inside a program that verifies chains.

    None stands for the default of every field.
    """

    drafter: str = option(
        DEFAULT_DRAFTER, "A drafter that only reads tokens: prompt-lookup, suffix, rest, or a hybrid of them."
    )
    min_acceptance_prob: float = option(
        0.0,
        "A token is drafted while the probability that it and all before it are accepted is above this; 0 drafts up to "
        "K tokens.",
        low=0,
        high=1,
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> VllmOptions:
        """Make options from names and values. Raises ConfigError for an unknown name or a value out of range."""
        names = described(VllmOptions)
        for name in given:
            if name not in names:
                raise ConfigError(f"forerun has no option {name!r} here, but: {', '.join(names)}.")
        return cls(**given)


class UnseenTarget(LanguageModel):
    """A target that another program computes: name and sizes, without a forward.

    Args:
        vocab_size: width of its logits. context_length: maximum number of positions.
    """

    def __init__(self, name: str, vocab_size: int, context_length: int) -> None:
        super().__init__(
            name=name,
            vocab_size=vocab_size,
            context_length=context_length,
            eos_token_ids=frozenset(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            num_parameters=0,
            exactness=Exactness(False, "another program computes it"),
        )

    def new_cache(self) -> Cache:
        """Raise DrafterError."""
        raise self._unavailable

    def forward(self, batch: Seq[Rows], layers: Seq[int] = ()) -> Forward:
        """Raise DrafterError."""
        raise self._unavailable

    @property
    def _unavailable(self) -> DrafterError:
        return DrafterError(f"{self.name} is computed by another program, and no drafter can compute with it.")


def lookup_drafter(text: str, target: LanguageModel, tokenizer: Any = None) -> Drafter:
    """Build a drafter from its text and bind it to a target of another program.

    Args:
        tokenizer: the target's, to check an index against; None if there is none.

    Raises:
        DrafterError, ConfigError: as `build_drafter`; it runs a model, or needs more than tokens.
        IncompatibleDrafterError: its corpus holds tokens of another tokenizer.
    """
    for name in _names(text):
        if name in DRAFTERS and DRAFTERS[name].kind != "lookup":
            raise _refusal(text, f"is a {DRAFTERS[name].kind} drafter ({name})")
    drafter, k = build_drafter(text)
    if k is not None:
        raise ConfigError(
            f"drafter is {text!r}, but here the program that verifies sets the number of draft tokens. Leave out "
            f"{K_OPTION}."
        )
    traits = drafter.traits
    reasons = {
        "loads a model": bool(drafter.models_to_load(target.name)),
        "reads hidden states of the target": drafter.needs != Needs(),
        "computes in the target's cache": traits.writes_cache,
        "reads a prediction, which these requests do not have": traits.reads_prediction,
    }
    for what, applies in reasons.items():
        if applies:
            raise _refusal(text, what)
    drafter.bind(Binding(target, tokenizer))
    return drafter


def _names(text: str) -> list[str]:
    """Return the name of the drafter, or the names of the sources of a hybrid."""
    name = text.partition(":")[0]
    if name != "hybrid":
        return [name]
    sources = split_spec(text)[1].get("sources", HYBRID_SOURCES)
    return source_texts(sources)


def _refusal(text: str, what: str) -> DrafterError:
    return DrafterError(
        f"drafter is {text!r}, which {what}, but here drafts are made of the tokens alone. Take suffix, prompt-lookup, "
        "rest, or a hybrid of them; models and heads are exported: forerun export vllm."
    )


_TAIL = 8
"""Number of last tokens by which the sequence of a row is looked up, before all tokens are compared."""
Tokens = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Tracked:
    """A sequence with the tokens of its row at the last step.

    Attributes:
        sequence: its tokens are the part of the row that the drafter has processed.
        row: at least [length], the tokens of the row.
        length: of the row.
        draft: the last draft for it; None without one.
        path: nodes of the draft that were proposed.
    """

    sequence: Sequence
    row: Tokens
    length: int
    draft: Draft | None = None
    path: list[int] = field(default_factory=list)

    @property
    def num_unread(self) -> int:
        """Return the number of tokens of the row that the drafter has not processed."""
        return self.length - len(self.sequence.token_ids)

    @property
    def is_read(self) -> bool:
        """Return whether the drafter has processed the whole row."""
        return self.num_unread == 0

    @property
    def proposed(self) -> list[int]:
        """Return the tokens that were proposed."""
        return [] if self.draft is None else [self.draft.ids[node] for node in self.path]

    def extend(self, row: Tokens, length: int) -> None:
        """Extend the row to a new length."""
        if length > len(self.row):
            self.row = np.concatenate([self.row[: self.length], np.zeros(length, np.int32)])
        self.row[self.length : length] = row[self.length : length]
        self.length = length

    def read(self, count: int) -> Step:
        """Append the next tokens of the row to the sequence, like prompt tokens."""
        self._grow(count)
        return Step(self.sequence, None, None, len(self.sequence.token_ids))

    def verified(self, num_new: int) -> Step | None:
        """Return the verified draft as a step; None without a draft, or if the row was not extended by it.

        Args:
            num_new: tokens that the step has added: a part of the proposed path, and one more.
        """
        if self.draft is None or num_new != self.num_unread or not 0 < num_new <= len(self.path) + 1:
            return None
        new = self._unread(num_new)
        if new[:-1] != self.proposed[: num_new - 1]:
            return None
        self._grow(num_new)
        return Step(self.sequence, self.draft, Verdict(self.path[: num_new - 1], new[-1]), self.length - 1)

    def _unread(self, count: int) -> list[int]:
        start = len(self.sequence.token_ids)
        tokens: list[int] = self.row[start : start + count].tolist()
        return tokens

    def _grow(self, count: int) -> None:
        token_ids = self.sequence.token_ids
        assert isinstance(token_ids, TokenIds)
        list.extend(token_ids, self._unread(count))

    def begins(self, row: Tokens, length: int) -> bool:
        """Return whether this row is a prefix of another one."""
        count = self.length
        return count <= length and bool((self.row[:count] == row[:count]).all())


class Tracker:
    """Finds sequences by their tokens: rows move when requests end, and have no ids.

    Two rows with the same tokens have a sequence each, in either order.

    Args:
        max_sequences: maximum number of sequences; the least recently used are dropped.
        max_length: maximum tokens of a row.
    """

    def __init__(self, max_sequences: int, max_length: int) -> None:
        self._max_sequences = max_sequences
        self._max_length = max_length
        self._kept: dict[Tracked, None] = {}
        """The most recently used is the last."""
        self._by_tail: dict[tuple[int, bytes], list[Tracked]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, row: Tokens, length: int, num_new: int) -> Tracked | None:
        """Remove and return the sequence of a row; None if there is none.

        Args:
            row: at least [length].
            num_new: tokens of the row that the last step has added.
        """
        before = length - num_new
        for tracked in (
            *self._by_tail.get(_key(row, before), ()),
            *reversed(self._kept),
        ):  # steps that were not seen, or a request that continues another
            if tracked.begins(row, before):
                return self._drop(tracked)
        return None

    def new(self, row: Tokens, length: int) -> Tracked:
        """Make a sequence for a new row, of which no token is processed yet."""
        self._next_id += 1
        sequence = Sequence(self._next_id, TokenIds(), 0, SamplingParams(), max_length=self._max_length)
        return Tracked(sequence, row[:length].copy(), length)

    def keep(self, tracked: Tracked) -> list[Tracked]:
        """Keep a sequence; return those that are dropped for it."""
        self._kept[tracked] = None
        self._by_tail.setdefault(_key(tracked.row, tracked.length), []).append(tracked)
        return [self._drop(next(iter(self._kept))) for _ in range(len(self._kept) - self._max_sequences)]

    def clear(self) -> list[Tracked]:
        """Drop all sequences and return them."""
        return [self._drop(tracked) for tracked in list(self._kept)]

    def _drop(self, tracked: Tracked) -> Tracked:
        del self._kept[tracked]
        key = _key(tracked.row, tracked.length)
        self._by_tail[key].remove(tracked)
        if not self._by_tail[key]:
            del self._by_tail[key]
        return tracked


def _key(row: Tokens, length: int) -> tuple[int, bytes]:
    return length, row[max(0, length - _TAIL) : length].tobytes()


_log = logging.getLogger(__name__)
OPTIONS = "forerun"
"""Key of vLLM's additional configuration."""
PIECE = 128
"""Tokens of a long row that are processed in one step."""
STEP_TOKENS = 1024
"""Tokens of all long rows together that are processed in one step."""
NODES_PER_TOKEN = 4
"""Nodes of a tree drafter per token of the path that is proposed."""


class Proposer:
    """The proposer that vLLM makes for `"model": "forerun.integrations.vllm.Proposer"`.

    Args:
        vllm_config: vLLM's configuration. Its `additional_config` may hold an object "forerun" with the fields of
            `VllmOptions`.

    Raises:
        ConfigError: an option is wrong, or the configuration differs from that of tested versions of vLLM.
        DrafterError: the drafter needs more than tokens.
    """

    def __init__(self, vllm_config: Any) -> None:
        other_version = untried("vLLM")
        if other_version is not None:
            _log.warning("forerun: %s", other_version)
        try:
            model = vllm_config.model_config
            self._k = int(vllm_config.speculative_config.num_speculative_tokens)
            max_sequences = int(vllm_config.scheduler_config.max_num_seqs)
            context = int(model.max_model_len)
            name = str(model.model)
            tokenizer = str(model.tokenizer)
            vocab_size = int(model.get_vocab_size())
            given = vllm_config.additional_config
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"vLLM's configuration is not as expected: {error}. {other_version or ''}") from error
        options = given.get(OPTIONS, {}) if isinstance(given, Mapping) else {}
        if not isinstance(options, Mapping):
            raise ConfigError(f"{OPTIONS!r} in vLLM's configuration is {options!r:.60}, but must be an object.")
        self._options = VllmOptions.of(options)
        self._target = UnseenTarget(name, vocab_size, context)
        self._tokenizer = _tokenizer(tokenizer)
        self._tracker = Tracker(max_sequences, context)
        self._drafter: Drafter | None = self._make()
        self._draws_trees = self._has_failed = False

    def load_model(self, *_: object, **__: object) -> None:
        """Do nothing: vLLM calls this after loading its own model, and there is none here."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: Tokens,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return the drafts of one step.

        Args:
            sampled_token_ids: tokens that the step has added to each row; none while its prompt is computed.
            num_tokens_no_spec: at least [rows], number of tokens of each row, those included.
            token_ids_cpu: at least [rows, longest], the rows.
            slot_mappings: unused.

        Returns:
            A list per row, of at most K tokens and within the model's length; empty if nothing was sampled. Errors give
            empty lists: they cost speed, but no request fails.
        """
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception as error:
            self._drafter = None  # it may have processed a part of this step
            self._tracker.clear()
            if not self._has_failed:  # logged once: it may recur at every step
                self._has_failed = True
                reason = str(error) if isinstance(error, ForerunError) else type(error).__name__
                _log.warning(
                    "forerun could not draft in this step (%s); further errors are not logged.", reason, exc_info=True
                )
            return [[] for _ in sampled_token_ids]

    def _make(self) -> Drafter:
        return lookup_drafter(self._options.drafter, self._target, self._tokenizer)

    def _propose(self, sampled: list[list[int]], lengths: npt.NDArray[np.int32], rows: Tokens) -> list[list[int]]:
        drafter = self._drafter = self._drafter or self._make()
        tracked = [
            self._track(drafter, row, int(length), len(new))
            for new, row, length in zip(sampled, rows, lengths, strict=False)  # these arrays have more rows
        ]
        self._read(drafter, tracked, sampled)
        ready = [each for each, new in zip(tracked, sampled, strict=True) if new and each.is_read]
        nodes = min(self._k * NODES_PER_TOKEN, MAX_NUM_DRAFT_TOKENS) if self._draws_trees else self._k
        sequences = [each.sequence for each in ready]
        drafts = checked_drafts(
            drafter, sequences, [nodes] * len(ready), self._options.min_acceptance_prob, self._target.vocab_size
        )
        for each, draft in zip(ready, drafts, strict=True):
            self._draws_trees = self._draws_trees or not draft.is_chain
            each.draft = draft
            each.path = first_path(draft)[: self._k]
        for each in tracked:
            for left in self._tracker.keep(each):
                drafter.stop(left.sequence)
        return [each.proposed for each in tracked]

    def _track(self, drafter: Drafter, row: Tokens, length: int, num_new: int) -> Tracked:
        """Return the row's sequence; start a new one if it is unknown."""
        found = self._tracker.take(row, length, num_new)
        if found is None:
            found = self._tracker.new(row, length)
            drafter.start(found.sequence)
        found.extend(row, length)
        return found

    def _read(self, drafter: Drafter, tracked: list[Tracked], sampled: list[list[int]]) -> None:
        """Commit the new tokens of all rows to the drafter; of long rows a piece."""
        steps = list[Step]()
        left = STEP_TOKENS
        for each, new in zip(tracked, sampled, strict=True):
            step = each.verified(len(new))
            if step is None and not each.is_read:
                count = each.num_unread
                if count > PIECE:
                    count = min(PIECE, left)
                    left -= count
                step = each.read(count)
            each.draft = None
            each.path = []
            if step is not None:
                steps.append(step)
        drafter.commit(steps)


def first_path(draft: Draft) -> list[int]:
    """Return the nodes of the draft's first path: from the root on, the first of siblings, candidates only."""
    return [node for node in draft.first_path() if node < draft.num_candidates]


def _tokenizer(name: str) -> Any:
    """Load the target's tokenizer, which an index is checked against; None if it cannot be read."""
    try:
        return find_tokenizer(name)
    except ForerunError as error:
        _log.info("forerun: no tokenizer, so no index can be compared with it: %s", error)
        return None
