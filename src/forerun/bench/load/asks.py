"""Requests of mixed lengths, from a workload's prompts or of a given number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import ne
from typing import TypeVar

from forerun.errors import ConfigError

T = TypeVar("T")

PROMPT_SHARES = (1.0, 0.25, 0.5, 0.125)
"""Of the longest prompt, one request after the other."""
ANSWER_SHARES = (0.5, 1.0, 0.25, 0.75, 1.0)
"""Of the longest answer; another number of them, so that all pairs of lengths come."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt, and how many tokens it asks for."""

    token_ids: list[int]
    max_tokens: int


def mixed(prompts: Iterable[Sequence[int]], prompt_tokens: int, answer_tokens: int) -> list[Ask]:
    """A request for every prompt, cut to lengths that alternate. Prompts with which another one begins are left out.

    Args:
        prompt_tokens: of the longest prompt.
        answer_tokens: of the longest answer.
    """
    made: list[Ask] = []
    for prompt in prompts:
        number = len(made)
        length = max(1, round(prompt_tokens * PROMPT_SHARES[number % len(PROMPT_SHARES)]))
        answer = max(2, round(answer_tokens * ANSWER_SHARES[number % len(ANSWER_SHARES)]))
        cut = list(prompt[:length])
        if all(any(map(ne, cut, each.token_ids)) for each in made):
            made.append(Ask(cut, answer))
    return made


def in_turn(asks: Sequence[T], first: int, count: int) -> list[T]:
    """`count` of the requests from the `first` on, from the beginning again after the last."""
    return [asks[(first + i) % len(asks)] for i in range(count)]


def slices(text: Sequence[int], length: int, count: int) -> list[list[int]]:
    """`count` different pieces of a text, each of `length` tokens, where need be from its beginning again.

    Raises:
        ConfigError: the text has fewer tokens than there are pieces.
    """
    if len(text) < count:
        raise ConfigError(
            f"The prompts hold {len(text)} tokens, too few for {count} different ones. Give more prompts."
        )
    stride = len(text) // count
    return [[text[(i * stride + j) % len(text)] for j in range(length)] for i in range(count)]
