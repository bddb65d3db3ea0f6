"""Tokenizer and chat template from a GGUF file's metadata.

Three kinds: byte-level byte-pair encoding (`tokenizer.ggml.model` = gpt2) and SentencePiece's byte-pair encoding, by
score (= llama) or by merges, with ends of lines apart (= gemma4). Vocabulary and merges are the file's; the ids of a
text are those of llama.cpp's `llama_tokenize(add_special=true, parse_special=true)`. Where that and Transformers'
tokenizers differ:

- Control, unknown and user-defined tokens are matched in the text before anything else, by both. llama.cpp looks for
  the longest first, Transformers from left to right. They differ only where two overlap in the text; here it is
  Transformers'.
- Unused tokens at the end of the list fill the vocabulary up. llama.cpp has them as tokens without a text; here, as in
  Transformers, they are no tokens.
- Splits are those of the models' own tokenizers, where the rule is Transformers': contractions such as 'S also take
  the long s (U+017F), which llama.cpp leaves out. Letters and numbers are those of the Unicode tables of the
  `tokenizers` library, which differ from llama.cpp's in some digits of Unicode 16. As in llama.cpp, no text is
  normalised to NFC for Qwen2.
- `llama_detokenize` can take out spaces before punctuation; decoding here gives the text as it was.
- llama.cpp takes 11 for bos and eos where a gpt2 file names none; here there are none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from forerun.chat.infill import FILL_IN
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.loading.gguf.file import REMEDY
from forerun.models.loading.gguf.token_list import (
    MARKED,
    NAMED,
    PREFIX,
    TOKENS,
    TYPES,
    TokenList,
    TokenType,
    read_token_list,
)
from forerun.utils.foreign_errors import as_load_errors
from forerun.utils.json_file import Fields
from forerun.utils.library_tokenizer import LibraryTokenizer
from forerun.utils.vocabulary import guarded

# Merges of byte-pair encodings: read and checked, or derived from the scores of a SentencePiece vocabulary.

_MERGES = PREFIX + "merges"
_SCORES = PREFIX + "scores"
_MAX_PIECE = 512  # characters of a token whose ways to be merged are looked for; that takes the square of its length


def read_merges(tokens: TokenList) -> list[tuple[str, str]]:
    """Return the merges of the metadata in order; of several merges of the same pair the first counts.

    Raises:
        ModelLoadError: there are none, or one of them does not join two tokens to a third.
    """
    merges: dict[tuple[str, str], None] = {}
    for index, merge in enumerate(tokens.fields.list_of(_MERGES, str)):
        border = merge.find(" ", 1)
        left = merge[:border]
        right = merge[border + 1 :]
        if border < 0 or left not in tokens.ids or right not in tokens.ids or left + right not in tokens.ids:
            raise tokens.wrong(_MERGES, f"merge {index} does not join two tokens of the vocabulary to a third")
        merges[left, right] = None
    return list(merges)


def merges_of_scores(tokens: TokenList, matched: Collection[int] = ()) -> list[tuple[str, str]]:
    """Return the merges equivalent to merging by score: of all neighbours the pair whose token has the highest score.

    SentencePiece merges any two neighbours whose joined text is a token, the leftmost of equal scores. A merge here is
    such a pair, ranked by the score, then by the length of its left part: so of runs of one character, which have equal
    scores in Llama's vocabulary, the leftmost grows first, as it should. Between other tokens of equal scores ranks
    cannot say "leftmost", so they are refused. They cannot say it either where two pairs that make the same token
    overlap (`ab aba ba`, both `ababa`); there the longer left part wins.

    Args:
        matched: tokens that are cut out of a text before, so that none is ever merged. Many have the same score.

    Raises:
        ModelLoadError: there is not one finite score for each token, or tokens that can be merged have the same.
    """
    texts = tokens.texts
    scores = tokens.fields.list_of(_SCORES, float)
    ids = {text: index for text, index in tokens.ids.items() if index not in matched}
    if long := [index for index, text in enumerate(texts) if len(text) > _MAX_PIECE]:
        raise tokens.wrong(TOKENS, f"token {long[0]} is longer than {_MAX_PIECE} characters")
    if len(scores) != len(texts):
        raise tokens.wrong(_SCORES, f"it has {len(scores):,} entries, but there are {len(texts):,} tokens")
    merges = [
        (-score, -border, text[:border], text[border:])
        for text, score in zip(texts, scores, strict=True)
        if text in ids
        for border in range(1, len(text))
        if text[:border] in ids and text[border:] in ids
    ]
    joined = sorted({left + right for _, _, left, right in merges}, key=lambda text: -scores[ids[text]])
    for first, second in pairwise(joined):
        if scores[ids[first]] == scores[ids[second]] and len({*first, *second}) > 1:
            raise tokens.wrong(_SCORES, f"tokens {ids[first]} and {ids[second]} have the same score, so none is first")
    return [(left, right) for _, _, left, right in sorted(merges)]


# Which tokens end an answer, and which are matched in a text.
#
# GGUF names one end of text, and often no end of a turn. llama.cpp therefore searches for the texts of such tokens in
# published models (src/llama-vocab.cpp, `llama_vocab::impl::load`, "special tokens"); these are its lists. It makes any
# token of these texts a control token. Here one must be of that type, or named by the file: to Gemma </s> is HTML, and
# Qwen's tokenizer has it as a word like others. In a file without types the text alone decides.

_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    }
)


def end_tokens(tokens: TokenList) -> frozenset[int]:
    """Return the ids that end an answer: eos, eot and eom of the file, and marked tokens of the texts of _ENDS, or that
    fill in."""
    roles = _found_by_text(tokens) | dict(tokens.named)
    ends = {roles[role] for role in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep") if role in roles}
    ends |= tokens.marked(_ENDS)
    texts = {tokens.texts[index] for index in ends}
    # formats in which these texts end a part of an answer only
    if texts & {"<|call|>", "<|calls|>"} and texts & {"<|return|>", "<|flush|>"}:
        ends.discard(tokens.ids.get("<|end|>", -1))
    if "<|tool_response>" in texts:
        ends.discard(tokens.ids.get("</s>", -1))
    return frozenset(ends)


def _found_by_text(tokens: TokenList) -> dict[str, int]:
    """Return role -> id. If several marked tokens have a text of a role, llama.cpp takes any of them; here it is the
    lowest id."""
    return {role: min(ids) for role, texts in FILL_IN.items() if (ids := tokens.marked(texts))}


# The rules by which text is split before merges apply, by the name in `tokenizer.ggml.pre`: Transformers' own
# (`GGUF_PRE_TOKENIZER_SPLITS`, whose import takes seconds), and, of those that it does not have, llama.cpp's
# (src/llama-vocab.cpp, `llm_tokenizer_bpe`).

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES
_BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + _SPACES
)
_LIKE_LLAMA_3 = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
)
SPLIT_RULES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LIKE_LLAMA_3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_WORDS % "{1,3}",)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), (_WORDS % "",)
    ),
    "qwen35": (
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES,
    ),
    "tekken": (_BY_CASE % ("", "", ""),),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
        (_BY_CASE % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),),
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT_2)),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "a.x-4.0", "gigachat", "olmo", "jais", "trillion"), (_GPT_2,)),
    **dict.fromkeys(("exaone4", "granite-docling"), (_GPT_2,)),
    "minerva-7b": (r"\p{N}", _GPT_2),
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(
        ("hunyuan-dense", "deepseek-v3"),
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            (
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ),
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        (  # letters with case, but for those of some scripts
            r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{0560}-\x{0588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}"
            r"\x{A790}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{1DF2A}]]+"
        ),
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
}
# Rules by which a part that is a token as a whole becomes that token, whatever the merges say, and a text begins with
# bos where the file does not say: Transformers does not note that.
_WHOLE_TOKENS = frozenset((*_LIKE_LLAMA_3, "tekken"))


MODEL = PREFIX + "model"
PRE_TOKENIZER = PREFIX + "pre"
CHAT_TEMPLATE = "tokenizer.chat_template"
CHAT_TEMPLATES = "tokenizer.chat_templates"
"""Names of others, each under a key of its own."""
_SPACE = "\u2581"
_UNSTRIPPED = {"<unk>", "<s>", "<|endoftext|>"}
_BY_MERGES = "gemma4"
_DEFAULT_IDS = {"gpt2": {}, "llama": {"unk": 0, "bos": 1, "eos": 2}, _BY_MERGES: {}}
"""By kind, the named ids where the file gives none."""


def read_tokenizer(metadata: Mapping[str, Any], place: str, read: tuple[TokenList, str] | None = None) -> Any:
    """Return the tokenizer of a file, with its chat template. Its parts are made here, so it needs no trial.

    Args:
        metadata: keys and plain values.
        place: the file, for messages.
        read: what `read_tokens` returns for them, if that has been called.

    Raises:
        ModelLoadError: a key is missing, or its value cannot be; names the key and the reason.
        UnsupportedModelError: the tokenizer is of a kind that is not implemented; names it.
    """
    tokens, kind = read or read_tokens(metadata, place)
    template = _chat_template(tokens)
    matched = _matched(tokens)
    control = _control(tokens)
    with as_load_errors(f"{place}: {TOKENS}: no tokenizer can be made of them", REMEDY):
        backend = _byte_level(tokens) if kind == "gpt2" else _sentencepiece(tokens, by_merges=kind == _BY_MERGES)
        stripped = {each for each in matched if tokens.texts[each] not in _UNSTRIPPED} if _is_phi3(metadata) else ()
        backend.add_tokens(
            [
                AddedToken(tokens.texts[each], normalized=False, special=each in control, rstrip=each in stripped)
                for each in sorted(matched)
            ]
        )
    # named tokens are cut out of texts and left out of decoded ones, which an ordinary word must not be
    named = {
        f"{role}_token": tokens.texts[tokens.named[role]]
        for role in ("bos", "eos", "unk", "pad")
        if tokens.named.get(role) in matched
    }

    def full() -> Any:
        from transformers import PreTrainedTokenizerFast

        made = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
        return guarded(made, place)

    fill_in = {role: index for role, index in tokens.named.items() if role in FILL_IN}
    return guarded(LibraryTokenizer(backend, named, template, full, fill_in), place)


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Return whether spaces behind the tokens that are matched are no text. Only a model's name tells llama.cpp."""
    name = str(metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name


def eos_token_ids(metadata: Mapping[str, Any], place: str, read: tuple[TokenList, str] | None = None) -> frozenset[int]:
    """Return the ids that end an answer, as llama.cpp decides: eos, eot, eom, and end tokens that it finds by their
    text.

    Raises:
        ModelLoadError, UnsupportedModelError: as `read_tokenizer`, of the keys that this reads.
    """
    return end_tokens((read or read_tokens(metadata, place))[0])


def read_tokens(metadata: Mapping[str, Any], place: str) -> tuple[TokenList, str]:
    """Return the token list, and the kind of tokenizer."""
    fields = Fields(place, metadata, ModelLoadError, REMEDY)
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
    """Build byte-level BPE: every byte is written as a character, a space as U+0120."""
    name = tokens.fields.string(PRE_TOKENIZER)
    if (rules := SPLIT_RULES.get(name)) is None:
        raise _unsupported(tokens.fields.place, PRE_TOKENIZER, name, SPLIT_RULES)
    if TokenType.BYTE in tokens.types:
        what = f"token {tokens.types.index(TokenType.BYTE)} is a byte token"
        raise tokens.wrong(TYPES, f"{what}, which a vocabulary of the kind gpt2 does not have")
    merges = read_merges(tokens)
    is_whole = name in _WHOLE_TOKENS
    backend = Tokenizer(models.BPE(vocab=_vocabulary(tokens, merges), merges=merges, ignore_merges=is_whole))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules]
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytewise])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = _ends_of_text(tokens, add_bos=is_whole)
    return backend


