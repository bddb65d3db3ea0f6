"""Models of published shapes with random weights, written as GGUF files at the bits that are wanted.

What a step takes depends on shapes and types of weights, not on numbers. Other engines can be given the same file. Its
tensors have the types that llama.cpp's converter chooses, and its tokens are the bytes of UTF-8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from forerun.config import QUANTISATIONS
from forerun.errors import ConfigError
from forerun.models.families.tensor_names import EMBEDDING, HEAD
from forerun.models.loading.folder import GGUF_SUFFIX
from forerun.models.loading.gguf.token_list import NAMED, PREFIX, TOKENS, TYPES, TokenType
from forerun.models.loading.gguf.tokenizer import MODEL, PRE_TOKENIZER


class Shape(NamedTuple):
    """Sizes of a model; `architecture` is llama.cpp's name of it."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    is_tied: bool = True


RANDOM = "random:"
"""What the name of such a model begins with; a key of SHAPES follows."""
SHAPES = {
    "smollm2-135m": Shape("llama", 576, 30, 9, 3, 64, 1536, 49152),
    "llama-200m": Shape("llama", 1024, 16, 16, 4, 64, 2816, 8192, is_tied=False),  # of no published model
    "qwen3-0.6b": Shape("qwen3", 1024, 28, 16, 8, 128, 3072, 151936),
    "llama-1b": Shape("llama", 2048, 16, 32, 8, 64, 8192, 128256),
    "qwen3-4b": Shape("qwen3", 2560, 36, 32, 8, 128, 9728, 151936),
    "llama-8b": Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256, is_tied=False),
}
CONTEXT = 4096
Q4_K_M = "Q4_K_M"
"""A number format of a file alone, a type of llama.cpp's converter: matrices of Q4_K and Q6_K."""
_TYPES = {4: ("Q4_0", "Q6_K"), 8: ("Q8_0", "Q8_0"), 16: ("BF16", "BF16")}
"""Bits of a weight -> type of the matrices, and of the output layer."""
_SCALES = {"Q4_0": (0, 4.6), "Q8_0": (0, 74.0), "Q6_K": (208, 74.0 * 18.5), "Q4_K": (0, 258.3)}
"""Type -> where a block's float16 scale stands, and the standard deviation of a block of random bytes whose scale is
1."""
_MINIMUM = 7.5
"""The minima's scale of Q4_K in units of the other one, with which numbers are 0 in the mean."""
_DEVIATION = 0.02
"""Of a weight."""


@contextmanager
def opened(model: str, number_format: str, say: Callable[[str], None] = lambda _: None) -> Iterator[str]:
    """Yield the name of a model to load: for "random:SHAPE" a GGUF file in a temporary folder, which is deleted with
    the block; any other name as it is.

    Args:
        number_format: dtype, quantization or Q4_K_M, which decides the types of the file's tensors.

    Raises:
        ConfigError: there is no such shape, or the file cannot be written.
    """
    name = model.removeprefix(RANDOM)
    if name == model:
        yield model
        return
    if name not in SHAPES:
        raise ConfigError(f"The model is {model!r}, but the shapes are {', '.join(SHAPES)}. Give {RANDOM} and one.")
    with TemporaryDirectory(prefix="forerun-bench-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / f"{name}-{number_format}{GGUF_SUFFIX}"
        say(f"writing {path.name}")
        try:
            write_random(path, SHAPES[name], number_format)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror or error}. Give another folder by TMPDIR."
            ) from None
        yield str(path)


