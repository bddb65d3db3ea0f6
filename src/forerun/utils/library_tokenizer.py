"""Tokenizers of the library `tokenizers`, as forerun asks tokenizers of Transformers.

Importing Transformers' class takes seconds, so one is made where something else than this is asked of a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from inspect import unwrap
from types import MappingProxyType
from typing import Any

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def _of_full(name: str) -> Callable[..., Any]:
    def call(self: LibraryTokenizer, *arguments: Any, **options: Any) -> Any:
        return getattr(self.full, name)(*arguments, **options)

    return call


def _part(name: str) -> Any:
    return property(lambda self: self._parts[name] if self._full is None else getattr(self._full, name))


class LibraryTokenizer:
    """A tokenizer that answers as the Transformers tokenizer `full` does, which it makes when it must: what is changed
    of either is changed of both.

    Attributes:
        backend_tokenizer: the library's.
        special_tokens_map: role -> text of the named tokens, such as "eos_token".
        all_special_tokens: the named tokens, each once.
        chat_template: text, or name -> text; None if there is none.
        fill_in: role -> id of tokens that fill in the middle, which a GGUF file names.
    """

    is_fast = True
    __call__ = _of_full("__call__")
    batch_decode = _of_full("batch_decode")
    tokenize = _of_full("tokenize")
    apply_chat_template = _of_full("apply_chat_template")
    backend_tokenizer = _part("backend_tokenizer")
    special_tokens_map = _part("special_tokens_map")
    all_special_tokens = _part("all_special_tokens")
    chat_template = _part("chat_template")
    fill_in = property(lambda self: self._fill_in)

    def __init__(
        self,
        backend: Any,
        named: Mapping[str, str],
        chat_template: Any,
        make: Callable[[], Any],
        fill_in: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """named: by role. make: makes the Transformers tokenizer. fill_in: as of the attribute."""
        self._fill_in = fill_in
        roles = {role: named[role] for role in _ROLES if role in named}
        self._parts = {
            "backend_tokenizer": backend,
            "special_tokens_map": roles,
            "all_special_tokens": list(dict.fromkeys(roles.values())),
            "chat_template": chat_template,
        }
        self._make = make
        self._full: Any = None

    @property
    def full(self) -> Any:
        """Return the Transformers tokenizer."""
        if self._full is None:
            made = self._make()
            made.chat_template = self._parts["chat_template"]
            self._full = made
        return self._full

    def __copy__(self) -> LibraryTokenizer:
        made = object.__new__(type(self))
        made.__dict__ |= self.__dict__ | {"_parts": {**self._parts}, "_full": copy(self._full)}
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or callable(getattr(type(self), name, None)):
            super().__setattr__(name, value)
        elif name == "chat_template" and self._full is None:
            self._parts[name] = value
        else:
            setattr(self.full, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copies or inspects objects asks for
            raise AttributeError(name)
        role = name.removesuffix("_id")
        if role not in _ROLES:
            return getattr(self.full, name)
        token = self.special_tokens_map.get(role)
        return token if role == name or token is None else self.backend_tokenizer.token_to_id(token)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size()
        return size

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id, added tokens included."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Return id -> token of the tokens that were added."""
        added: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    @property
    def all_special_ids(self) -> list[int]:
        """Return the ids of the named tokens."""
        ids: list[int] = self.convert_tokens_to_ids(self.all_special_tokens)
        return ids

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or those of a list; that of the unknown token, or None, for what is none."""
        if isinstance(tokens, str):
            index = self.backend_tokenizer.token_to_id(tokens)
            return self.unk_token_id if index is None else index
        return None if tokens is None else [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or those of several; None for what is none."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend_tokenizer.id_to_token(int(index)) for index in ids if int(index) not in skipped]

    def encode(self, text: Any, *arguments: Any, **options: Any) -> Any:
        """Return the token ids of a text."""
        is_plain = isinstance(text, str) and not arguments and not options.keys() - {"add_special_tokens", "verbose"}
        if (
            not is_plain or self._full is not None
        ):  # calls of `full` may have left truncation and padding to its backend
            return self.full.encode(text, *arguments, **options)
        return self.backend_tokenizer.encode(text, add_special_tokens=options.get("add_special_tokens", True)).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Return the text of token ids."""
        is_plain = isinstance(token_ids, list) and all(isinstance(index, int) for index in token_ids)
        is_plain = is_plain and not any(options.values()) and not options.keys() - {"clean_up_tokenization_spaces"}
        if not is_plain or self._full is not None:
            return self.full.decode(token_ids, skip_special_tokens, **options)
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def writes_chats_itself(tokenizer: Any) -> bool:
    """Return whether a tokenizer's class is another library's, which writes chats without a template of Jinja."""
    method = unwrap(type(tokenizer).apply_chat_template)
    return method.__module__ not in (__name__, "transformers.tokenization_utils_base")
