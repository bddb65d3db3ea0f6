"""`forerun cache`: list and remove fetched models, measured costs, compiled kernels and models of the hub's cache."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.output import print_json, size_text
from forerun.errors import ConfigError, FetchError
from forerun.utils import fetch as store
from forerun.utils.files import leftovers, locked, remove
from forerun.utils.home import (
    BELONGING_STEM,
    COSTS_STEM,
    KERNELS_FOLDER,
    PREFETCHING_STEM,
    SELF_TESTS_STEM,
    TOKENIZERS_FOLDER,
    home,
)

_STEMS = (COSTS_STEM, PREFETCHING_STEM, SELF_TESTS_STEM, BELONGING_STEM)
"""Of files with measured costs, prefetch distances, passed self-tests and drafts that were found, and the names under
which they are listed."""
_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Files on disk.

    Attributes:
        name: by which it is listed and cleared; of a model, what --model takes.
        kind: "fetched", "costs", "prefetching", "self-tests", "belonging", "kernels", "tokenizers" or "hub".
        nbytes: its size on disk, with the remains of interrupted fetches.
        path: where it lies.
        removal: function that removes it.
        whole: False for a model with missing files.
    """

    name: str
    kind: str
    nbytes: int
    path: Path
    removal: Callable[[], None] = field(repr=False, compare=False)
    whole: bool = True


def cache_entries() -> list[CacheEntry]:
    """Return all entries; of the Hugging Face Hub's cache the models that forerun may load."""
    found: dict[str, CacheEntry] = {}
    for entry in (*_fetched(), *_own(), *_hub()):
        found.setdefault(entry.name, entry)
    return list(found.values())


def _entries_named(names: Sequence[str]) -> list[CacheEntry]:
    """Return the entries of these exact names. Raises ConfigError if one does not exist."""
    entries = {entry.name: entry for entry in cache_entries()}
    if missing := [name for name in names if name not in entries]:
        there = f"There is: {', '.join(entries)}." if entries else "Nothing is kept."
        raise ConfigError(f"{missing[0]!r} is not kept on disk. {there} Give exact names.")
    return [entries[name] for name in dict.fromkeys(names)]


def _fetched() -> Iterator[CacheEntry]:
    for name in store.fetchable_names():
        folder = store.folder_of(name)
        if folder is not None and (paths := _present(folder, *leftovers(folder))):
            whole = store.path_of(name) is not None
            yield CacheEntry(name, "fetched", _size(*paths), folder, partial(_remove_model, folder), whole)


def _own() -> Iterator[CacheEntry]:
    """Yield measured costs, passed self-tests, compiled kernels and marks of tokenizers."""
    base = home()
    if base is None:
        return
    own = {stem: _of_every_version(base, stem) for stem in _STEMS}
    own |= {name: _present(base / name) for name in (KERNELS_FOLDER, TOKENIZERS_FOLDER)}
    for name, present in own.items():
        if present:
            yield CacheEntry(name, name, _size(*present), present[-1], partial(_remove, present))


def _of_every_version(base: Path, stem: str) -> list[Path]:
    """Return the files of a stem in the folder, damaged ones too."""
    name = re.compile(rf"{stem}(-\d+)?\.json(\.damaged)?")
    return sorted(path for path in base.glob(f"{stem}*") if name.fullmatch(path.name))


def _hub() -> Iterator[CacheEntry]:
    """Yield models of the hub's cache with safetensors or GGUF weights."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except (CacheNotFound, OSError, ValueError):
        return
    for repository in sorted(cache.repos, key=lambda each: each.repo_id):
        files = [file.file_name for revision in repository.revisions for file in revision.files]
        if repository.repo_type == "model" and any(name.endswith(_WEIGHTS) for name in files):
            path = Path(repository.repo_path)
            alone = replace(cache, repos=frozenset({repository}))  # copies of a repository share its revisions' names
            removal = partial(_remove_from_hub, alone, [each.commit_hash for each in repository.revisions], path)
            yield CacheEntry(repository.repo_id, "hub", repository.size_on_disk, path, removal)


def _remove_model(folder: Path) -> None:
    with locked(folder, FetchError, wait=True):
        for path in (folder, *leftovers(folder)):
            remove(path)
    if os.path.lexists(folder):
        raise _unremovable(folder, "some of its files stay")


def _remove_from_hub(cache: Any, revisions: Sequence[str], path: Path) -> None:
    cache.delete_revisions(*revisions).execute()  # which logs what it cannot remove
    if path.exists():
        raise _unremovable(path, "some of its files stay")


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _unremovable(path: Path, reason: str) -> FetchError:
    return FetchError(f"{path} cannot be removed: {reason}. Make permission there, and close programs that use it.")


def _present(*paths: Path) -> list[Path]:
    return [path for path in paths if os.path.lexists(path)]


def _size(*paths: Path) -> int:
    """Return the bytes of files and of those in folders; unreadable ones count 0."""
    total = 0
    for file in (file for path in paths for file in (path.rglob("*") if path.is_dir() else (path,))):
        with suppress(OSError):
            total += 0 if file.is_dir() else file.lstat().st_size
    return total


app = typer.Typer(help="What forerun keeps on disk: fetched models, measured costs, the hub's models.")
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.callback(invoke_without_command=True)
def list_cache(ctx: typer.Context, json: options.Json = False) -> None:
    """List what lies in FORERUN_HOME, and the models of the Hugging Face Hub's cache that forerun may load."""
    if ctx.invoked_subcommand is not None:
        if json:
            raise ConfigError(f"--json is of the list, not of {ctx.invoked_subcommand}. Leave it out.")
        return
    entries = cache_entries()
    base = home()
    if json:
        facts = {"home": None if base is None else str(base), "entries": [_facts(entry) for entry in entries]}
        print_json(facts | {"bytes": sum(entry.nbytes for entry in entries)})
    else:
        typer.echo("\n".join([f"FORERUN_HOME: {base or 'none'}", *_lines(entries)]))


@app.command()
def clear(
    names: Annotated[list[str], typer.Argument(help="Entries, by their exact names.", metavar="NAME")],
    yes: Yes = False,
    json: options.Json = False,
) -> None:
    """Remove entries, by the names that `forerun cache` lists."""
    entries = _entries_named(names)
    if not yes:
        if json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError("Entries are removed after a confirmation, and this is no terminal. Give --yes.")
        typer.echo("\n".join(_lines(entries)), err=True)
        typer.confirm("Remove this?", abort=True, err=True)
    for entry in entries:
        try:
            entry.removal()
        except OSError as failure:
            raise _unremovable(entry.path, failure.strerror or str(failure)) from None
        if not json:
            typer.echo(f"removed {entry.name}, {size_text(entry.nbytes)}")
    if json:
        print_json({"removed": [_facts(entry) for entry in entries]})


def _lines(entries: Sequence[CacheEntry]) -> list[str]:
    """Format a table: name, kind, size, path."""
    if not entries:
        return ["Nothing is kept."]
    rows = [(entry.name, entry.kind, size_text(entry.nbytes), _path_text(entry)) for entry in entries]
    rows.append(("total", "", size_text(sum(entry.nbytes for entry in entries)), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {path}".rstrip()
        for name, kind, size, path in rows
    ]


def _path_text(entry: CacheEntry) -> str:
    return str(entry.path) if entry.whole else f"{entry.path} (not whole: fetch it again, or clear it)"


def _facts(entry: CacheEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "bytes": entry.nbytes,
        "path": str(entry.path),
        "whole": entry.whole,
    }