def write_random(path: Path, shape: Shape, number_format: str) -> None:
    """Write a model with random weights, tensor by tensor, at the bits of a dtype or quantization, or in Q4_K_M.

    Raises:
        OSError: the file cannot be written.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

    generator = np.random.Generator(np.random.SFC64(0))
    is_q4_k_m = number_format == Q4_K_M
    matrix, output = ("Q4_K", "Q6_K") if is_q4_k_m else _TYPES[QUANTISATIONS.get(number_format, (16,))[0]]
    tensors = list(_tensors(shape, matrix, output))
    writer = GGUFWriter(path, shape.architecture)
    try:
        writer.add_file_type(LlamaFileType[f"MOSTLY_{Q4_K_M if is_q4_k_m else matrix}"])
        _add_metadata(writer, shape)
        for name, size, type_name in tensors:
            kind = GGMLQuantizationType[type_name]
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            nbytes = math.prod(size) // block_size * block_bytes
            writer.add_tensor_info(name, size, np.dtype(np.float32), nbytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, size, type_name in tensors:
            sizes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
            writer.write_tensor_data(_drawn(generator, math.prod(size) // sizes[0], sizes[1], type_name))
    finally:
        writer.close()


def _tensors(shape: Shape, matrix: str, output: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield names, shapes in torch's order, and types. matrix, output: types of matrices, and of the output layer."""
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    if output == "Q6_K" and hidden % 256:
        output = "Q8_0"  # as llama.cpp does where blocks of Q6_K do not fit
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if shape.architecture == "qwen3":
        norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    matrices = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (shape.intermediate, hidden),
        "ffn_up": (shape.intermediate, hidden),
        "ffn_down": (hidden, shape.intermediate),
    }
    table = (shape.vocab_size, hidden)
    yield EMBEDDING, table, output if shape.is_tied else matrix
    if not shape.is_tied:
        yield HEAD, table, output
    yield "output_norm.weight", (hidden,), "F32"
    for layer in range(shape.layers):
        for name, width in norms.items():
            yield f"blk.{layer}.{name}.weight", (width,), "F32"
        has_more = matrix == "Q4_K" and _has_more_bits(layer, shape.layers)
        for name, size in matrices.items():
            yield f"blk.{layer}.{name}.weight", size, output if has_more and name in ("attn_v", "ffn_down") else matrix


def _has_more_bits(layer: int, num_layers: int) -> bool:
    """Return whether llama.cpp's converter gives values and down projections of a layer more bits."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _drawn(generator: np.random.Generator, count: int, block_bytes: int, type_name: str) -> NDArray[Any]:
    """Draw so many blocks of a type, [count, bytes]; those of F32 are ones, the weights of norms."""
    if type_name == "F32":
        return np.ones(count, np.float32)
    blocks = generator.integers(0, 256, (count, block_bytes), np.uint8)
    if type_name == "BF16":  # numbers of either sign between 1/64 and 1/32
        numbers = blocks.view(np.uint16)
        numbers &= 0x807F
        numbers |= 0x3C80
        return numbers
    place, deviation = _SCALES[type_name]
    # signs, because codes of 4 bits, -8 to 7, are not 0 in the mean
    scales = np.where(blocks[:, place] & 1, -_DEVIATION / deviation, _DEVIATION / deviation)
    blocks[:, place : place + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    if type_name == "Q4_K":
        blocks[:, 2:4] = (_MINIMUM * scales).astype("<f2")[:, None].view(np.uint8)
    return blocks


def _add_metadata(writer: Any, shape: Shape) -> None:
    counts = {
        "context_length": CONTEXT,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": shape.vocab_size,
    }
    for key, count in counts.items():
        writer.add_uint32(f"{shape.architecture}.{key}", count)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, "".join(letters[-2:]), "</s>"]  # one merge, as there must be one, of bytes that no text has
    fill = [f"[PAD{index}]" for index in range(len(tokens), shape.vocab_size)]
    types = [TokenType.NORMAL] * (len(tokens) - 1) + [TokenType.CONTROL] + [TokenType.UNUSED] * len(fill)
    writer.add_string(MODEL, "gpt2")
    writer.add_string(PRE_TOKENIZER, "gpt-2")
    writer.add_array(TOKENS, tokens + fill)
    writer.add_array(TYPES, [int(each) for each in types])
    writer.add_array(PREFIX + "merges", [" ".join(letters[-2:])])
    writer.add_uint32(PREFIX + NAMED["eos"], tokens.index("</s>"))
