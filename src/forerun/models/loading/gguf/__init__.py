"""GGUF files: header, tensors, configuration and tokenizer."""
