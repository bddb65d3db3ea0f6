"""The metadata of a GGUF file: the model by its configuration, the tokenizer copied from another file or written anew.

Keys are those of the GGUF specification, with the values that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import UnsupportedModelError
from forerun.gguf_format import GgufFile
from forerun.gguf_format.pre_tokenizers import SPLITTINGS
from forerun.gguf_format.token_list import NAMED, PREFIX, TOKENS, TYPES, TokenType
from forerun.gguf_format.tokenizer import CHAT_TEMPLATE, MODEL, PRE_TOKENIZER
from forerun.models.configuration import context_length
from forerun.models.llama import head_shape, llama_refusal
from forerun.vocabulary.tokenizer import backend, tokens_by_id

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Model type of Transformers -> architecture of llama.cpp."""
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_TOKENIZER = "tokenizer."
_CONTRACTIONS = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
)
"""As published tokenizers write them, and as llama.cpp does: the same in ASCII."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the metadata. kind: its type's number; of a list, also that of its elements."""

    value: Any
    kind: tuple[int, ...]


def model_metadata(config: Any, name: str, vocab_size: int) -> tuple[str, dict[str, Value]]:
    """The architecture, and the keys that describe the model.

    Args:
        config: of Transformers. name: of the model, for messages.
        vocab_size: rows of the embedding that is written.

    Raises:
        UnsupportedModelError: it has something that these keys cannot say.
    """
    refusal, rope = llama_refusal(config), config.rope_parameters
    if refusal is None and rope.get("rope_type", "default") not in ("default", "llama3"):
        refusal = f"a rotation scaled by {rope['rope_type']}"
    if refusal is None and config.model_type == "qwen2" and getattr(config, "use_sliding_window", False):
        refusal = "sliding windows in some of its layers"
    if refusal is not None:
        raise UnsupportedModelError(
            f"{name} cannot be written as GGUF here: {refusal}. Convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    architecture = ARCHITECTURES[config.model_type]
    heads, kv_heads, width = head_shape(config)
    counts = {
        "block_count": config.num_hidden_layers,
        "context_length": context_length(config),
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "vocab_size": vocab_size,
    }
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    if window:
        counts["attention.sliding_window"] = window
    numbers = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": rope["rope_theta"]}
    keys = {f"{architecture}.{key}": Value(int(count), (_UINT32,)) for key, count in counts.items()}
    keys |= {f"{architecture}.{key}": Value(float(number), (_FLOAT32,)) for key, number in numbers.items()}
    return architecture, keys


def copied_tokenizer(file: GgufFile) -> dict[str, Value]:
    """All keys of another file's tokenizer, as they are, chat template included.

    Raises:
        UnsupportedModelError: it has none.
    """
    if TOKENS not in file.metadata:
        raise UnsupportedModelError(
            f"{file.path} has no tokenizer in its metadata ({TOKENS}), with which llama.cpp compares the draft's. Give "
            "the target's GGUF file as llama.cpp serves it."
        )
    found = {key: value for key, value in file.metadata.items() if key.startswith(_TOKENIZER)}
    return {key: Value(value, file.kinds[key]) for key, value in found.items() if value != []}


def written_tokenizer(tokenizer: Any, name: str, vocab_size: int, pre: str | None) -> dict[str, Value]:
    """The same for a byte-level byte-pair encoding, from Transformers' tokenizer.

    Args:
        name: of the model, for messages.
        vocab_size: of the model; ids without a token are filled up.
        pre: llama.cpp's name of the rule that cuts texts; None: the one that is the tokenizer's.

    Raises:
        UnsupportedModelError: there is no tokenizer, it is of another kind, or llama.cpp has no such rule.
    """
    contents = {} if tokenizer is None else backend(tokenizer)
    model = contents.get("model", {})
    normalised = contents.get("normalizer") not in (None, {"type": "NFC"})  # which llama.cpp leaves out for Qwen2
    if model.get("type") != "BPE" or model.get("byte_fallback") or normalised:
        raise UnsupportedModelError(
            f"{name} has no byte-level BPE tokenizer, of which alone GGUF metadata is written here. Give --target "
            "FILE.gguf, whose metadata is copied, or use llama.cpp's convert_hf_to_gguf.py."
        )
    by_id, added = tokens_by_id(tokenizer), {each["id"]: each["special"] for each in contents["added_tokens"]}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED, None: TokenType.NORMAL}
    types = [kinds[added.get(i)] if i in by_id else TokenType.UNUSED for i in range(vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    empty = tokenizer("")["input_ids"]
    keys = {
        MODEL: Value("gpt2", (_STRING,)),
        PRE_TOKENIZER: Value(pre or _rule(contents, name), (_STRING,)),
        TOKENS: Value(tokens, (_ARRAY, _STRING)),
        TYPES: Value([int(kind) for kind in types], (_ARRAY, _INT32)),
        PREFIX + "merges": Value(merges, (_ARRAY, _STRING)),
        PREFIX + "add_bos_token": Value(empty[:1] == [tokenizer.bos_token_id] != [None], (_BOOL,)),
    }
    roles = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    for role, index in roles.items():
        if index is not None and index < vocab_size:
            keys[PREFIX + NAMED[role]] = Value(int(index), (_UINT32,))
    if isinstance(tokenizer.chat_template, str):
        keys[CHAT_TEMPLATE] = Value(tokenizer.chat_template, (_STRING,))
    return keys


def _rule(contents: Mapping[str, Any], name: str) -> str:
    """llama.cpp's name of the rule by which a tokenizer cuts texts."""
    ours = _patterns(contents.get("pre_tokenizer"))
    for rule, splitting in SPLITTINGS.items():
        if ours is not None and ours == list(splitting.patterns):
            return rule
    raise UnsupportedModelError(
        f"the tokenizer of {name} cuts texts by a rule that llama.cpp does not have. Give --target FILE.gguf, whose "
        f"metadata is copied, or --pre NAME, one of {', '.join(sorted(SPLITTINGS))}: texts are then cut by that rule, "
        "and prompts of token ids are as they were."
    )


def _patterns(pre_tokenizer: Any) -> list[str] | None:
    """The patterns of splits that a byte-level step follows; None for any other pre-tokenizer."""
    parts = (pre_tokenizer or {}).get("pretokenizers", [])
    splits = [part for part in parts if part["type"] == "Split" and part["behavior"] == "Isolated"]
    if len(splits) + 1 != len(parts) or parts[-1]["type"] != "ByteLevel" or parts[-1].get("use_regex"):
        return None
    return [part["pattern"].get("Regex", "").replace(*_CONTRACTIONS) for part in splits]