def _sentencepiece(tokens: TokenList, *, by_merges: bool) -> Any:
    """Build SentencePiece's BPE: a space is written as U+2581, and a character that is no token as its bytes (<0x0A>).

    by_merges: not by score; ends of lines are not merged with other text.
    """
    if missing := [token for value in range(256) if (token := f"<0x{value:02X}>") not in tokens.ids]:
        raise tokens.wrong(TOKENS, f"the byte token {missing[0]} is missing")
    merges = read_merges(tokens) if by_merges else merges_of_scores(tokens, _matched(tokens))
    backend = Tokenizer(models.BPE(vocab=_vocabulary(tokens, merges), merges=merges, byte_fallback=True))
    if by_merges:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    before = tokens.fields.flag(PREFIX + "add_space_prefix", not by_merges)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if before else [spaces])
    written = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*written, decoders.Strip(" ", 1, 0)] if before else written)
    backend.post_processor = _ends_of_text(tokens, add_bos=True)
    return backend


def _vocabulary(tokens: TokenList, merges: list[tuple[str, str]]) -> dict[str, int]:
    """Return text -> id, without the unused tokens at the end that are neither matched nor in a merge."""
    size = len(tokens.texts)
    if tokens.types[-1] is TokenType.UNUSED:
        used = {tokens.texts[i] for i in _matched(tokens)} | {each for a, b in merges for each in (a, b, a + b)}
        while size > 1 and tokens.types[size - 1] is TokenType.UNUSED and tokens.texts[size - 1] not in used:
            size -= 1
    return {text: index for index, text in enumerate(tokens.texts[:size])}


