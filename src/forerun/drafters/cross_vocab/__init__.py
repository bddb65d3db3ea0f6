"""A draft model with another tokenizer."""
