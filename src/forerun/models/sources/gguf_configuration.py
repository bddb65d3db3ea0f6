"""From the metadata of a GGUF file to a Transformers configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.files.json_file import Fields
from forerun.gguf_format import GgufFile
from forerun.gguf_format.header import REMEDY
from forerun.models.foreign_errors import as_load_errors
from forerun.models.sources.gguf_rope import rope_parameters
from forerun.models.sources.gguf_tensors import EMBEDDING, ROPE_FACTORS, is_tied

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FOLDER = "Give the model's Transformers folder or hub id instead."
_LLAMA_CPP = "Serve it with llama.cpp."
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
}
"""Keys that stand for other computations than these architectures', and the values that do not."""


def read_gguf_config(file: GgufFile, eos_ids: Iterable[int]) -> Any:
    """The Transformers configuration of the file's model.

    Args:
        eos_ids: the tokens that end an output.

    Raises:
        ModelLoadError: a key is missing, or its value cannot be.
        UnsupportedModelError: another architecture, or something in it that Transformers' model does not compute.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = Fields(str(file.path), file.metadata, ModelLoadError, REMEDY)
    architecture = _architecture(fields)
    if EMBEDDING not in file.tensors:
        raise ModelLoadError(f"{file.path}: it has no tensor {EMBEDDING}, and so no model. {REMEDY}")
    hidden = fields.integer(f"{architecture}.embedding_length", low=1)
    heads = _same_for_all_layers(fields, f"{architecture}.attention.head_count")
    head_dim = _head_dim(fields, architecture, hidden, heads)
    context = fields.integer(f"{architecture}.context_length", low=1)
    values = {
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": _same_for_all_layers(fields, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": fields.integer(f"{architecture}.block_count", low=1),
        "num_attention_heads": heads,
        "num_key_value_heads": _same_for_all_layers(fields, f"{architecture}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": fields.number(f"{architecture}.attention.layer_norm_rms_epsilon", low=0),
        "rope_parameters": rope_parameters(fields, architecture, file.tensors.get(ROPE_FACTORS), head_dim),
        "tie_word_embeddings": is_tied(file),
        "bos_token_id": fields.integer("tokenizer.ggml.bos_token_id", None, low=0),
        "eos_token_id": sorted(eos_ids) or None,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
    }
    if architecture == "llama":
        values["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    model_type, window = _window(fields, architecture, context)
    with as_load_errors(f"{file.path}: its metadata describes no {architecture} model", REMEDY):
        return CONFIG_MAPPING[model_type].from_dict({**values, **window})


def _architecture(fields: Fields) -> str:
    kind = fields.string("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{fields.place}: it holds no model, but is of the type {kind!r}. Give a model.")
    architecture = fields.string("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{fields.place}: it is of the architecture {architecture!r}, and of GGUF files forerun reads "
            f"{', '.join(ARCHITECTURES)} (Mistral's say llama). {_FOLDER}"
        )
    for key, neutral in _NEUTRAL.items():
        value = fields.values.get(f"{architecture}.{key}")
        if value is not None and value not in neutral:
            raise UnsupportedModelError(
                f"{fields.place}: {architecture}.{key} is {value!r:.60}, which Transformers' {architecture} does not "
                f"compute. {_FOLDER}"
            )
    return architecture


def _same_for_all_layers(fields: Fields, key: str, default: int | None = None) -> int:
    """A count that files may give once or for every layer."""
    if isinstance(fields.values.get(key), list):
        each = set(fields.list_of(key, int))
        if len(each) != 1 or min(each) < 1:
            raise UnsupportedModelError(
                f"{fields.place}: {key} differs from layer to layer, which Transformers' models have not. {_LLAMA_CPP}"
            )
        return each.pop()
    if default is not None:
        return fields.integer(key, default, low=1)
    return fields.integer(key, low=1)


def _head_dim(fields: Fields, architecture: str, hidden: int, heads: int) -> int:
    """Width of a head; keys and values must be as wide, and rotated as a whole."""
    stated = fields.integer(f"{architecture}.attention.key_length", None, low=2)
    if stated is None and hidden % heads:
        raise fields.wrong(f"{architecture}.embedding_length", f"a multiple of the {heads} heads")
    width = hidden // heads if stated is None else stated
    for key in ("attention.value_length", "rope.dimension_count"):
        other = fields.integer(f"{architecture}.{key}", width)
        if other != width or width % 2:
            raise UnsupportedModelError(
                f"{fields.place}: {architecture}.{key} is {other} and the heads are {width} wide; forerun reads models "
                f"in which both are the same even number. {_LLAMA_CPP}"
            )
    return width


def _vocab_size(file: GgufFile) -> int:
    """By the list of tokens; without one, by the embedding."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else file.tensors[EMBEDDING].shape[0]


def _window(fields: Fields, architecture: str, context: int) -> tuple[str, dict[str, Any]]:
    """The model type, and what it needs to know of a sliding window. Of Mistral's it is that of all layers."""
    window = fields.integer(f"{architecture}.attention.sliding_window", 0, low=0)
    if window == 0 or window >= context:
        return architecture, {}
    if architecture != "llama" or f"{architecture}.attention.sliding_window_pattern" in fields:
        raise UnsupportedModelError(
            f"{fields.place}: it has a sliding window of {window} positions, and does not say of which layers. {_FOLDER}"
        )
    return "mistral", {"sliding_window": window}
