"""Export of a model as a GGUF file for llama.cpp: a draft with its target's tokenizer metadata, or a target.

llama.cpp compares the vocabularies of target and draft by that metadata, and computes the whole output layer.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from forerun.errors import ConfigError, IncompatibleDrafterError, UnsupportedModelError
from forerun.export.files import DRAFT_TOKENS, Exported, check_disk_space, check_draft, check_output
from forerun.models import find_tokenizer, load_transformers_model
from forerun.models.decoders import llama_refusal
from forerun.models.families.build import head_shape
from forerun.models.families.table import ARCHITECTURES, spec_of
from forerun.models.families.tensor_names import EMBEDDING, HEAD, layer_tensors, outer_tensors
from forerun.models.loading.configuration import context_length
from forerun.models.loading.folder import GGUF_SUFFIX
from forerun.models.loading.gguf.configuration import ROPE_FACTORS, llama3_factors
from forerun.models.loading.gguf.file import GgufFile
from forerun.models.loading.gguf.source import GgufSource
from forerun.models.loading.gguf.token_list import NAMED, PREFIX, TOKENS, TYPES, TokenType
from forerun.models.loading.gguf.tokenizer import CHAT_TEMPLATE, CHAT_TEMPLATES, MODEL, PRE_TOKENIZER, SPLIT_RULES
from forerun.models.loading.source import find_source
from forerun.utils.files import atomic_file, refuse_to_overwrite
from forerun.utils.vocabulary import backend, tokens_by_id

# Metadata keys are those of the GGUF specification, with the values that llama.cpp's converter writes.

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Model type of Transformers -> architecture of llama.cpp."""
_UINT32 = 4
_INT32 = 5
_FLOAT32 = 6
_BOOL = 7
_STRING = 8
_ARRAY = 9
_TOKENIZER = "tokenizer."


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value. kind: number of its type; for a list, also that of its elements."""

    value: Any
    kind: tuple[int, ...]


def model_metadata(config: Any, name: str, vocab_size: int) -> tuple[str, dict[str, Value]]:
    """Return the architecture and the keys that describe the model.

    Args:
        config: of Transformers. name: of the model, for messages.
        vocab_size: rows of the embedding that is written.

    Raises:
        UnsupportedModelError: these keys cannot describe the model.
    """
    refusal = llama_refusal(config)
    rope = config.rope_parameters
    if refusal is None and rope.get("rope_type", "default") not in ("default", "llama3"):
        refusal = f"a rotation scaled by {rope['rope_type']}"
    if refusal is None and config.model_type == "qwen2" and getattr(config, "use_sliding_window", False):
        refusal = "sliding windows in some of its layers"
    if refusal is not None:
        raise UnsupportedModelError(
            f"{name} cannot be written as GGUF here: {refusal}. Convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    architecture = _ARCHITECTURES[config.model_type]
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
    """Return all tokenizer keys of another file unchanged, chat template included.

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
    """Return the tokenizer keys of a byte-level BPE tokenizer of Transformers.

    Args:
        name: of the model, for messages.
        vocab_size: of the model; ids without a token get a placeholder.
        pre: llama.cpp's name of the pre-tokenizer; None: that of the tokenizer.

    Raises:
        UnsupportedModelError: there is no tokenizer, it is of another kind, or llama.cpp lacks its pre-tokenizer.
    """
    contents = {} if tokenizer is None else backend(tokenizer)
    model = contents.get("model", {})
    normalised = contents.get("normalizer") not in (None, {"type": "NFC"})  # which llama.cpp leaves out for Qwen2
    if model.get("type") != "BPE" or model.get("byte_fallback") or normalised:
        raise UnsupportedModelError(
            f"{name} has no byte-level BPE tokenizer, and GGUF metadata is written for no other kind. Give --target "
            "FILE.gguf, whose metadata is copied, or use llama.cpp's convert_hf_to_gguf.py."
        )
    by_id = tokens_by_id(tokenizer)
    added = {each["id"]: each["special"] for each in contents["added_tokens"]}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED, None: TokenType.NORMAL}
    types = [kinds[added.get(i)] if i in by_id else TokenType.UNUSED for i in range(vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    empty = tokenizer("")["input_ids"]
    keys = {
        MODEL: Value("gpt2", (_STRING,)),
        PRE_TOKENIZER: Value(pre or _pre_tokenizer_name(contents, name), (_STRING,)),
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
    templates = tokenizer.chat_template or {}
    named = {"default": templates} if isinstance(templates, str) else {**templates}
    if default := named.pop("default", None):
        keys[CHAT_TEMPLATE] = Value(default, (_STRING,))
    if named:
        keys[CHAT_TEMPLATES] = Value([*named], (_ARRAY, _STRING))
        keys |= {f"{CHAT_TEMPLATE}.{name}": Value(text, (_STRING,)) for name, text in named.items()}
    return keys


def _pre_tokenizer_name(contents: Mapping[str, Any], name: str) -> str:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer."""
    ours = _patterns(contents.get("pre_tokenizer"))
    converters = "llama-bpe"
    rules = [rule for rule, patterns in SPLIT_RULES.items() if patterns == ours]
    if rules:
        return converters if converters in rules else rules[0]
    raise UnsupportedModelError(
        f"the tokenizer of {name} splits texts by a rule that llama.cpp does not have. Give --target FILE.gguf, whose "
        f"metadata is copied, or the key pre in the configuration file, one of {', '.join(sorted(SPLIT_RULES))}: "
        "texts are then split by that rule; prompts of token ids are unaffected."
    )


def _patterns(pre_tokenizer: Any) -> tuple[str, ...] | None:
    """Return the patterns of the splits before a byte-level step; None for any other pre-tokenizer."""
    parts = (pre_tokenizer or {}).get("pretokenizers", [])
    splits = [part for part in parts if part["type"] == "Split" and part["behavior"] == "Isolated"]
    if len(splits) + 1 != len(parts) or parts[-1]["type"] != "ByteLevel" or parts[-1].get("use_regex"):
        return None
    return tuple(part["pattern"].get("Regex", "") for part in splits)


GGUF_TYPES = {"F16": 1, "Q8_0": 7, "F32": 0}
"""Type of the matrices -> `general.file_type`."""
_Q8_WIDTH = 32
_F16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class ExportedGguf:
    """An exported file.

    Attributes:
        file: its size.
        command: starts llama.cpp's server with it.
    """

    file: Exported
    command: str


def export_llama_cpp(
    model: str | Path,
    out: Path,
    target: str | Path | None = None,
    *,
    type_name: str = "F16",
    pre: str | None = None,
    num_draft_tokens: int | None = None,
    force: bool = False,
) -> ExportedGguf:
    """Write a model of the Llama family as a GGUF file. It appears whole or not at all.

    Args:
        model: as `load_model` takes it.
        target: the GGUF file of the target that it drafts for, whose tokenizer's metadata is copied; None: it is a
            target itself, and its own tokenizer is written.
        type_name: of matrices: "F16", "F32", or or "Q8_0"; F16 instead of Q8_0 if the width is no multiple of 32.
            Vectors are F32, and so are matrices with values beyond F16.
        pre: as of `written_tokenizer`; only without `target`.
        num_draft_tokens: K of the command; None: `DRAFT_TOKENS`.
        force: replace the file.

    Raises:
        ConfigError: `out` exists, cannot be written, or lacks the suffix .gguf; the disk is full; unknown type.
        ModelLoadError: a model cannot be read.
        UnsupportedModelError: the model is of another family, the target has no tokenizer in its metadata, or the
            model's own cannot be written.
        IncompatibleDrafterError: it proposes a part of its vocabulary only, or the target's tokens are others.
    """
    _check(out, type_name, target, pre, force)
    tokenizer, vocab_size = _tokenizer(model, target, pre)
    loaded = load_transformers_model(model, "float32")
    architecture, keys = model_metadata(loaded.config, str(model), vocab_size)
    described = {
        "general.name": Value(Path(model).name, (_STRING,)),
        "general.file_type": Value(GGUF_TYPES[type_name], (_UINT32,)),
    }
    tensors = dict(_tensors(loaded, architecture, vocab_size, type_name))
    check_disk_space(out, sum(packed.nbytes for _, packed in tensors.values()))
    _write(out, architecture, {**described, **keys, **tokenizer}, tensors)
    GgufFile.open(out)  # verifies offsets and counts
    count = sum(parameter.numel() for parameter in loaded.parameters())
    exported = Exported(count, type_name, out.stat().st_size, (out.name,))
    return ExportedGguf(exported, _command(out, target, num_draft_tokens or DRAFT_TOKENS))


def _check(out: Path, type_name: str, target: str | Path | None, pre: str | None, force: bool) -> None:
    if type_name not in GGUF_TYPES:
        raise ConfigError(f"type is {type_name!r}, but must be one of {', '.join(GGUF_TYPES)}.")
    if pre is not None and target is not None:
        raise ConfigError("pre is given with a target, whose tokenizer's metadata is copied as it is. Leave one out.")
    if pre is not None and pre not in SPLIT_RULES:
        raise ConfigError(f"pre is {pre!r}, but must be one of {', '.join(sorted(SPLIT_RULES))}.")
    if out.suffix.lower() != GGUF_SUFFIX:
        raise ConfigError(f"{out} must end with {GGUF_SUFFIX}, the suffix of GGUF files.")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder. Give the name of a file.")
    if not force:
        refuse_to_overwrite(out, ConfigError)
    check_output(out.parent, force=True)


def _tokenizer(model: str | Path, target: str | Path | None, pre: str | None) -> tuple[dict[str, Value], int]:
    """Return the tokenizer's metadata and its number of tokens, which is the number of rows that are written."""
    if target is None:
        source = find_source(model)
        if source.output_tokens(source.config()) is not None:
            raise UnsupportedModelError(f"{model} proposes a part of its vocabulary, and no GGUF file can say so.")
        vocab_size = source.config().vocab_size
        return written_tokenizer(find_tokenizer(model), str(model), vocab_size, pre), vocab_size
    file = _target_file(target)
    tokenizer = copied_tokenizer(file)
    vocab_size = len(file.metadata[TOKENS])
    ours, _ = check_draft(model, target, "llama.cpp")
    if ours.size < vocab_size:
        raise IncompatibleDrafterError(
            f"{model} has {ours.size} rows of logits, and {target} lists {vocab_size} tokens, of which llama.cpp "
            "asks for as many rows. Choose a draft model with the target's whole vocabulary."
        )
    return tokenizer, vocab_size


def _target_file(target: str | Path) -> GgufFile:
    source = find_source(target)
    if not isinstance(source, GgufSource):
        raise ConfigError(
            f"target is {str(target)!r}, which is no GGUF file with tokenizer metadata. Give the "
            "file that llama.cpp serves; forerun export llama.cpp MODEL OUT.gguf writes one."
        )
    return source.file


def _tensors(
    model: Any, architecture: str, vocab_size: int, type_name: str
) -> Iterator[tuple[str, tuple[str, npt.NDArray[Any]]]]:
    """Yield GGUF's name of each tensor, its type, and its packed rows; queries and keys in llama.cpp's order."""
    config = model.config
    heads, kv_heads, width = head_shape(config)
    permuted = {"q_proj": heads, "k_proj": kv_heads} if ARCHITECTURES[architecture].is_permuted else {}
    spec = spec_of(config)
    own = ARCHITECTURES[architecture].tensors
    tensors = {**outer_tensors(spec, own), **layer_tensors(spec, own)}
    names = {parameter: theirs for theirs, (parameter, _) in tensors.items()}
    for name, rows in model.state_dict().items():
        (layer,) = re.findall(r"\.(\d+)\.", name) or ["0"]
        theirs = names[name.replace(f".{layer}.", ".0.")].replace("blk.0.", f"blk.{layer}.")
        if theirs == HEAD and config.tie_word_embeddings:
            continue
        if theirs in (EMBEDDING, HEAD):
            rows = rows[:vocab_size]
        if (count := permuted.get(name.split(".")[-2])) is not None:
            rows = rows.reshape(count, 2, width // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        yield theirs, _packed(rows, type_name)
    rope = dict(config.rope_parameters)
    if rope.get("rope_type") == "llama3":
        yield ROPE_FACTORS, _packed(llama3_factors(rope, rope.pop("rope_theta"), width), "F32")


def _packed(tensor: Tensor, type_name: str) -> tuple[str, npt.NDArray[Any]]:
    """Return the type of a tensor and its rows packed in that type."""
    numbers = tensor.float().contiguous().numpy()
    if type_name == "F32" or tensor.dim() == 1:
        return "F32", numbers
    if type_name == "Q8_0" and tensor.shape[-1] % _Q8_WIDTH == 0:
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        return "Q8_0", quantize(numbers, GGMLQuantizationType.Q8_0)
    if float(np.abs(numbers).max()) > _F16_MAX:
        return "F32", numbers
    return "F16", numbers.astype(np.float16)


def _write(
    out: Path, architecture: str, keys: dict[str, Value], tensors: dict[str, tuple[str, npt.NDArray[Any]]]
) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    with atomic_file(out, ConfigError) as file:
        writer = GGUFWriter(file.name, architecture)
        for key, value in keys.items():
            kind, *elements = (GGUFValueType(number) for number in value.kind)
            writer.add_key_value(key, value.value, kind, *elements)
        for name, (type_name, packed) in tensors.items():
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType[type_name])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _command(out: Path, target: str | Path | None, num_draft_tokens: int) -> str:
    """Return the command of llama.cpp's server; `-md` alone would load a draft without using it."""
    if target is None:
        return f"llama-server -m {shlex.quote(str(out))}"
    file = shlex.quote(str(_target_file(target).path))
    return (
        f"llama-server -m {file} -md {shlex.quote(str(out))} --spec-type draft-simple "
        f"--spec-draft-n-max {num_draft_tokens}"
    )
