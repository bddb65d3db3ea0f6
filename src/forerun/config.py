"""The one home of every default, and the options a user may set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forerun.errors import ConfigError, SamplingError

ASSETS = Path(__file__).parent / "assets"
BUNDLED_TARGET = "bundled"
"""Name under which the bundled target model is loaded."""
BUNDLED_DRAFT = "bundled-draft"
"""Name under which the bundled draft model is loaded."""
BUNDLED_OTHER_VOCAB = "bundled-other-vocab"
"""Name under which the bundled draft model with another tokenizer is loaded."""
BUNDLED_MODELS: Mapping[str, Path] = {
    BUNDLED_TARGET: ASSETS / "target",
    BUNDLED_DRAFT: ASSETS / "draft",
    BUNDLED_OTHER_VOCAB: ASSETS / "draft-other-vocab",
}

DTYPES = ("float32", "bfloat16", "float64")
DEFAULT_DTYPE = "bfloat16"

AUTO: Literal["auto"] = "auto"
"""num_draft_tokens: chosen step by step, for every sequence."""
NumDraftTokens = int | Literal["auto"]
DEFAULT_NUM_DRAFT_TOKENS: NumDraftTokens = AUTO
MAX_NUM_DRAFT_TOKENS = 128
"""Upper bound of K, the nodes of a draft: no chain pays beyond a few of them, but trees and probes need more."""

RATE_DECAY = 0.98
"""Weight that an older trial keeps when a newer one of its kind is seen: about the last fifty count."""
RATE_PRIOR_WEIGHT = 2.0
"""Trials that a guess made beforehand is worth."""

CONFIDENCE_BINS = 12
"""Bins of a draft model's probabilities; they are equally wide in the probability's square root."""
CONFIDENCE_RANKS = 3
"""A token's rank among its siblings is told apart up to this many."""
CONFIDENCE_DECAY = 0.995

STAGED_INNER_DRAFTER = "prompt-lookup"

DRAFT_TREE_WIDTH = 8
"""Nodes expanded at one depth of a growing tree, and children looked at below each."""
DRAFT_TREE_MIN_GAIN = 0.1
"""Accepted tokens that one more forward of the draft model must promise before a tree grows deeper."""
DRAFT_TREE_DEPTHS = 8
"""Depths whose acceptance is measured apart; deeper ones count as the last."""
DRAFT_TREE_RATES = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.015, 0.01)
"""Chance beforehand that a child is accepted, by its rank among its siblings."""
DRAFT_TREE_REFRESH = 16
"""Drafts after which the best shape is found again from what was measured since."""

ACCEPTANCE_FIRST = 0.6
"""Guess of how often the first node of a draft is accepted, before any was seen."""
ACCEPTANCE_NEXT = 0.8
"""The same of a later node after the one before it was."""
ACCEPTANCE_DECAY = 0.98
ACCEPTANCE_SHARED_DECAY = 0.995
"""Weight that a trial keeps when the next one of its place is seen: in its sequence, and among all together."""
ACCEPTANCE_WEIGHT = 4.0
"""Trials that the guess for a place is worth, which the places before it made."""
ACCEPTANCE_STATE_WEIGHT = 8.0
"""Trials that the belief is worth that it does not matter what became of the last draft."""
ACCEPTANCE_OWN_WEIGHT = 8.0
"""Accepted and refused nodes that the belief is worth that a sequence is like the others."""
ACCEPTANCE_REFRESH = 16
"""Drafts after which what all of them say is worked out anew."""
LENGTH_WEIGHT = 2.0

COST_CACHE_VARIABLE = "FORERUN_COST_CACHE"
"""Environment variable; 0 keeps measured costs out of the user's cache folder."""
COST_CACHE_ENTRIES = 64
COST_SAVE_STEPS = 32
"""Steps after which costs are first saved; then whenever that many have doubled."""
COST_SIZE = 1025
"""Rows of a forward, up to which their number makes a difference to its estimated cost."""
COST_MEMORY = 32.0
"""Observations of a cost that count; each new one moves the mean by one part in so many at least."""
COST_CLIP = 3.0
"""An observation further from its mean than this factor counts as this far: hiccups must not stick."""
COST_PACE = 0.1
"""Power of a step's surprise by which the machine's pace moves."""
COST_TRUSTED = 4.0
"""Observations before a cost says something of the machine's pace."""
COST_SLOPE = 0.02
"""Guess of what each further row adds to a forward, as a share of it, before any was seen."""
COST_OPTIMISM = 0.97
"""Factor on costs that were never seen, so that they are."""

