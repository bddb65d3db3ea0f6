"""The validation of requests before they enter the queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from forerun.config import NO_DRAFTER, SamplingParams, entries
from forerun.drafters import Drafter
from forerun.errors import (
    ConfigError,
    ContextLengthError,
    GrammarDeadEndError,
    GrammarError,
    NonFiniteError,
    PromptError,
    RequestBodyError,
    SamplingError,
)
from forerun.models import LanguageModel
from forerun.sampling.grammar import Grammars
from forerun.utils.vocabulary import encode_text, longest_token

T = TypeVar("T")
Params: TypeAlias = SamplingParams | Mapping[str, Any]
"""The options of a request; a dictionary has those of SamplingParams by name."""


@contextmanager
def naming_prompt(index: int, count: int) -> Iterator[None]:
    """Have the errors of a prompt say which of several it is; index: from 0."""
    try:
        yield
    except (PromptError, SamplingError, GrammarDeadEndError, NonFiniteError, RequestBodyError) as error:
        if count > 1:
            error.args = (f"Prompt {index} of 0..{count - 1}: {error}",)
        raise


def check_length(num_tokens: int, target: LanguageModel) -> None:
    """Raise ContextLengthError if a prompt of so many tokens leaves no position for the answer."""
    if num_tokens >= target.context_length:
        raise ContextLengthError(
            f"The prompt has {num_tokens} tokens, but the context of {target.name} holds {context_of(target)}, and the "
            "answer needs at least one position. Shorten the prompt."
        )


def context_of(target: LanguageModel) -> str:
    """Return how many positions a sequence may have, and why they are fewer than the model computes."""
    reason = target.context_reason
    return f"{target.context_length}" + (f" ({reason})" if reason else "")


def excess_characters(text: str, tokenizer: Any, target: LanguageModel, *, says_why: bool) -> str | None:
    """Return how many characters a text has, if so many tokens as the context holds cannot have them; else None. A text
    is checked before it is encoded, which takes a while. says_why: with what bounds the context."""
    most = target.context_length
    size = len(text)
    if size <= most or size <= most * longest_token(tokenizer):
        return None
    context = context_of(target) if says_why else str(most)
    return f"{size} characters, more than the {context} tokens that the context of {target.name} holds can have"


def check_prompt(prompt: Seq[int], target: LanguageModel) -> None:
    """Raise PromptError if the target cannot continue these tokens."""
    if len(prompt) == 0:
        raise PromptError("The prompt is empty: there is nothing to continue. Give at least one token.")
    check_length(len(prompt), target)
    vocab_size = target.vocab_size
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(i for i, token_id in enumerate(prompt) if not 0 <= token_id < vocab_size)
        raise PromptError(
            f"Token {prompt[bad]} at position {bad} of the prompt is outside the vocabulary of {target.name}, "
            f"0..{vocab_size - 1}. Was it made by another model's tokenizer?"
        )


def check_end(params: SamplingParams, stop_ids: Set[int], target: LanguageModel) -> None:
    """Raise GrammarError if no token ends an answer that a grammar completes."""
    if params.grammar is not None and not stop_ids:
        raise GrammarError(
            f"No token ends an answer: {target.name} has none, or ignore_eos is set. Leave ignore_eos out, or give "
            "stop_token_ids, so that an answer can end where its grammar does."
        )


def checked(
    params: SamplingParams | None,
    target: LanguageModel,
    tokenizer: Any,
    drafter: Drafter | None,
    grammars: Grammars | None = None,
) -> SamplingParams:
    """Return the request's options with its prediction in the target's tokens; the default options if `params` is None.

    This and what it returns serve all prompts of a request. It may take a second: where requests are computed, call it
    in another thread.

    Args:
        grammars: of the engine, where the request's is prepared.

    Raises:
        SamplingError, GrammarError: the engine would refuse the request.
    """
    params = params or SamplingParams()
    vocab_size = target.vocab_size
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token_id in getattr(params, name) or ():
            if token_id >= vocab_size:
                raise SamplingError(
                    f"{name} names token {token_id}, but the vocabulary of {target.name} is 0..{vocab_size - 1}. "
                    "Leave it out."
                )
    if params.stop and tokenizer is None:
        raise SamplingError(
            f"stop is {list(params.stop)!r}, but {target.name} has no tokenizer, so there is no text to search. "
            "Use stop_token_ids."
        )
    if params.drafter not in (None, NO_DRAFTER):
        offers = () if drafter is None else tuple(drafter.offers)
        if params.drafter not in offers:
            there = f"Loaded are: {', '.join(offers)}" if offers else "There are none to choose from"
            raise SamplingError(
                f"The request names a drafter that was not loaded. {there}; {NO_DRAFTER!r} drafts nothing, and without "
                "a name the request has the default."
            )
    if params.grammar is not None and grammars is not None:
        grammars.prepare(params.grammar, params.tenant)
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed and target.eos_token_ids.union(params.stop_token_ids).issuperset(allowed):
        raise SamplingError("allowed_token_ids holds tokens alone that min_tokens forbids. Leave one of them out.")
    if params.bad_words:
        params = replace(params, bad_words=_encoded_words(params, target, tokenizer))
    if params.prediction is None:
        return params
    return replace(params, prediction=encode_prediction(params, target, tokenizer, drafter))


def _encoded_words(params: SamplingParams, target: LanguageModel, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of bad_words; of a text, as a text's beginning and after a blank, as vLLM does."""
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise SamplingError(f"bad_words are texts, but {target.name} has no tokenizer. Give lists of token ids.")
        check_text(word, SamplingError, "An entry of bad_words")
        for text in (word, f" {word.lstrip()}"):
            if token_ids := encode_text(tokenizer, text, special=False):
                found[tuple(token_ids)] = None
    if wrong := next((each for each in found if max(each) >= target.vocab_size), None):
        raise SamplingError(
            f"bad_words names token {max(wrong)}, but the vocabulary of {target.name} is 0..{target.vocab_size - 1}. "
            "Leave it out."
        )
    return tuple(found)


