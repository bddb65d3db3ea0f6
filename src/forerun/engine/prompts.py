"""Prompts as people give them: text, token ids, or a chat; one or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any, TypeAlias

from forerun.errors import PromptError

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Seq[int] | Seq[Message]"


def split_prompts(prompts: Prompt | Seq[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether there was a single one. Raises PromptError if it cannot be told."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, Mapping) or not isinstance(prompts, Seq):
        raise PromptError(
            f"A prompt of type {type(prompts).__name__} cannot be read. "
            "Give text, a list of token ids, a chat (a list of messages), or a list of these."
        )
    if not prompts:
        raise PromptError("The prompt is empty: there is nothing to continue. Give at least one token.")
    if _is_token_id(prompts[0]) or isinstance(prompts[0], Mapping):
        return [prompts], True  # type: ignore[list-item]
    return list(prompts), False  # type: ignore[arg-type]


def encode(prompt: Prompt, tokenizer: Any, name: str) -> list[int]:
    """Token ids of one prompt.

    Args:
        tokenizer: None if the model has none; then only token ids can be served.
        name: the model's, for messages.

    Raises:
        PromptError: empty, mixed, or of a kind this model cannot read.
    """
    if not isinstance(prompt, (str, Seq)) or len(prompt) == 0:
        raise PromptError(f"The prompt is {prompt!r}: there is nothing to continue. Give at least one token.")
    if not isinstance(prompt, str) and all(_is_token_id(entry) for entry in prompt):
        return [int(entry) for entry in prompt]  # type: ignore[arg-type]
    if not isinstance(prompt, str) and not all(isinstance(entry, Mapping) for entry in prompt):
        odd = next(entry for entry in prompt if not _is_token_id(entry))
        raise PromptError(f"The prompt holds {odd!r}, which is no token id. Give whole numbers only, or text.")
    if tokenizer is None:
        raise PromptError(f"{name} has no tokenizer, so text cannot be read. Pass token ids.")
    if isinstance(prompt, str):
        token_ids: list[int] = tokenizer(prompt)["input_ids"]
        return token_ids
    return _encode_chat([dict(entry) for entry in prompt if isinstance(entry, Mapping)], tokenizer, name)


def _encode_chat(messages: list[dict[str, Any]], tokenizer: Any, name: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"{name} has no chat template, so a chat cannot be put to it. Pass text instead.")
    for message in messages:
        if "role" not in message or "content" not in message:
            raise PromptError(f"The chat message {message!r} needs both 'role' and 'content'.")
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template raises what it likes
        raise PromptError(f"The chat template of {name} refused the messages: {error}") from error
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def _is_token_id(entry: object) -> bool:
    return hasattr(entry, "__index__") and not isinstance(entry, bool)
