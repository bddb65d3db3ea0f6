"""Tokenizer and chat template from a GGUF file's metadata.

Two kinds: byte-level byte-pair encoding (`tokenizer.ggml.model` = gpt2) and SentencePiece's byte-pair encoding by score
(= llama). The ids of a text are those of llama.cpp's `llama_tokenize(add_special=true, parse_special=true)` for the
same file. Where that and Transformers' tokenizers differ:

- Control, unknown and user-defined tokens are matched in the text before anything else, by both. llama.cpp looks for
  the longest first, Transformers from left to right. They differ only where two overlap in the text; here it is
  Transformers'.
- Unused tokens at the end of the list fill the vocabulary up. llama.cpp has them as tokens without a text; here, as in
  Transformers, they are no tokens.
- `llama_detokenize` can take out spaces before punctuation; decoding here gives the text as it was.
- llama.cpp takes 11 for bos and eos where a gpt2 file names none; here there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.gguf_format.end_tokens import end_tokens, marked_by_text
from forerun.gguf_format.merges import merges_of_scores, read_merges
from forerun.gguf_format.pre_tokenizers import SPLITTINGS
from forerun.gguf_format.token_list import (
    NAMED,
    PREFIX,
    TOKENS,
    TYPES,
    TokenList,
    TokenType,
    as_fields,
    read_token_list,
)

MODEL = PREFIX + "model"
PRE_TOKENIZER = PREFIX + "pre"
CHAT_TEMPLATE = "tokenizer.chat_template"
_MATCHED = frozenset({TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED})
_BYTES = [f"<0x{value:02X}>" for value in range(256)]
_SPACE = "\u2581"
_DEFAULT_IDS = {"gpt2": {}, "llama": {"unk": 0, "bos": 1, "eos": 2}}
"""By kind of tokenizer, the named ids where the file gives none."""


def read_tokenizer(metadata: Mapping[str, Any], place: str) -> Any:
    """The Transformers tokenizer (PreTrainedTokenizerFast) of a file, with its chat template.

    Args:
        metadata: keys and plain values.
        place: the file, for messages.

    Raises:
        ModelLoadError: a key is missing, or its value cannot be; names the key and the reason.
        UnsupportedModelError: the tokenizer is of a kind that is not implemented; names it.
    """
    from transformers import PreTrainedTokenizerFast

    tokens, kind = _read(metadata, place)
    template = _chat_template(tokens)
    matched = _matched(tokens)
    try:
        backend = _byte_level(tokens) if kind == "gpt2" else _sentencepiece(tokens)
        backend.add_tokens(_as_added(tokens, matched))
    except ModelLoadError:
        raise
    except Exception as failure:  # the library's errors have no type in common
        raise tokens.wrong(TOKENS, f"no tokenizer can be made of them: {failure}") from failure
    # named tokens are cut out of texts and left out of decoded ones, which an ordinary word must not be
    named = {
        f"{role}_token": tokens.texts[tokens.named[role]]
        for role in ("bos", "eos", "unk", "pad")
        if tokens.named.get(role) in matched
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **named
    )


def eos_token_ids(metadata: Mapping[str, Any], place: str) -> frozenset[int]:
    """The ids that end an answer, as llama.cpp decides: eos, eot, eom, and end tokens that it finds by their text.

    Raises:
        ModelLoadError, UnsupportedModelError: as `read_tokenizer`, of the keys that this reads.
    """
    return end_tokens(_read(metadata, place)[0])


def _read(metadata: Mapping[str, Any], place: str) -> tuple[TokenList, str]:
    """The token list, and the kind of tokenizer."""
    fields = as_fields(metadata, place)
    kind = fields.string(MODEL)
    if kind not in _DEFAULT_IDS:
        raise _unsupported(place, MODEL, kind, _DEFAULT_IDS)
    return read_token_list(fields, _DEFAULT_IDS[kind]), kind


def _unsupported(place: str, key: str, value: str, served: Iterable[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{place}: {key} is {value[:60]!r}, a kind of tokenizer that forerun does not read from GGUF; it reads "
        f"{', '.join(served)}. Give the model's Transformers folder."
    )


def _byte_level(tokens: TokenList) -> Any:
    """Byte-level BPE: every byte is written as a character, a space as U+0120."""
    name = tokens.fields.string(PRE_TOKENIZER)
    if name not in SPLITTINGS:
        raise _unsupported(tokens.fields.place, PRE_TOKENIZER, name, SPLITTINGS)
    if TokenType.BYTE in tokens.types:
        index = tokens.types.index(TokenType.BYTE)
        raise tokens.wrong(TYPES, f"token {index} is a byte token, which a vocabulary of the kind gpt2 does not have")
    splitting = SPLITTINGS[name]
    merges = read_merges(tokens)
    vocabulary = _vocabulary(tokens, merges)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.ignore_merges))
    backend.pre_tokenizer = splitting.build()
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = _ends_of_text(tokens, add_bos=splitting.add_bos)
    return backend


def _sentencepiece(tokens: TokenList) -> Any:
    """SentencePiece's BPE: a space is written as U+2581, and a character that is no token as its bytes (<0x0A>)."""
    missing = next((token for token in _BYTES if token not in tokens.ids), None)
    if missing is not None:
        raise tokens.wrong(TOKENS, f"the byte token {missing} is missing")
    merges = merges_of_scores(tokens)
    vocabulary = _vocabulary(tokens, merges)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    before = tokens.fields.flag(PREFIX + "add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if before else [spaces])
    written = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*written, decoders.Strip(" ", 1, 0)] if before else written)
    backend.post_processor = _ends_of_text(tokens, add_bos=True)
    return backend


