"""Drafters that use what the target computes itself."""
