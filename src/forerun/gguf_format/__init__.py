"""The format of llama.cpp's model files, GGUF: metadata, packed tensors, the tokenizer in the metadata."""

from forerun.gguf_format.file import GgufFile
from forerun.gguf_format.quantised import code_form, from_gguf
from forerun.gguf_format.tensor import GgufTensor
from forerun.gguf_format.tokenizer import eos_token_ids, read_tokenizer

__all__ = ["GgufFile", "GgufTensor", "code_form", "eos_token_ids", "from_gguf", "read_tokenizer"]
