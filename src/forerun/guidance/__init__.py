"""Grammars followed token by token, by the llguidance package."""

from forerun.guidance.grammars import Grammars

__all__ = ["Grammars"]