PLAN_STEPS = 4
"""Steps a plan stands while the batch is the same."""
PLAN_MARGIN = 0.01
"""Gain by which another plan must beat the standing one."""
PLAN_MARGIN_PLAIN = 0.02
"""The same where one of the two is plain decoding."""
PROBE_SHARE = 0.01
"""Share of the time that probes may cost."""
PROBE_STEPS = 8
"""Steps between two probes at least."""
PROBE_FORGETS = 0.8
"""Weight that what a sequence showed keeps at each probe: between two of them much may have changed."""

WHOLE_STEPS = 12
"""Steps that a drafter whose drafts come whole is given together, before it is judged."""
WHOLE_PLAIN_STEPS = 3
WHOLE_PAUSE, WHOLE_MAX_PAUSE = 192, 6144
"""Plain steps before it is tried again; twice as many each time that it did not pay."""
WHOLE_DECAY = 0.96
"""Weight that a step's tokens and seconds keep at each later one of its kind."""

EARLY_EXIT_SHARE = 0.25
"""Share of the target's layers that draft, unless a number is given."""
CROSS_VOCAB_LOOK_BEHIND = 32
"""Tokens at the end of a text that are encoded anew when it grows in another vocabulary."""

HYBRID_MODES = ("first", "merge")
HYBRID_SOURCES = "suffix+staged"

PROMPT_LOOKUP_MAX_NGRAM = 4
PROMPT_LOOKUP_MIN_NGRAM = 2

COPY_RATES = (0.1, 0.3, 0.65, 0.85, 0.9, 0.97, 0.98)
"""Chance beforehand that a copied token is accepted, by the binary digits of how many tokens before it matched."""

SUFFIX_MIN_MATCH = 1
SUFFIX_LENGTH_BASE = 1
SUFFIX_LENGTH_FACTOR = 4
"""A copy is this many tokens long for each token of the match it begins with, and SUFFIX_LENGTH_BASE more."""
SUFFIX_COUNTED_LINKS = 8
"""Suffixes of each new token, from the longest down, whose occurrences are counted; of all others the count is old."""
SUFFIX_SHARED_TOKENS = 65_536
"""Tokens of text kept for the requests of one tenant."""
SUFFIX_IDLE_TENANTS = 8
"""Tenants without a running request whose text is kept."""

PREDICTION_RATES = (0.6, 0.7, 0.85, 0.92, 0.96, 0.98, 0.99)
"""As COPY_RATES, for the client's prediction; no match at all is its beginning, or a guess after a replaced token."""
PREDICTION_MAX_MATCH = 16
PREDICTION_CANDIDATES = 32
"""Places of a prediction, on either side of the lost one, that are tried when the output has left it."""

INDEX_DEPTH = 32
"""Tokens by which an index of a corpus is sorted: what is matched and what follows, together."""
BUNDLED_INDEX = ASSETS / "index" / "stdlib.index"
"""Corpus of the bundled tokenizer's tokens."""
REST_MIN_NGRAM = 2
REST_MAX_NGRAM = 16
REST_NUM_MATCHES = 3
REST_MAX_PLACES = 500
REST_CONTINUATION = 10
REST_DECAY = 0.995
REST_CHANCES = (0.02, 0.07, 0.1, 0.14, 0.2, 0.25, 0.37, 0.43, 0.5, 0.9)
"""Chance beforehand that a token is accepted, by its share of what followed the same n-gram in the corpus."""
REST_AGAIN = 0.8
"""How much less is expected beforehand of what only a shorter match knows."""

LOOKAHEAD_WINDOW = 4
LOOKAHEAD_NGRAM = 3
LOOKAHEAD_GUESSES = 4
LOOKAHEAD_MAX_NGRAMS = 2**14
"""N-grams that a sequence's pool may hold."""
LOOKAHEAD_CHANCES = (0.4, 0.7, 0.7)
"""Chance of the most recent guess's first token, and of each after it, before anything was learned."""

RECYCLING_WIDTH = 8
RECYCLING_DEPTHS = 3
"""Depths told apart in what is learned of acceptance; deeper nodes count as the last."""
RECYCLING_CHANCES = (0.4, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)
"""Chance of each rank before anything was learned."""
RECYCLING_REFRESH = 16
"""Steps after which the chances learned since are used."""

PREFILL_CHUNK = 256
"""Prompt tokens a sequence computes in one step."""
MAX_BATCH = 32
"""Sequences that one step may hold."""
MAX_TOP_LOGPROBS = 20

