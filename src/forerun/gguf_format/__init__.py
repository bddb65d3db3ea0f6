"""The format of llama.cpp's model files, GGUF: metadata, packed tensors, the tokenizer in the metadata."""

from forerun.gguf_format.file import GgufFile
from forerun.gguf_format.tensor import GgufTensor

__all__ = ["GgufFile", "GgufTensor"]
