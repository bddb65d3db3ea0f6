"""The vocabularies of tokenizers: token texts and bytes, their comparison, and fingerprints."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from hashlib import blake2b, sha256
from inspect import unwrap
from itertools import islice, pairwise
from typing import Any

from forerun.errors import IncompatibleDrafterError, PromptError, RequestError
from forerun.utils.children import CHILDREN, TaskError, TaskLimitError
from forerun.utils.foreign_errors import is_panic
from forerun.utils.library_tokenizer import LibraryTokenizer

_CALLS = (
    *("__call__", "encode", "decode", "batch_decode", "tokenize", "apply_chat_template"),
    *("convert_ids_to_tokens", "convert_tokens_to_ids"),
)


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Return id -> token, special and added tokens included."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def added_tokens(tokenizer: Any) -> dict[int, str]:
    """Return id -> text of the tokens that were added to the vocabulary as they are."""
    return {token_id: str(token) for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return text -> id of the special tokens, named (such as the end of text) or merely added as special.

    What is named and no token, such as an empty text, is left out.
    """
    texts = getattr(tokenizer, "all_special_tokens", ())
    ids = getattr(tokenizer, "all_special_ids", ())
    special = {text: token_id for text, token_id in zip(texts, ids, strict=True) if token_id is not None}
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if getattr(token, "special", False):
            special[str(token)] = token_id
    return special


@lru_cache(maxsize=4)
def longest_token(tokenizer: Any) -> int:
    """Return the characters of the longest token as the vocabulary writes it, an upper bound for its text."""
    return max(map(len, tokenizer.get_vocab()))


def backend(tokenizer: Any) -> dict[str, Any]:
    """Return the contents of its tokenizer.json; empty for slow tokenizers, which have none."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    contents: dict[str, Any] = {} if fast is None else json.loads(fast.to_str())
    return contents


_LONG = 1 << 16
"""Characters of a text that is encoded in a child process: the library holds the interpreter for a second a MiB."""
_SECONDS, _SECONDS_PER_CHARACTER = 1.0, 4e-6
"""Processor time for that."""


def encode_text(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Encode a text to token ids; special: with the tokens that the tokenizer puts before and after a text.

    Raises:
        PromptError: a long text takes too much time or memory.
    """
    if len(text) > _LONG and _is_of_library(tokenizer):
        limit = _SECONDS + _SECONDS_PER_CHARACTER * len(text)
        try:
            arguments = {"special": special}
            content = text.encode()
            _, ids = CHILDREN.perform("encode", arguments, content, seconds=limit, tokenizer=tokenizer)
        except TaskLimitError as error:
            raise PromptError(f"A text of {len(text):,} characters {error} to tokenize. Shorten it.") from None
        except TaskError as error:
            raise PromptError(f"A text of {len(text):,} characters cannot be tokenized: {error}.") from None
        return array("I", ids).tolist()
    # not verbose: it would warn of texts longer than the length in its configuration, which says nothing of the model
    options = {"add_special_tokens": special, "verbose": False}
    is_library = isinstance(tokenizer, LibraryTokenizer)
    found: list[int] = tokenizer.encode(text, **options) if is_library else tokenizer(text, **options)["input_ids"]
    return found


def encode_plain(tokenizer: Any, text: str, special: re.Pattern[str], *, inner: bool = False) -> list[int]:
    """Encode a text without the tokens around it, in which the texts of special tokens are text like any other.

    Args:
        special: matches, without a width, where a special token's text begins: the text is cut behind its first
            character, and the parts are encoded one by one.
        inner: it goes on from other text, so no blank is put before it, as some tokenizers do.

    Raises:
        PromptError: as `encode_text`; or there are more than _MOST_CUTS such places.
    """
    cuts = [found.start() + 1 for found in islice(special.finditer(text), _MOST_CUTS + 1)]
    if len(cuts) > _MOST_CUTS:
        raise PromptError(f"A text holds the texts of more than {_MOST_CUTS:,} special tokens. Shorten it.")
    found: list[int] = []
    for first, last in pairwise([0, *cuts, len(text)]):
        mark = _BEFORE if (first or inner) and _adds_blank(tokenizer) else ""
        ids = encode_text(tokenizer, mark + text[first:last], special=False)
        found += ids[len(encode_text(tokenizer, mark, special=False)) :] if mark else ids
    return found


_MOST_CUTS = 4096
_BEFORE = "\n"
"""Not merged with what follows by tokenizers that put a blank before a text."""


@lru_cache(maxsize=4)
def _adds_blank(tokenizer: Any) -> bool:
    alone, before, both = (encode_text(tokenizer, text, special=False) for text in ("a", _BEFORE, f"{_BEFORE}a"))
    return [*before, *alone] != both


