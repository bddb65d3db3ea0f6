"""Data for training: prompts, the target's answers, and both as packed rows of tokens."""
