"""KeyboardInterrupt at the n-th line of forerun that runs, outside of cleaning up."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import forerun

SRC = str(Path(forerun.__file__).parent)
HANDS_OVER = {"__enter__", "__exit__", "_hold"}
"""Functions in which SIGINT itself is switched; likewise Engine.step, whose last lines give outputs to the caller."""


class Hang(BaseException):
    """More lines have run than any of these tests needs."""


@cache
def cleanup_lines(path: str) -> frozenset[int]:
    """Lines of `finally`, and those of `with`, which are run again when it is left."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Try):
            for statement in node.finalbody:
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
        elif isinstance(node, ast.With):
            lines.update(range(node.lineno, node.body[0].lineno))
    return frozenset(lines)


class Interrupts:
    """Counts the lines of forerun that run; at line `at` it raises KeyboardInterrupt, after `limit` of them Hang."""

    def __init__(self, at: int | None = None, limit: int = 10**9) -> None:
        self.at, self.limit = at, limit
        self.count = 0
        self.where: tuple[str, int] | None = None
        self.stream_open = False
        self._old: Any = None

    def __enter__(self) -> Interrupts:
        self._old = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old)

    def _call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(SRC):
            return None
        if code.co_name in HANDS_OVER or (code.co_name == "step" and code.co_filename.endswith("engine.py")):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if event != "line":
            return self._line
        self.count += 1
        if self.count > self.limit:
            raise Hang(f"after {self.where}, in {frame.f_code.co_filename}:{frame.f_lineno}")
        due = self.at is not None and self.count >= self.at and self.where is None
        if due and frame.f_lineno not in cleanup_lines(frame.f_code.co_filename) and not _cleaning(frame):
            self.where = (frame.f_code.co_filename, frame.f_lineno)
            raise KeyboardInterrupt
        return self._line


def _cleaning(frame: FrameType | None) -> bool:
    """Whether the frame was called from a line of cleaning up."""
    frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith((SRC, "<")):
        in_finally = frame.f_lineno in _finally_lines(frame.f_code.co_filename)
        if in_finally:
            return True
        frame = frame.f_back
    return False


@cache
def _finally_lines(path: str) -> frozenset[int]:
    lines: set[int] = set()
    if not path.startswith(SRC):
        return frozenset()
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Try):
            for statement in node.finalbody:
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return frozenset(lines)
