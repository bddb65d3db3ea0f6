"""`forerun cache`: what forerun keeps on disk, and its removal by name."""

from __future__ import annotations

import os
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
from forerun.utils.home import COSTS_FILE, KERNELS_FOLDER, home

# What lies on disk for a user: fetched models, measured costs, compiled kernels, models in the hub's cache.

COSTS = "costs"
"""The name under which the measured costs are listed."""
KERNELS = "kernels"
"""The name under which the compiled kernels are listed."""
_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Something that lies on disk.

    Attributes:
        name: by which it is listed and cleared; of a model, what --model takes.
        kind: "fetched", "costs", "kernels" or "hub".
        nbytes: its size on disk, what broken-off fetches have left included.
        path: where it lies.
        removal: removes it.
        whole: False for a model that is not all there.
    """

    name: str
    kind: str
    nbytes: int
    path: Path
    removal: Callable[[], None] = field(repr=False, compare=False)
    whole: bool = True


def kept() -> list[CacheEntry]:
    """All that is there, with sizes; of the Hugging Face Hub's cache the models that forerun may load."""
    found: dict[str, CacheEntry] = {}
    for entry in (*_fetched(), *_own(), *_hub()):
        found.setdefault(entry.name, entry)
    return list(found.values())


def find(names: Iterable[str]) -> list[CacheEntry]:
    """The entries of these exact names. Raises ConfigError where one is not there."""
    entries = {entry.name: entry for entry in kept()}
    wanted = list(dict.fromkeys(names))
    if missing := [name for name in wanted if name not in entries]:
        there = f"There is: {', '.join(entries)}." if entries else "Nothing is kept."
        raise ConfigError(f"{missing[0]!r} is not kept on disk. {there} Give exact names.")
    return [entries[name] for name in wanted]


def remove_entry(entry: CacheEntry) -> None:
    """Remove what the entry stands for. Raises FetchError where that cannot be done."""
    try:
        entry.removal()
    except OSError as failure:
        raise _unremovable(entry.path, failure.strerror or str(failure)) from None


def _fetched() -> Iterator[CacheEntry]:
    for name in store.names():
        folder = store.folder_of(name)
        if folder is not None and (paths := _there(folder, *leftovers(folder))):
            whole = store.path_of(name) is not None
            yield CacheEntry(name, "fetched", _size(*paths), folder, partial(_remove_model, folder), whole)


def _own() -> Iterator[CacheEntry]:
    """Measured costs and compiled kernels."""
    base = home()
    if base is None:
        return
    costs, kernels = base / COSTS_FILE, base / KERNELS_FOLDER
    for name, paths in {COSTS: (costs, costs.with_name(costs.name + ".damaged")), KERNELS: (kernels,)}.items():
        if there := _there(*paths):
            yield CacheEntry(name, name, _size(*there), paths[0], partial(_remove, there))


def _hub() -> Iterator[CacheEntry]:
    """Models of the hub's cache with safetensors or GGUF weights."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except (CacheNotFound, OSError, ValueError):
        return
    for repository in sorted(cache.repos, key=lambda each: each.repo_id):
        files = [file.file_name for revision in repository.revisions for file in revision.files]
        if repository.repo_type == "model" and any(name.endswith(_WEIGHTS) for name in files):
            place = Path(repository.repo_path)
            alone = replace(cache, repos=frozenset({repository}))  # copies of a repository share its revisions' names
            removal = partial(_remove_from_hub, alone, [each.commit_hash for each in repository.revisions], place)
            yield CacheEntry(repository.repo_id, "hub", repository.size_on_disk, place, removal)


def _remove_model(folder: Path) -> None:
    with locked(folder, FetchError, wait=True):
        for path in (folder, *leftovers(folder)):
            remove(path)
    if os.path.lexists(folder):
        raise _unremovable(folder, "some of its files stay")


def _remove_from_hub(cache: Any, revisions: Sequence[str], place: Path) -> None:
    cache.delete_revisions(*revisions).execute()  # which logs what it cannot remove
    if place.exists():
        raise _unremovable(place, "some of its files stay")


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _unremovable(path: Path, reason: str) -> FetchError:
    return FetchError(f"{path} cannot be removed: {reason}. Make permission there, and close programs that use it.")


def _there(*paths: Path) -> list[Path]:
    return [path for path in paths if os.path.lexists(path)]


def _size(*paths: Path) -> int:
    """Bytes of the files and of those in the folders; what cannot be read counts nothing."""
    total = 0
    for file in (file for path in paths for file in (path.rglob("*") if path.is_dir() else (path,))):
        with suppress(OSError):
            total += 0 if file.is_dir() else file.lstat().st_size
    return total


app = typer.Typer(help="What forerun keeps on disk: fetched models, measured costs, the hub's models.")
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.callback(invoke_without_command=True)
def show(ctx: typer.Context, json: options.Json = False) -> None:
    """List what lies in FORERUN_HOME, and the models of the Hugging Face Hub's cache that forerun may load."""
    if ctx.invoked_subcommand is not None:
        if json:
            raise ConfigError(f"--json is of the list, not of {ctx.invoked_subcommand}. Leave it out.")
        return
    entries, base = kept(), home()
    if json:
        facts = {"home": None if base is None else str(base), "entries": [_facts(entry) for entry in entries]}
        print_json(facts | {"bytes": sum(entry.nbytes for entry in entries)})
        return
    typer.echo(f"FORERUN_HOME: {base or 'none'}")
    for line in _lines(entries):
        typer.echo(line)


@app.command()
def clear(
    names: Annotated[list[str], typer.Argument(help="Entries, by their exact names.", metavar="NAME")],
    yes: Yes = False,
    json: options.Json = False,
) -> None:
    """Remove entries, by the names that `forerun cache` lists."""
    entries = find(names)
    if not yes:
        if json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError("Nothing is removed without being asked, and there is nobody to ask. Give --yes.")
        for line in _lines(entries):
            typer.echo(line, err=True)
        typer.confirm("Remove this?", abort=True, err=True)
    for entry in entries:
        remove_entry(entry)
        if not json:
            typer.echo(f"removed {entry.name}, {size_text(entry.nbytes)}")
    if json:
        print_json({"removed": [_facts(entry) for entry in entries]})


def _lines(entries: Sequence[CacheEntry]) -> list[str]:
    """A table: name, kind, size, place."""
    if not entries:
        return ["Nothing is kept."]
    rows = [(entry.name, entry.kind, size_text(entry.nbytes), _place(entry)) for entry in entries]
    rows.append(("total", "", size_text(sum(entry.nbytes for entry in entries)), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {place}".rstrip()
        for name, kind, size, place in rows
    ]


def _place(entry: CacheEntry) -> str:
    return str(entry.path) if entry.whole else f"{entry.path} (not whole: fetch it again, or clear it)"


def _facts(entry: CacheEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "bytes": entry.nbytes,
        "path": str(entry.path),
        "whole": entry.whole,
    }
