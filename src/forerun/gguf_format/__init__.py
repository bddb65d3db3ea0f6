"""GGUF files: one file with metadata, tokenizer and packed tensors, as llama.cpp writes them."""