def _ends_of_text(tokens: TokenList, *, add_bos: bool) -> Any:
    """Build the processor that puts bos before and eos after a text. add_bos: the default if the file does not say."""
    added = {
        "bos": tokens.fields.flag(PREFIX + "add_bos_token", add_bos),
        "eos": tokens.fields.flag(PREFIX + "add_eos_token", False),
    }
    parts = dict[str, list[str]](bos=[], eos=[])
    special = []
    for role in (role for role, is_wanted in added.items() if is_wanted):
        if role not in tokens.named and PREFIX + NAMED[role] in tokens.fields:
            continue  # left out, with a warning
        if role not in tokens.named:
            raise tokens.wrong(f"{PREFIX}add_{role}_token", f"it is true, but {PREFIX}{NAMED[role]} is missing")
        text = tokens.texts[tokens.named[role]]
        name = role if set(":$") & set(text) else text  # these have a meaning in a template
        special.append({"id": name, "ids": [tokens.named[role]], "tokens": [text]})
        parts[role] = [name]
    first, second = ([*parts["bos"], text, *parts["eos"]] for text in ("$A", "$B"))
    pair = [f"{part}:0" for part in first] + [f"{part}:1" for part in second]
    return processors.TemplateProcessing(single=pair[: len(first)], pair=pair, special_tokens=special)


