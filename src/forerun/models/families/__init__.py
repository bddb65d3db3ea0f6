"""Families of models, each told once: its config.json and its GGUF file side by side, one file for each kin."""
