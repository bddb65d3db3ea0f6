"""How a model's chat template writes messages: where the user's turn opens, and what closes a message.

A template is a program; what it does is found by rendering messages that hold marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from forerun.engine.prompts import encode
from forerun.errors import ConfigError
from forerun.train.token_ids import end_of_text
from forerun.vocabulary import encode_text, special_tokens

_SYSTEM, _USER = "QxSystemxQ", "QxUserxQ"
"""Marks, of which no template makes anything else."""


class ChatText:
    """A tokenizer's chat template, and raw text where it has none.

    Args:
        name: the model's, for messages.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, prompt: str | Sequence[Mapping[str, str]], *, system: bool = True) -> list[int]:
        """Token ids of a raw text, or of a chat that is to be answered.

        Args:
            system: the template may add a system message where the chat has none.

        Raises:
            PromptError: the template refuses the messages, or there is none.
        """
        if isinstance(prompt, str) or system or self.bare_opening is None or len(prompt) != 1:
            return encode(prompt if isinstance(prompt, str) else list(prompt), self.tokenizer, self.name)
        rendered = self._render([{"role": "user", "content": _USER}], answered=True)
        text = self.bare_opening + prompt[0]["content"] + rendered[rendered.index(_USER) + len(_USER) :]
        return encode_text(self.tokenizer, text, special=False)

    def user_opening(self, system: str | None) -> str:
        """What stands before a user's first message, whose system message is given.

        Raises:
            ConfigError: the template has no place for a user's message.
        """
        messages = [{"role": "user", "content": _USER}]
        if system is not None and self._takes_system:
            messages.insert(0, {"role": "system", "content": system})
        opening, mark, _ = self._render(messages).partition(_USER)
        if not mark or not opening:
            raise ConfigError(f"The chat template of {self.name} does not show a user's message. Give prompts.")
        return opening

    @cached_property
    def closing(self) -> str:
        """What stands between a message and the next; empty where that cannot be told."""
        if not self.has_template:
            return ""
        return self._render([{"role": "user", "content": _USER}]).partition(_USER)[2]

    @cached_property
    def end_token_id(self) -> int:
        """The token by which an answer ends.

        Raises:
            ConfigError: the tokenizer has none.
        """
        ids = encode_text(self.tokenizer, self.closing, special=False) if self.closing else []
        if ids and ids[0] in special_tokens(self.tokenizer).values():
            return ids[0]
        return end_of_text(self.tokenizer)

    @cached_property
    def bare_opening(self) -> str | None:
        """What stands before a user's first message where there is no system message; None if it cannot be told.

        Templates that add a system message write none of their own accord without it: what opens the user's turn is
        what stands between a system message and the user's, less the closing of the former.
        """
        if not self._takes_system:
            return None
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
        before, _, rest = self._render(messages).partition(_SYSTEM)
        between = rest.partition(_USER)[0]
        if not self.closing or not between.startswith(self.closing):
            return None
        opening = between.removeprefix(self.closing)
        of_system = opening.replace("user", "system")
        return before.removesuffix(of_system) + opening if before.endswith(of_system) else None

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template shows a system message before the user's."""
        if not self.has_template:
            return False
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
        try:
            text = self._render(messages)
        except Exception:  # a template raises what it likes
            return False
        return 0 <= text.find(_SYSTEM) < text.find(_USER)

    def _render(self, messages: list[dict[str, str]], *, answered: bool = False) -> str:
        rendered: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=answered, tokenize=False)
        return rendered
