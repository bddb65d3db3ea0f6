"""Drafters that run a smaller model."""
