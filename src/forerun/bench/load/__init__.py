"""Measurements of many requests at once."""