def _is_of_library(tokenizer: Any) -> bool:
    """Return whether the library `tokenizers` alone makes its token ids."""
    if isinstance(tokenizer, LibraryTokenizer):
        return True
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    cls = type(tokenizer)
    encodes = getattr(cls, "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus
    return encodes and unwrap(cls.__call__) is PreTrainedTokenizerBase.__call__


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Return id -> the bytes that the token adds to a text. Special tokens are left out: they stand for no text.

    Byte-level vocabularies (GPT-2 and its descendants) write each byte as a printable character; SentencePiece
    vocabularies write a space as U+2581 and single bytes as <0x0A>.
    """
    special = set(tokenizer.all_special_ids)
    added = added_tokens(tokenizer)
    byte_level = _is_byte_level(tokenizer)
    table: dict[int, bytes] = {}
    for token, index in tokenizer.get_vocab().items():
        if index in special:
            continue
        if index in added:
            table[index] = added[index].encode("utf-8")
        elif byte_level:
            data = _from_byte_level(token)
            if data is not None:
                table[index] = data
        else:
            match = _BYTE_TOKEN.fullmatch(token)
            table[index] = bytes([int(match[1], 16)]) if match else token.replace(_SPACE_MARK, " ").encode("utf-8")
    return table


def shared_tokens(target: dict[int, bytes], draft: dict[int, bytes]) -> dict[int, int]:
    """Map draft id -> target id of tokens that add the same bytes. One to one: the lowest id counts."""
    of_target: dict[bytes, int] = {}
    for index in sorted(target):
        of_target.setdefault(target[index], index)
    shared: dict[int, int] = {}
    taken: set[int] = set()
    for index in sorted(draft):
        same = of_target.get(draft[index])
        if same is not None and same not in taken and draft[index]:
            shared[index] = same
            taken.add(same)
    return shared


def _is_byte_level(tokenizer: Any) -> bool:
    parts = backend(tokenizer)
    if parts:
        return "ByteLevel" in json.dumps([parts.get("decoder"), parts.get("pre_tokenizer")])
    return any(token.startswith("\u0120") for token in tokenizer.get_vocab())


def _from_byte_level(token: str) -> bytes | None:
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return None  # not written in this alphabet: padding, most likely


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    unprintable = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(unprintable)})
    return table


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids of one model.

    Attributes:
        name: of the model, for messages.
        size: width of its logits.
        tokenizer: maps texts to the ids; None if there is none.
    """

    name: str
    size: int
    tokenizer: Any


def check_same_tokens(target: Vocabulary, draft: Vocabulary) -> None:
    """Raise IncompatibleDrafterError if the draft model's token ids mean other tokens than the target's.

    A model's logits may be wider than its vocabulary (padding): that is no difference. Where neither model has
    a tokenizer, ids are all there is, and the widths must agree.

    Raises:
        IncompatibleDrafterError: names the first id that differs and what it stands for on either side.
    """
    if target.tokenizer is None and draft.tokenizer is None:
        if target.size != draft.size:
            raise IncompatibleDrafterError(
                f"{draft.name} has {draft.size} token ids and {target.name} has {target.size}, and without "
                "tokenizers it is unknown whether the remaining ids are padding. Put the tokenizers beside the weights."
            )
        return
    if target.tokenizer is None or draft.tokenizer is None:
        bare = target.name if target.tokenizer is None else draft.name
        raise IncompatibleDrafterError(
            f"{bare} has no tokenizer, so the vocabularies of {target.name} and {draft.name} cannot be compared. "
            "Put its tokenizer beside its weights."
        )
    first = first_difference(tokens_by_id(target.tokenizer), tokens_by_id(draft.tokenizer))
    if first is not None:
        token_id, ours, theirs = first
        raise IncompatibleDrafterError(
            f"{draft.name} cannot draft for {target.name}: token {token_id} is {token_text(ours)} in the target's "
            f"vocabulary and {token_text(theirs)} in the draft's. Choose a draft model with the same tokenizer, or "
            f"let the text stand between them: drafter='cross-vocab:model={draft.name}'."
        )


def first_difference(ours: dict[int, str], theirs: dict[int, str]) -> tuple[int, str | None, str | None] | None:
    """Return the lowest id that stands for different tokens, with both; None stands for no token at all."""
    if ours == theirs:
        return None
    token_id = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    return token_id, ours.get(token_id), theirs.get(token_id)


def token_text(token: str | None) -> str:
    """Format a token for a message."""
    return "absent" if token is None else repr(token)


# Both hashes are parts of file formats: their values must not change. They do not depend on the tokenizer's file, on
# settings such as truncation, or on the version of the library.


def fingerprint(tokenizer: Any) -> str:
    """Hash the vocabulary (added tokens included) and the merges. Empty for None."""
    if tokenizer is None:
        return ""
    vocabulary = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    merges = backend(tokenizer).get("model", {}).get("merges") or []  # none but for byte-pair encodings
    joined = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    content = json.dumps([vocabulary, joined], ensure_ascii=True)
    return blake2b(content.encode(), digest_size=16).hexdigest()


def ids_fingerprint(tokenizer: Any) -> str:
    """Hash the vocabulary alone. Empty for None."""
    if tokenizer is None:
        return ""
    return sha256(json.dumps(sorted(tokens_by_id(tokenizer).items())).encode()).hexdigest()


def guarded(tokenizer: Any, place: str) -> Any:
    """Make a tokenizer raise RequestError where the library panics, which else is no Exception.

    place: its file, for messages.
    """
    cls = type(tokenizer)
    calls = {name: _guarded(getattr(cls, name), place) for name in _CALLS}
    tokenizer.__class__ = type(cls.__name__, (cls,), calls)  # its name is saved with it
    return tokenizer


def _guarded(call: Callable[..., Any], place: str) -> Callable[..., Any]:
    @wraps(call)
    def guard(*arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except BaseException as failure:
            if not is_panic(failure):
                raise
            # nothing of its text, which may quote the request
            raise RequestError(f"The tokenizer of {place} failed: it is damaged. Take another, or pass ids.") from None

    return guard
