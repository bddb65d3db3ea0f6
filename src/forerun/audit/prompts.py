"""The prompts of an audit, in tokens: short, some of which repeat themselves, and a long one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.errors import ConfigError

_SHORT = 48
"""Tokens of a prompt, from its end."""
_LONG = 250
"""Tokens of the long one: its answers go over the border of 256 keys, where sums are cut."""


def shaped(prompts: Seq[Seq[int]], count: int, context_length: int, max_tokens: int) -> list[list[int]]:
    """`count` prompts of token ids. Every second is said twice, so that drafters which copy find something; the last
    one is long, where the context lets it.

    Raises:
        ConfigError: there is no prompt, or the context is too short for any.
    """
    room = context_length - max_tokens - 1
    usable = [list(prompt) for prompt in prompts if prompt]
    if not usable or room < 2:
        raise ConfigError(
            f"There are {len(usable)} prompts, and room for {max(room, 0)} tokens of one in a context of "
            f"{context_length}. Give a file with prompts, or fewer --max-tokens."
        )
    found: list[list[int]] = []
    for number in range(count):
        prompt = usable[number % len(usable)]
        turn = number // len(usable)  # a file with few prompts: other ends of the same ones
        end = max(len(prompt) - 7 * turn, min(len(prompt), 4))
        prompt = prompt[:end][-_SHORT:]
        if number % 2 == 0:
            prompt = prompt[-_SHORT // 2 :] * 2
        found.append(prompt[-room:])
    if count > 1 and room > _LONG:
        whole = usable[(count - 1) % len(usable)]
        found[-1] = (whole * -(-_LONG // len(whole)))[-_LONG:]
    return found