def _vocabulary(tokens: TokenList, merges: list[tuple[str, str]]) -> dict[str, int]:
    """Text -> id, without the unused tokens at the end that are neither matched nor in a merge."""
    size = len(tokens.texts)
    if tokens.types[-1] is TokenType.UNUSED:
        used = {part for left, right in merges for part in (left, right, left + right)}
        used |= {tokens.texts[index] for index in _matched(tokens)}
        while size > 1 and tokens.types[size - 1] is TokenType.UNUSED and tokens.texts[size - 1] not in used:
            size -= 1
    return {text: index for index, text in enumerate(tokens.texts[:size])}


def _ends_of_text(tokens: TokenList, *, add_bos: bool) -> Any:
    """What puts bos before and eos after a text. add_bos: where the file does not say."""
    wanted = {
        "bos": tokens.fields.flag(PREFIX + "add_bos_token", add_bos),
        "eos": tokens.fields.flag(PREFIX + "add_eos_token", False),
    }
    parts: dict[str, list[str]] = {"bos": [], "eos": []}
    special = []
    for role in (role for role, is_wanted in wanted.items() if is_wanted):
        if role not in tokens.named:
            raise tokens.wrong(f"{PREFIX}add_{role}_token", f"it is true, but {PREFIX}{NAMED[role]} is missing")
        text = tokens.texts[tokens.named[role]]
        name = role if set(":$") & set(text) else text  # these have a meaning in a template
        special.append({"id": name, "ids": [tokens.named[role]], "tokens": [text]})
        parts[role] = [name]
    first, second = ([*parts["bos"], text, *parts["eos"]] for text in ("$A", "$B"))
    pair = [f"{part}:0" for part in first] + [f"{part}:1" for part in second]
    return processors.TemplateProcessing(single=pair[: len(first)], pair=pair, special_tokens=special)


def _matched(tokens: TokenList) -> frozenset[int]:
    """The ids of the tokens that are matched in a text as they stand."""
    by_type = {index for index, kind in enumerate(tokens.types) if kind in _MATCHED}
    return marked_by_text(tokens) | by_type


def _as_added(tokens: TokenList, matched: Iterable[int]) -> list[Any]:
    """Matched tokens as the library takes them: special, unless the file calls them a user's."""
    marked = marked_by_text(tokens)
    users = {index for index in matched if tokens.types[index] is TokenType.USER_DEFINED and index not in marked}
    return [AddedToken(tokens.texts[index], normalized=False, special=index not in users) for index in sorted(matched)]


def _chat_template(tokens: TokenList) -> str | None:
    """The template, if there is one, which compiles where Transformers will run it: in a sandbox without our objects.

    Raises:
        ModelLoadError: it is no string, or no Jinja template.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = tokens.fields.string(CHAT_TEMPLATE, None)
    if not template:
        return None
    try:
        _compile_jinja_template(template)
    except Exception as failure:  # of Jinja, and of Python where it is nested too deeply
        reason = f"{type(failure).__name__} in line {getattr(failure, 'lineno', '?')}"
        raise tokens.wrong(CHAT_TEMPLATE, f"it is not a Jinja template ({reason})") from failure
    return template
