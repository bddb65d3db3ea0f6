"""The options of engine and requests with their defaults and ranges, names of bundled models, and number formats."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from forerun.errors import ConfigError, GrammarError, SamplingError
from forerun.utils.fields import Checked, check_options, documented, hinted, option
from forerun.utils.home import HOME_VARIABLE
from forerun.utils.json_file import parse_json

_MOST_DIGITS = 20


def entries(name: str, values: object, expected: str) -> tuple[Any, ...]:
    """Return the entries of a list or another iterable that is no text or mapping. Raises SamplingError."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise SamplingError(f"{name} is of type {type(values).__name__}, but must be {expected}.")
    return tuple(values)


def _check_token_ids(name: str, values: object) -> tuple[int, ...]:
    """Check a list of token ids. Raises SamplingError."""
    return tuple(_token_id(name, value) for value in entries(name, values, "a list of token ids"))


def _token_id(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise SamplingError(f"{name} holds {value!r}, but a token id is a whole number of 0 or more.")
    return int(value)


def _bad_word(word: object) -> str | tuple[int, ...]:
    """Check an entry of bad_words. Raises SamplingError."""
    if not word or isinstance(word, Mapping):
        raise SamplingError(f"bad_words holds {word!r}, but each entry must be a non-empty string.")
    return word if isinstance(word, str) else _check_token_ids("bad_words", word)


def biases(values: object) -> dict[int, float]:
    """Check token id -> bias. Ids may be text, since the keys of a JSON object are. Raises SamplingError."""
    if not isinstance(values, Mapping):
        raise SamplingError(f"logit_bias is of type {type(values).__name__}, but must map token ids to numbers.")
    found = {}
    for key, bias in values.items():
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < _MOST_DIGITS
        token_id = _token_id("logit_bias", int(key) if digits else key)
        try:
            number = math.nan if isinstance(bias, bool) or not isinstance(bias, Real) else float(bias)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise SamplingError(f"logit_bias of token {token_id} is {bias!r}, but must be a finite number.")
        found[token_id] = number
    return found


JSON_OBJECT, JSON_SCHEMA, REGEX, LARK = KINDS = ("json_object", "json_schema", "regex", "lark")

MAX_STOP_CHARACTERS = 2**17
"""Of all stop strings of a request."""

_REMEDY = "Correct it, or leave it out."


@dataclass(frozen=True, slots=True, repr=False)
class Grammar:
    """The grammar of an answer, as text. Make one with `json_object`, `json_schema`, `regex`, `lark` or `choice`.

    Attributes:
        kind: one of KINDS.
        text: the schema as JSON, the regular expression or the grammar; empty for `json_object`.
        field: of the request's body that it comes from, for errors; empty for none.
        warnings: of what it leaves out, for the answer.

    Raises:
        GrammarError: it is not Unicode text, or no JSON where it must be. Whether it can be followed is
            found when a request with it is made.
    """

    kind: str
    text: str = ""
    field: str = field(default="", compare=False)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrammarError(f"The grammar is of the kind {self.kind!r}, but must be one of {', '.join(KINDS)}.")
        if not isinstance(self.text, str):
            raise GrammarError(f"The {self.kind} is of type {type(self.text).__name__}, but must be text. {_REMEDY}")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise GrammarError(f"The {self.kind} is not Unicode text: it holds lone surrogates. {_REMEDY}") from None
        if self.kind == JSON_SCHEMA and not isinstance(parse_json(self.text, "json_schema", GrammarError), dict):
            raise GrammarError(f"The JSON schema is no JSON object. {_REMEDY}")
        if self.kind in (REGEX, LARK) and not self.text:
            raise GrammarError(f"The {self.kind} is empty: no answer would be possible. {_REMEDY}")

    def __repr__(self) -> str:
        """Show the kind without the text, which is the user's."""
        return f"Grammar({self.kind})"

    @classmethod
    def json_object(cls) -> Grammar:
        """Allow any JSON object."""
        return cls(JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Allow JSON that a schema validates. schema: as an object, or as JSON text."""
        if isinstance(schema, str):
            return cls(JSON_SCHEMA, schema)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"The JSON schema cannot be written as JSON: {str(error)[:200]}. {_REMEDY}") from None
        return cls(JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Allow text that matches a regular expression from its beginning to its end."""
        return cls(REGEX, pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Allow a sentence of a grammar in Lark's notation, whose start is `start`."""
        return cls(LARK, grammar)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Allow one of these texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError(f"A choice must be a list of texts, none of them empty. {_REMEDY}")
        return cls(REGEX, "|".join(map(re.escape, texts)))


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

DTYPES = ("float32", "bfloat16", "float64", "auto")
MAX_BLOCK_SIZE = 64
"""Tokens that one pass of a block head drafts, at most."""
OUTPUT_ROWS = ("target", "one", "each")
HEAD_FORMS = ("auto", "eagle", "medusa", "speculators")
"""Public forms of draft heads that can be written; auto: what the head is."""
DEFAULT_DTYPE = "bfloat16"
QUANTISATIONS = {"int8": (8, 16), "int4": (4, 8), "int8-a8": (8, 8), "int4-a16": (4, 16)}
"""Names of `quantize`, which a model's weights can be kept in: bits of a weight, and of the activations that it is
multiplied with."""
UNQUANTIZED = "none"
"""Of `quantize`: what quantized weights of the files stand for is kept as numbers of `dtype`."""

KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "int8")
"""Number formats of keys and values. auto: that of the kernels. int8: a scale for each position and head."""

AUTO: Literal["auto"] = "auto"
"""num_draft_tokens: chosen step by step, for every sequence. drafter: chosen by the target. max_model_len: as far
as the model and the memory go."""
NumDraftTokens = int | Literal["auto"]
MaxModelLen = int | Literal["auto"]
ON = "on"
OFF = "off"
PREFIX_REUSE = (AUTO, ON, OFF)
MAX_NUM_DRAFT_TOKENS = 128
"""Upper bound of K, the nodes of a draft: no chain pays beyond a few of them, but trees and probes need more."""

DEFAULT_DRAFTER = "suffix"
"""Of targets that come without a drafter: needs no model, and of such drafters was the fastest (docs/methods.md)."""
NO_DRAFTER = "none"
"""The drafter's name that stands for plain decoding."""

LOSSY_RULES = ("typical", "top-k", "top-p")
"""Acceptance rules that change the text's distribution."""

COST_CACHE_VARIABLE = "FORERUN_COST_CACHE"
"""Environment variable; 0 keeps measured costs out of the user's cache folder."""

KERNELS_VARIABLE = "FORERUN_KERNELS"
"""Environment variable: which kernels run."""
NATIVE = "native"
TRITON = "triton"
REFERENCE = "reference"
KERNELS = ("auto", NATIVE, TRITON, REFERENCE)
"""auto: the native ones where they can be had; native: an error where they cannot; triton: those for CUDA devices, an
error where they cannot be had; reference: those in PyTorch."""
INSTRUCTIONS_VARIABLE = "FORERUN_INSTRUCTIONS"
"""Environment variable: the instruction set of the native kernels; unset: the best that the processor has."""
ARM_INSTRUCTIONS = ("neoni8mm", "neondotprod", "neon")
X86_INSTRUCTIONS = ("amx", "avx512bf16", "avx512", "avxvnni", "avx2")
INSTRUCTIONS = (*ARM_INSTRUCTIONS, *X86_INSTRUCTIONS, "portable")
"""Those of each kind of processor, the best first. A processor with one of its kind has those that follow it, but for
AVX-VNNI. csrc/forerun.h gives them their numbers, 0 the last."""

MODELS_VARIABLE = "FORERUN_MODELS"
"""Environment variable: folders of GGUF files, whose models commands take by name."""
ENVIRONMENT_VARIABLES = (
    COST_CACHE_VARIABLE,
    HOME_VARIABLE,
    INSTRUCTIONS_VARIABLE,
    KERNELS_VARIABLE,
    MODELS_VARIABLE,
)
"""All that are read beside those of flags."""

HYBRID_MODES = ("first", "merge")
HYBRID_SOURCES = "suffix+staged"
INDEX_DEPTH = 32
"""Tokens by which an index of a corpus is sorted: what is matched and what follows, together."""
SHIPPED_HEADS = ASSETS / "heads"
"""A folder for each kind of head, with a folder for each target, of the target's name."""
BUNDLED_INDEX = ASSETS / "index" / "stdlib.index"
"""Corpus of the bundled tokenizer's tokens."""

MEMORY_LOG = "forerun.memory"
"""Logger that says at INFO, before weights are read, what memory is planned for."""

PROMPT_CACHE_SIZE = 8.0
"""GiB of the files of `prompt_cache`."""
PREFILL_CHUNK = 256
"""Prompt tokens a sequence computes in one step."""
MAX_BATCH = 32
"""Sequences that one step may hold."""
MAX_TOP_LOGPROBS = 20

MAX_SEED = 2**63 - 1


@documented
@dataclass(frozen=True, slots=True)
class EngineConfig(Checked):
    """The options of the step loop. None stands for the default of every field."""

    num_draft_tokens: NumDraftTokens = option(
        AUTO,
        "K, nodes of the draft that a sequence may have in one step, probes included. 0 is plain decoding, 'auto' "
        "chooses step by step what is fastest.",
        low=0,
        high=MAX_NUM_DRAFT_TOKENS,
        remedy="0 is plain decoding.",
    )
    prefill_chunk: int = option(PREFILL_CHUNK, "Prompt tokens that a sequence computes in one step.", low=1)
    max_batch: int = option(MAX_BATCH, "Sequences that one step may hold; more wait their turn.", low=1)
    max_queue: int | None = option(
        None,
        "Sequences that may wait beyond those; a request that finds no room is refused. None: any number.",
        low=0,
        default_text="any number",
    )
    cache_memory: float | None = option(
        None,
        "GiB for keys and values. A request that could never fit is refused; one that does not fit now waits.",
        low=0,
        above=True,
        default_text="what max_batch sequences of the whole context need, at most half of the machine's memory",
    )
    prefix_reuse: str = option(
        AUTO,
        f"Keep keys and values of prompts and answers, while there is room, for requests that begin alike: "
        f"{', '.join(PREFIX_REUSE)}. auto: where the model is exact, so that it changes no bit.",
    )
    prompt_cache: str | None = option(
        None,
        "A folder of your own, which keeps keys and values of prompts and answers beyond a restart: what it has of a "
        "prompt is not computed again. It holds what was said, as numbers. Several processes may share it.",
        metavar="FOLDER",
    )
    prompt_cache_size: float | None = option(
        None,
        "GiB that the files in it may take. Those that were not used for longest are removed.",
        low=0,
        above=True,
        default_text="8",
    )
    acceptance: str | None = option(
        None,
        "Name of a verification rule. Greedy requests and those with a seed are verified exactly whatever it is.",
        default_text="the exact rule that fits",
    )
    seed: int | None = option(
        None, "Seed of the engine's own noise, for requests that carry none.", default_text="drawn"
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.prefix_reuse not in PREFIX_REUSE:
            raise ConfigError(f"prefix_reuse is {self.prefix_reuse!r}, but must be one of {', '.join(PREFIX_REUSE)}.")
        if self.prompt_cache_size is not None and self.prompt_cache is None:
            raise ConfigError(
                f"prompt_cache_size is {self.prompt_cache_size:g}, but no prompt_cache is given. Give its folder."
            )


@hinted(SamplingError)
@documented
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The options of one request's sampling. Order and meaning follow Transformers' processors.

    None stands for the default of every field.
    """

    temperature: float = option(
        1.0,
        "0 is greedy (ties to the lowest id); above 0 divides the logits.",
        low=0,
        high=100,
        flags=("--temperature", "--temp"),
    )
    top_k: int = option(0, "Keep the k most probable tokens; 0 and -1 keep all.", low=-1)
    top_p: float = option(
        1.0,
        "Keep the smallest set of most probable tokens whose mass reaches top_p.",
        low=0,
        above=True,
        high=1,
        remedy="Leave it out to switch it off.",
    )
    min_p: float = option(0.0, "Drop tokens less probable than min_p times the most probable one.", low=0, high=1)
    repetition_penalty: float = option(
        1.0,
        "Divide positive (multiply negative) logits of tokens already in prompt or output.",
        low=0.01,
        high=100,
        remedy="Leave it out to switch it off.",
    )
    presence_penalty: float = option(
        0.0, "Subtract from the logits of tokens already in the output, once.", low=-100, high=100
    )
    frequency_penalty: float = option(
        0.0, "Subtract from the logits of tokens in the output, once per occurrence.", low=-100, high=100
    )
    logit_bias: Mapping[int, float] = option({}, "Token id -> number added to its logit.")
    max_tokens: int = option(128, "Tokens generated at most.", low=1)
    min_tokens: int = option(0, "Neither EOS nor stop tokens may be generated before this many tokens.", low=0)
    stop: Sequence[str] = option((), "Strings that end the output; they are not part of it.")
    stop_token_ids: Sequence[int] = option(
        (), "Token ids that end the output, beside the model's EOS.", flags=("--stop-token-id",), metavar="ID"
    )
    include_stop_str_in_output: bool = option(False, "The text holds the stop string, or the stop token's text.")
    ignore_eos: bool = option(False, "Go on after the model's EOS.")
    allowed_token_ids: Sequence[int] | None = option(
        None, "Only these tokens may be generated; EOS must be among them to be.", metavar="ID", default_text="all"
    )
    bad_words: Sequence[str | Sequence[int]] = option(
        (), "Texts, or lists of token ids, whose last token may not follow the others.", metavar="TEXT"
    )
    skip_special_tokens: bool = option(True, "The text leaves out special tokens.")
    seed: int | None = option(
        None,
        "With a seed, the tokens depend on the seed and the target alone, never on the drafter. -1 is none.",
        low=-1,
        high=MAX_SEED,
    )
    n: int = option(
        1, "Choices per prompt; with a seed, each has noise of its own.", low=1, high=128, flags=("--n", "-n")
    )
    logprobs: int | None = option(
        None,
        "Report the log-probability of each token and of this many most probable ones (0: the token's only). "
        "The command line prints them with --json.",
        low=0,
        high=MAX_TOP_LOGPROBS,
    )
    prompt_logprobs: int | None = option(None, "The same for the tokens of the prompt.", low=0, high=MAX_TOP_LOGPROBS)
    prediction: str | Sequence[int] | None = option(
        None,
        "The client's own guess of the output, as text or token ids (@FILE reads it from there on the command line), "
        "for a drafter that uses it; the nearer, the faster. It never alters the output.",
        metavar="TEXT|@FILE",
    )
    drafter: str | None = option(
        None,
        "Which of several drafters that were loaded drafts for this request, by its name; 'none' for none of them. It "
        "never alters the output.",
        default_text="the first",
    )
    num_draft_tokens: int | None = option(
        None,
        "Draft tokens that this request may have in one step at most; 0 is plain decoding. It never alters the output.",
        low=0,
        high=MAX_NUM_DRAFT_TOKENS,
        default_text="as many as pay",
    )
    grammar: Grammar | None = option(None, "What the output must be: JSON, JSON of a schema, a regular expression's.")
    tenant: str | None = option(
        None,
        "Whose request this is. A drafter that is told to share text between requests shares it among those of "
        "one tenant alone, and nothing of or with a request that names none: how fast tokens come can tell a "
        "client what others' text holds. Keys and values of prompts that begin alike are shared among requests of "
        "one tenant, and among those that name none; the queue is fair to tenants. It never alters the output.",
    )
    priority: int = option(
        0,
        "Requests of higher priority come first, and take the places of others where there are none; of the requests "
        "of one tenant, and of those that name none. What a tenant's requests get of what all share is the same.",
        low=-100,
        high=100,
    )

    def __post_init__(self) -> None:
        check_options(self, SamplingError)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        prediction = self.prediction
        if prediction is not None and not isinstance(prediction, str):
            prediction = _check_token_ids("prediction", prediction)
        allowed = self.allowed_token_ids
        if allowed is not None and not (allowed := _check_token_ids("allowed_token_ids", allowed)):
            raise SamplingError("allowed_token_ids is empty: no token could be generated. Leave it out to allow all.")
        for name, value in (
            ("stop", entries("stop", stop, "a string or a list of strings")),
            ("stop_token_ids", _check_token_ids("stop_token_ids", self.stop_token_ids)),
            ("logit_bias", biases(self.logit_bias)),
            ("allowed_token_ids", allowed),
            ("bad_words", tuple(map(_bad_word, entries("bad_words", self.bad_words, "a list of strings")))),
            ("seed", None if self.seed == -1 else self.seed),
            ("prediction", prediction),
            ("top_k", max(self.top_k, 0)),
        ):
            object.__setattr__(self, name, value)
        if self.tenant is not None and (not isinstance(self.tenant, str) or not self.tenant):
            raise SamplingError(f"tenant is {self.tenant!r}, but must be a non-empty string, or None to share nothing.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise SamplingError(f"grammar is of type {type(self.grammar).__name__}, but must be a forerun.Grammar.")
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise SamplingError(f"stop holds {string!r}, but each entry must be a non-empty string.")
        if (length := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            raise SamplingError(
                f"stop has {length} characters in all, but may have {MAX_STOP_CHARACTERS}. Shorten its strings."
            )
        if self.min_tokens > self.max_tokens:
            raise SamplingError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}: no output can satisfy both. "
                "Lower min_tokens or raise max_tokens."
            )
        if self.greedy and self.n > 1:
            raise SamplingError(
                f"n is {self.n} at temperature 0: all choices would be the same. Set temperature above 0, or n=1."
            )

    @property
    def greedy(self) -> bool:
        """Return whether the most probable token is taken without drawing."""
        return self.temperature == 0


def check_one_process(tensor_parallel_size: int) -> None:
    """Raise ConfigError unless a model is to be computed by one process: 1, as vLLM's users may say it."""
    if tensor_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size!r}, but forerun computes a model in one process. Leave it "
            "out, or run vLLM with tensor_parallel_size and give it forerun's drafts and heads: `forerun export vllm`, "
            "or forerun.integrations.vllm (docs/scaling.md)."
        )


def environment_choice(variable: str, choices: Sequence[str]) -> str | None:
    """Return the value of an environment variable; None if it is unset or empty. Raises ConfigError for others."""
    value = os.environ.get(variable, "")
    if value and value not in choices:
        raise ConfigError(f"{variable} is {value!r}, but must be one of {', '.join(choices)}. Correct it, or unset it.")
    return value or None