TYPICAL_EPSILON = 0.09
"""Typical acceptance: a token this probable is accepted at any entropy (Medusa, 2401.10774)."""
TYPICAL_DELTA = 0.3
"""Typical acceptance: the threshold is at most this times exp(-entropy); the square root of epsilon."""
ACCEPT_TOP_K = 3
"""Top-k acceptance: a token is accepted among this many most probable ones."""
ACCEPT_TOP_P = 0.8
"""Top-p acceptance: a token is accepted in the smallest set of most probable ones with this mass."""

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the step loop runs.

    Attributes:
        num_draft_tokens: K, nodes of the draft that a sequence may have in one step, probes included; 0 is plain
            decoding, "auto" chooses step by step what is fastest.
        prefill_chunk: prompt tokens a sequence computes in one step.
        max_batch: sequences that one step may hold; more wait their turn.
        acceptance: name of a verification rule, or None for the lossless one that fits the request.
        seed: seed of the engine's own noise, for requests that carry none; None draws one.
    """

    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS
    prefill_chunk: int = PREFILL_CHUNK
    max_batch: int = MAX_BATCH
    acceptance: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        count = self.num_draft_tokens
        if count != AUTO and not (isinstance(count, int) and 0 <= count <= MAX_NUM_DRAFT_TOKENS):
            raise ConfigError(
                f"num_draft_tokens is {count!r}, but must be {AUTO!r} or lie in 0..{MAX_NUM_DRAFT_TOKENS}. "
                f"Give a smaller number, 0 for plain decoding, or {AUTO!r}."
            )
        if self.prefill_chunk < 1 or self.max_batch < 1:
            raise ConfigError(
                f"prefill_chunk is {self.prefill_chunk} and max_batch {self.max_batch}, but both must be at least 1."
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Order and meaning of the options follow Transformers' processors.

    Attributes:
        temperature: 0 is greedy (ties to the lowest id); above 0 divides the logits.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p.
        min_p: drop tokens less probable than min_p times the most probable one.
        repetition_penalty: divide positive (multiply negative) logits of tokens already in prompt or output.
        presence_penalty: subtract from the logits of tokens already in the output, once.
        frequency_penalty: subtract from the logits of tokens in the output, once per occurrence.
        logit_bias: token id -> number added to its logit.
        max_tokens: tokens generated at most.
        min_tokens: neither EOS nor stop_token_ids may be generated before this many tokens.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: token ids that end the output, beside the model's EOS.
        ignore_eos: go on after the model's EOS.
        seed: with a seed, the tokens depend on the seed and the target alone, never on the drafter.
        n: choices per prompt; with a seed, each has noise of its own.
        logprobs: report the log-probability of each token and of this many most probable ones (0: the token's only).
        prompt_logprobs: the same for the tokens of the prompt.
        prediction: the client's own guess of the output, as text or token ids, for a drafter that uses it. It never
            alters the output.
        tenant: whose request this is. A drafter that is told to share text between requests shares it among those of
            one tenant alone, and nothing of or with a request that names none: how fast tokens come can tell a
            client what others' text holds. It never alters the output.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 128
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prediction: str | Sequence[int] | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", tuple(self.prediction))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and low <= value <= high):
                raise SamplingError(f"{name} is {value!r}, but must be a number in {low}..{high}.")
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise SamplingError(f"{name} is {value!r}, but must be a whole number.")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.repetition_penalty <= 0 or self.top_p <= 0:
            name = "top_p" if self.top_p <= 0 else "repetition_penalty"
            raise SamplingError(f"{name} is {getattr(self, name)}, but must be above 0. Leave it out to switch it off.")
        if self.min_tokens > self.max_tokens:
            raise SamplingError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}: no output can satisfy both. "
                "Lower min_tokens or raise max_tokens."
            )
        if self.greedy and self.n > 1:
            raise SamplingError(
                f"n is {self.n} at temperature 0: all choices would be the same. Set temperature above 0, or n=1."
            )
        if self.tenant is not None and (not isinstance(self.tenant, str) or not self.tenant):
            raise SamplingError(f"tenant is {self.tenant!r}, but must be a non-empty string, or None to share nothing.")
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise SamplingError(f"stop holds {string!r}, but each entry must be a non-empty string.")
        predicted = () if self.prediction is None or isinstance(self.prediction, str) else self.prediction
        for token_id in (*self.stop_token_ids, *self.logit_bias, *predicted):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise SamplingError(f"token id {token_id!r} is not a whole number of 0 or more.")
        for token_id, bias in self.logit_bias.items():
            if not _is_number(bias):
                raise SamplingError(f"logit_bias of token {token_id} is {bias!r}, but must be a finite number.")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken without drawing."""
        return self.temperature == 0


_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "seed": (0, MAX_SEED),
    "n": (1, 128),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
}
_INTEGERS = ("top_k", "max_tokens", "min_tokens", "seed", "n", "logprobs", "prompt_logprobs")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