def check_text(text: str, error: type[PromptError | SamplingError], what: str) -> None:
    """Raise `error` if the text holds halves of characters, as Python's reading of bytes that are no UTF-8 leaves."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise error(
            f"{what} is not Unicode text: it holds lone surrogates. It was read from bytes that are not UTF-8, or cut "
            "inside a character; decode it with the encoding it is in."
        ) from None


def special_stops(params: SamplingParams, special: Mapping[str, int], target: LanguageModel) -> dict[int, str]:
    """Return the tokens whose texts are stop strings, and these: no text has to show special tokens.

    special: text -> id of the tokenizer's special tokens.
    """
    return {special[stop]: stop for stop in params.stop if special.get(stop, target.vocab_size) < target.vocab_size}


def encode_prediction(
    params: SamplingParams, target: LanguageModel, tokenizer: Any, drafter: Drafter | None
) -> list[int]:
    """Encode the request's prediction in the target's tokens.

    Raises:
        SamplingError: no drafter would use it, it cannot be encoded, it holds ids outside the vocabulary, or it is
            longer than the context.
    """
    prediction = params.prediction
    assert prediction is not None
    if drafter is None or not drafter.reads_prediction(params):
        raise SamplingError(
            "The request has a prediction, but its drafter does not use predictions. "
            "Choose drafter='prediction', or a hybrid with it, or leave the prediction out."
        )
    if isinstance(prediction, str):
        if tokenizer is None:
            raise SamplingError(f"The prediction is text, but {target.name} has no tokenizer. Give it as token ids.")
        if excess := excess_characters(prediction, tokenizer, target, says_why=False):
            raise SamplingError(f"The prediction has {excess}. Shorten it.")
        check_text(prediction, SamplingError, "The prediction")
        token_ids = encode_text(tokenizer, prediction, special=False)
    else:
        token_ids = list(prediction)
    bad = next((token_id for token_id in token_ids if not 0 <= token_id < target.vocab_size), None)
    if bad is not None:
        raise SamplingError(
            f"The prediction holds token {bad}, but the vocabulary of {target.name} is 0..{target.vocab_size - 1}. "
            "Was it made by another model's tokenizer?"
        )
    if len(token_ids) > target.context_length:
        raise SamplingError(
            f"The prediction has {len(token_ids)} tokens, but the context of {target.name} holds "
            f"{target.context_length}. Shorten it."
        )
    return token_ids


def sampling_of(
    given: Params | Seq[Params | None] | None, sampling: Mapping[str, Any]
) -> SamplingParams | list[SamplingParams | None] | None:
    """Return the options of a request, or of each where several are given. None stands for the defaults.

    sampling: options of SamplingParams, in place of the given ones.

    Raises:
        SamplingError: an option is unknown or out of range, or `given` is no such thing.
    """
    if isinstance(given, Mapping):
        given = SamplingParams(**given)
    if given is None and not sampling:
        return None
    if given is None or isinstance(given, SamplingParams):
        return replace(given or SamplingParams(), **sampling)
    several = entries("sampling_params", given, "SamplingParams, a dictionary of its options, or a list of these")
    return [sampling_of(each, sampling) for each in several]  # type: ignore[misc]  # entries are no lists


def one_each(params: Seq[T], count: int) -> Seq[T]:
    """Return the options of each of `count` prompts. Raises ConfigError if there are more or fewer."""
    if len(params) != count:
        raise ConfigError(
            f"There are {count} prompts but {len(params)} sampling_params. Give one for all, or one per prompt."
        )
    return params