def _control(tokens: TokenList) -> frozenset[int]:
    """Return the ids of control and unknown tokens, and of those that are control tokens because of their text."""
    by_text = {role: index for role, index in _found_by_text(tokens).items() if role not in tokens.named}
    by_type = {index for index, kind in enumerate(tokens.types) if kind in MARKED}
    return frozenset(by_type | {*by_text.values()} | tokens.marked(_ENDS))


def _matched(tokens: TokenList) -> frozenset[int]:
    """Return the ids of the tokens that are matched in a text as they stand."""
    return _control(tokens) | {i for i, kind in enumerate(tokens.types) if kind is TokenType.USER_DEFINED}


def _chat_template(tokens: TokenList) -> str | dict[str, str] | None:
    """Return the chat template, if there is one, or several by their names. Whether they are Jinja is found where they
    are rendered: it concerns chats alone, and may take any time.

    Raises:
        ModelLoadError: one is no string.
    """
    template = tokens.fields.string(CHAT_TEMPLATE, None) or None
    names = tokens.fields.list_of(CHAT_TEMPLATES, str, None) or []
    found = {name: tokens.fields.string(f"{CHAT_TEMPLATE}.{name}", None) for name in names}
    named = {name: text for name, text in found.items() if text}
    if not named:
        return template
    return named if template is None else {"default": template, **named}
