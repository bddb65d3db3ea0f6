"""The journal of a batch, which counts the answers that are errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.files import journal

_SERVED = b'"response": {"status_code": 200,'
"""In the JSON of an answer that is no error, and of no other: inside a string, its quotes would be escaped."""


class Journal(journal.Journal):
    """Answers to a batch's requests.

    Attributes:
        num_errors: how many of them are errors.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], num_lines: int) -> None:
        self.num_errors = 0
        super().__init__(path, run, num_lines)

    def _keep(self, index: int, place: int, line: bytes) -> None:
        self.num_errors += not self.has(index) and _SERVED not in line
        super()._keep(index, place, line)
