"""Texts read from files, folders and JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ConfigError
from forerun.utils.json_file import parse_json

TEXT_PATTERNS = (
    *("*.py", "*.pyi", "*.pyx", "*.c", "*.h", "*.cc", "*.cpp", "*.hpp", "*.cs", "*.java", "*.kt", "*.scala", "*.swift"),
    *("*.go", "*.rs", "*.js", "*.jsx", "*.ts", "*.tsx", "*.rb", "*.php", "*.pl", "*.lua", "*.r", "*.jl", "*.sh"),
    *("*.sql", "*.html", "*.css", "*.tex", "*.txt", "*.md", "*.rst", "*.toml", "*.yaml", "*.yml", "*.ini", "*.cfg"),
)
"""The files that are read from a folder unless patterns are given."""
JSON_LINES = ".jsonl"


@dataclass(frozen=True, slots=True)
class TextDocument:
    """One text. No match reaches from one document into the next."""

    name: str
    text: str


def find_files(
    sources: Sequence[Path],
    patterns: Sequence[str] = TEXT_PATTERNS,
    remedy: str = "Give other sources, or --glob.",
) -> list[tuple[Path, bool]]:
    """Return the files that the sources stand for, and whether each was named itself rather than found in a folder.

    Folders are searched through, in the order of their paths; what lies in or is a hidden file is left out.

    Raises:
        ConfigError: a source does not exist, or nothing was found.
    """
    found: dict[Path, bool] = {}
    for source in sources:
        if source.is_dir():
            below = {path for pattern in patterns for path in source.rglob(pattern) if path.is_file()}
            visible = (p for p in below if not any(part.startswith(".") for part in p.relative_to(source).parts))
            for path in sorted(visible, key=lambda path: path.relative_to(source).as_posix()):
                found.setdefault(path, False)
        elif source.is_file():
            found[source] = True
        else:
            raise ConfigError(f"The source {source} does not exist. Give files or folders.")
    if not found:
        raise ConfigError(
            f"Nothing to index: no file in {', '.join(map(str, sources)) or 'no sources'} is called "
            f"{' or '.join(patterns[:4])}{' or ...' if len(patterns) > 4 else ''}. {remedy}"
        )
    return list(found.items())


def read_documents(path: Path, named: bool, field_name: str, skipped: list[Path]) -> Iterator[TextDocument]:
    """Yield the documents of one file: one of a text, one per line of JSON lines.

    Args:
        named: the user named this very file: what is not UTF-8 is then an error, and not skipped.
        field_name: where JSON lines have their text.
        skipped: takes up files of folders that are not UTF-8 text.

    Raises:
        ConfigError: it cannot be read, or a line has no such text.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        if named:
            raise ConfigError(
                f"{path} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}). "
                "Convert it, or leave it out."
            ) from None
        skipped.append(path)
        return
    text = text.replace("\r\n", "\n")
    if path.suffix != JSON_LINES:
        if text:
            yield TextDocument(str(path), text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            entry = _entry(line, field_name, f"{path}, line {number}")
            if entry:
                yield TextDocument(f"{path}:{number}", entry)


def _entry(line: str, field_name: str, where: str) -> str:
    value = parse_json(line, where, ConfigError, remedy="Put the line right, or leave the file out.")
    entry = value.get(field_name) if isinstance(value, dict) else None
    if not isinstance(entry, str):
        keys = [key for key, kept in value.items() if isinstance(kept, str)] if isinstance(value, dict) else []
        there = f"Texts there: {', '.join(keys)}." if keys else "There is no text in it."
        raise ConfigError(
            f"{where} has no text in the field {field_name!r}. {there} Choose one by the key field of the "
            "configuration file."
        )
    return entry
