"""From a workload's cases to the prompts that are measured, in token ids: texts, chats, each turn of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.config import SamplingParams
from forerun.engine import LLM
from forerun.engine.chat_template import encode
from forerun.errors import ConfigError, PromptError
from forerun.utils.workloads import Case

Answer = Callable[[list[int]], str]
"""The model's answer to a prompt, of which a conversation goes on."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt to generate from.

    Attributes:
        name: the case's, with the turn where it has several.
        category: the case's; empty if it has none.
        token_ids: the prompt as the target sees it.
        reference: the text that follows it in its source; empty if unknown.
    """

    name: str
    category: str
    token_ids: list[int]
    reference: str = ""


def requests(cases: Sequence[Case], tokenizer: Any, model: str, answer: Answer) -> list[BenchPrompt]:
    """Encode the prompts of the cases, in their order; a case with turns gives one for each.

    Args:
        tokenizer: the target's; None if it has none, then a prompt holds token ids with spaces between them.
        model: the target's name, for messages.
        answer: gives the answers between turns.

    Raises:
        ConfigError: a chat, and the target has no chat template; or a prompt that cannot be encoded.
    """
    return [request for case in cases for request in _of_case(case, tokenizer, model, answer)]


def check_lengths(requests: Sequence[BenchPrompt], max_tokens: int, context: int, model: str) -> None:
    """Raise ConfigError where a prompt and its answer do not fit the target's context."""
    for request in requests:
        if len(request.token_ids) + max_tokens > context:
            raise ConfigError(
                f"{request.name} has {len(request.token_ids)} tokens; with {max_tokens} more they exceed the context "
                f"of {model}, {context}. Lower --max-tokens, or leave the prompt out."
            )


def prepare(plain: LLM, cases: Mapping[str, Sequence[Case]], max_tokens: int) -> dict[str, list[BenchPrompt]]:
    """Encode the prompts of each workload; the answers between turns are those of greedy plain decoding for every
    method.

    Raises:
        ConfigError: the model cannot be given one of them.
    """
    answer = plain_answer(plain, max_tokens)
    target = plain.target
    made = {name: requests(each, plain.tokenizer, target.name, answer) for name, each in cases.items()}
    for each in made.values():
        check_lengths(each, max_tokens, target.context_length, target.name)
    return made


def plain_answer(plain: LLM, max_tokens: int) -> Answer:
    """Return a function that answers by greedy plain decoding, up to the end of text or `max_tokens`."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)

    def answer(token_ids: list[int]) -> str:
        generation: Any = plain.generate(token_ids, params)
        text: str = generation.text
        return text

    return answer


def _of_case(case: Case, tokenizer: Any, model: str, answer: Answer) -> list[BenchPrompt]:
    if case.is_chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{case.name} is a chat, but {model} has no chat template. Give a model that has one, or prompts of text."
        )
    if not case.turns:
        ids = _encoded(case, case.opening, tokenizer, model)
        return [BenchPrompt(case.name, case.category, ids, case.reference)]
    made: list[BenchPrompt] = []
    history: list[Mapping[str, str]] = []
    for number, turn in enumerate(case.turns, 1):
        history.append({"role": "user", "content": turn})
        made.append(
            BenchPrompt(f"{case.name}, turn {number}", case.category, _encoded(case, history, tokenizer, model))
        )
        if number < len(case.turns):
            history.append({"role": "assistant", "content": _answered(case, number, made[-1].token_ids, answer)})
    return made


def _encoded(case: Case, prompt: str | Sequence[Mapping[str, str]], tokenizer: Any, model: str) -> list[int]:
    try:
        if tokenizer is None and isinstance(prompt, str):
            return [int(each) for each in prompt.split()]
        return encode(prompt, tokenizer, model)
    except (PromptError, ValueError) as error:
        none = "it has no tokenizer. Put its tokenizer.json beside its weights, or give prompts of token ids."
        raise ConfigError(
            f"{model} cannot be given the prompt {case.name}: {error if isinstance(error, PromptError) else none}"
        ) from None


def _answered(case: Case, number: int, token_ids: list[int], answer: Answer) -> str:
    try:
        return answer(token_ids)
    except PromptError as error:  # the conversation has outgrown the context
        raise ConfigError(f"{case.name} cannot go on after turn {number}: {error}") from None
