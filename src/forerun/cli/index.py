"""`forerun index build`, `append`, `info`: corpora of the drafter `rest`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import with_flags
from forerun.cli.options import Json, chosen_model
from forerun.cli.output import print_json
from forerun.config import INDEX_DEPTH
from forerun.errors import ConfigError
from forerun.utils.files import refuse_to_overwrite

if TYPE_CHECKING:
    from forerun.drafters.lookup.rest.index_file import IndexHeader
    from forerun.utils.text_files import TextDocument

app = typer.Typer(help="Corpora on disk for the drafter 'rest'.", no_args_is_help=True)

Out = Annotated[Path, typer.Argument(help="Index file to write.", metavar="OUT")]
Existing = Annotated[Path, typer.Argument(help="Index file.", metavar="INDEX")]
Sources = Annotated[
    list[Path] | None, typer.Argument(help="Text files, JSON lines (*.jsonl), or folders.", metavar="SOURCES")
]
Glob = Annotated[
    list[str] | None,
    typer.Option(
        help="Files to take from folders. Repeatable.", show_default="source code and text", metavar="PATTERN"
    ),
]
Field = Annotated[str, typer.Option(help="Where JSON lines have their text.", metavar="NAME", hidden=True)]
Depth = Annotated[
    int,
    typer.Option(
        min=2, help="Tokens to sort by: what is matched and what follows, together.", metavar="INT", hidden=True
    ),
]
StandardLibrary = Annotated[
    bool,
    typer.Option(
        "--standard-library",
        help="Index the interpreter's standard library, without generated files and those held out for evaluation, in "
        "the order of a hash of their names. Takes no sources.",
    ),
]


@app.command()
@with_flags
def build(
    *,
    out: Out,
    sources: Sources = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="The target whose tokens these shall be: 'smollm2', 'bundled', a folder, a GGUF file, or a hub id.",
            metavar="MODEL",
            show_default="smollm2 if it is fetched, else bundled",
        ),
    ] = None,
    glob: Glob = None,
    field: Field = "text",
    depth: Depth = INDEX_DEPTH,
    compact: Annotated[
        bool,
        typer.Option(
            "--compact",
            help="Leave out what can be sorted again at each opening: the file is a third as large or, with tokens of "
            "four bytes, a half. Sorting takes about a second for a million tokens.",
        ),
    ] = False,
    standard_library: StandardLibrary = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what OUT is now.")] = False,
) -> None:
    """Index files, folders and JSON lines."""
    from forerun.drafters.lookup.rest.build import build_index, tokenise
    from forerun.models import load_tokenizer
    from forerun.utils.vocabulary import fingerprint

    if not force:
        refuse_to_overwrite(out, ConfigError)
    tokenizer = chosen_model(tokenizer, "--tokenizer")
    loaded = load_tokenizer(tokenizer)
    with _Reading(sources, glob, field, standard_library) as reading:
        header = build_index(
            out,
            tokenise(reading.documents(), loaded),
            len(loaded),
            tokenizer=tokenizer,
            fingerprint=fingerprint(loaded),
            depth=depth,
            compact=compact,
            force=force,
            tick=reading.tick,
        )
    _report(out, header, reading)


@app.command()
@with_flags
def append(
    *,
    index: Existing,
    sources: Sources = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Where the tokenizer is now.", metavar="MODEL", show_default="where it was at the build"),
    ] = None,
    glob: Glob = None,
    field: Field = "text",
) -> None:
    """Add to an index; the result is that of building from all at once."""
    from forerun.drafters.lookup.rest.build import append_index, tokenise
    from forerun.drafters.lookup.rest.index_file import read_index_header
    from forerun.models import load_tokenizer
    from forerun.utils.vocabulary import fingerprint

    name = tokenizer or read_index_header(index)[0].tokenizer
    if not name:
        raise ConfigError(f"The index {index} does not say which tokenizer it was made with. Give it: --tokenizer.")
    loaded = load_tokenizer(name)
    with _Reading(sources, glob, field) as reading:
        documents = tokenise(reading.documents(), loaded)
        header = append_index(index, documents, fingerprint=fingerprint(loaded), tick=reading.tick)
    _report(index, header, reading)


@app.command("info")
def index_info(index: Existing, json: Json = False) -> None:
    """Say what an index holds, and whether it is whole."""
    from dataclasses import asdict

    from forerun.drafters.lookup.rest.index import Index

    opened = Index(index)
    header = opened.header
    size = index.stat().st_size
    if json:
        print_json({"index": str(index), "bytes": size, "version": header.version, **asdict(header)})
        return
    when = " when it is opened (compact)" if header.compact else ""
    typer.echo(
        f"{index}: {_size(header)}, {size:,} bytes, whole\n"
        f"  tokenizer   {header.tokenizer or 'none'}, {header.vocab_size:,} tokens\n"
        f"  fingerprint {header.fingerprint or 'none'}\n"
        f"  checksum    {header.checksum}\n"
        f"  sorted by   {header.depth} tokens of {header.token_bytes} bytes{when}; format {header.version}"
    )


class _Reading:
    """The documents that a command reads, with progress bars for reading and for sorting."""

    def __init__(
        self, sources: list[Path] | None, glob: list[str] | None, field: str, standard_library: bool = False
    ) -> None:
        from rich.console import Console
        from rich.progress import Progress

        from forerun.utils.text_files import TEXT_PATTERNS, find_files

        if standard_library and (sources or glob):
            raise ConfigError("--standard-library takes neither sources nor --glob. Leave one of the two out.")
        self.skipped: list[Path] = []
        self._field = field
        self._files = None if standard_library else find_files(sources or [], glob or TEXT_PATTERNS)
        self._bars = Progress(console=Console(stderr=True), transient=True)

    def __enter__(self) -> _Reading:
        self._bars.start()
        self._sorting = self._bars.add_task("sorting", total=1.0, start=False, visible=False)
        return self

    def __exit__(self, *_: Any) -> None:
        self._bars.stop()

    def documents(self) -> Iterator[TextDocument]:
        """Yield the documents in their order."""
        from forerun.utils.text_files import read_documents

        if self._files is None:
            yield from self._bars.track(_standard_library(), description="reading")
            return
        for path, named in self._bars.track(self._files, description="reading"):
            yield from read_documents(path, named, self._field, self.skipped)

    def tick(self, share: float) -> None:
        """Show the progress of sorting."""
        self._bars.start_task(self._sorting)
        self._bars.update(self._sorting, completed=share, visible=True)


def _standard_library() -> list[TextDocument]:
    from forerun.train.corpus import hash_fraction, is_generated, read_python_files, split, standard_library_root
    from forerun.utils.text_files import TextDocument

    training, _ = split(read_python_files(standard_library_root()))
    written = [file for file in training if not is_generated(file.text)]
    written.sort(key=lambda file: hash_fraction(file.name))
    return [TextDocument(file.name, file.text) for file in written]


def _report(path: Path, header: IndexHeader, reading: _Reading) -> None:
    typer.echo(f"{path}: {_size(header)}, {path.stat().st_size:,} bytes")
    if reading.skipped:
        first = reading.skipped[0]
        count = len(reading.skipped)
        typer.echo(f"left out, since not UTF-8: {count} files, the first {first}", err=True)


def _size(header: IndexHeader) -> str:
    return f"{header.num_documents:,} documents, {header.num_tokens - header.num_documents:,} tokens"
