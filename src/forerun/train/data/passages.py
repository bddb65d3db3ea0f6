"""Passages of text and source for prompts: paragraphs of prose, and functions of code."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ConfigError
from forerun.train.corpus import hash_fraction, read_python_files, split, standard_library_root
from forerun.utils.text_files import find_files, read_documents

PROSE_WORDS = (30, 220)
CODE_LINES = (4, 40)
MAX_LINE = 120
ENOUGH = 4_000
"""Passages of one kind after which no more files are read."""
_PYTHON = (".py", ".pyi")
_PROSE = (".txt", ".md", ".rst", ".tex", ".jsonl")
_PARAGRAPHS = re.compile(r"\n\s*\n")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text.

    Attributes:
        text: 30 to 220 words, or 4 to 40 lines of code.
        language: of code, such as "python"; empty for prose.
        question: the prompt that it answers; empty if there was none.
    """

    text: str
    language: str = ""
    question: str = ""


def read_passages(sources: list[Path]) -> tuple[list[Passage], list[Passage]]:
    """Read (prose, code) of files and folders in the order of a hash; without any, of the standard library's files.

    Of the standard library, nothing is taken of the files that are held out.

    Raises:
        ConfigError: a source does not exist or cannot be read, or nothing is usable.
    """
    if sources:
        files = find_files(sources, remedy="Give files or folders of text or source.")
        texts: Iterable[tuple[str, str]] = (
            (path.name, document.text)
            for path, named in sorted(files, key=lambda each: hash_fraction(each[0].name))
            for document in read_documents(path, named, "text", [])
        )
    else:
        training, _ = split(read_python_files(standard_library_root()))
        texts = ((file.name, file.text) for file in sorted(training, key=lambda each: hash_fraction(each.name)))
    prose: list[Passage] = []
    code: list[Passage] = []
    for name, text in texts:
        suffix = Path(name).suffix
        if suffix in _PYTHON:
            nodes = _parsed(text)
            prose += (Passage(piece) for docstring in _docstrings(nodes) for piece in prose_pieces(docstring))
            code += (Passage(piece, "python") for piece in _functions(text, nodes))
        elif suffix in _PROSE or not suffix:
            prose += (Passage(piece) for piece in prose_pieces(text))
        else:
            code += (Passage(piece, suffix.removeprefix(".")) for piece in _blocks(text))
        if max(len(prose), len(code)) >= ENOUGH:
            break
    if not prose and not code:
        named = ", ".join(map(str, sources)) or "the standard library"
        raise ConfigError(f"{named} holds no passage of {PROSE_WORDS[0]} words and no function. Give more text.")
    return prose, code


def prose_pieces(text: str) -> Iterator[str]:
    """Join whole paragraphs, as many as a passage holds; those that are too long or no sentences are left out."""
    held: list[str] = []
    count = 0
    for paragraph in [*(each.strip() for each in _PARAGRAPHS.split(text)), ""]:
        words = len(paragraph.split())
        if held and (not paragraph or count + words > PROSE_WORDS[1]):
            if count >= PROSE_WORDS[0]:
                yield "\n\n".join(held)
            held = []
            count = 0
        if paragraph and words <= PROSE_WORDS[1] and _is_prose(paragraph):
            held.append(" ".join(paragraph.split()))
            count += words


def _is_prose(paragraph: str) -> bool:
    """Return whether a paragraph is mostly letters, with an end of a sentence."""
    letters = sum(char.isalpha() or char.isspace() for char in paragraph)
    return letters > 0.85 * len(paragraph) and any(mark in paragraph for mark in ".!?") and ">>>" not in paragraph


def _parsed(text: str) -> list[ast.AST]:
    """Parse Python source into its nodes; none if it is not valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that the source should not have
            return list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return []


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


def _functions(text: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Cut out the source of functions and small classes, unindented."""
    lines = text.split("\n")
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.end_lineno is not None:
            piece = [line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno]]
            if _is_block(piece):
                yield "\n".join(piece)


def _blocks(text: str) -> Iterator[str]:
    """Split code of other languages at blank lines into blocks of a passage's length."""
    for block in re.split(r"\n\s*\n(?=\S)", text):
        lines = block.rstrip().split("\n")
        if _is_block(lines):
            yield "\n".join(lines)


def _is_block(lines: list[str]) -> bool:
    return CODE_LINES[0] <= len(lines) <= CODE_LINES[1] and max(map(len, lines)) <= MAX_LINE
