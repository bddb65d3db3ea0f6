"""Trained draft heads: their configuration, their tensors, and the folders that they lie in."""
