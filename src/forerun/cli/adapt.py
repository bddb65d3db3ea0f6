"""`forerun adapt`: what the drafter of a running server has learnt."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Annotated
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer

from forerun.cli.output import note
from forerun.errors import ConfigError
from forerun.utils.files import whole_folder, write_bytes

app = typer.Typer(help="What the drafter of a running server (serve --adapt) has learnt.", no_args_is_help=True)
_COPY = "/v1/adaptation/copy"
_SECONDS = 300.0

Url = Annotated[str, typer.Option(help="The server.", metavar="URL")]
ApiKey = Annotated[
    str | None, typer.Option(help="The key whose copy is meant.", metavar="KEY", envvar="OPENAI_API_KEY")
]


@app.command("save")
def save_copy(
    *,
    folder: Annotated[Path, typer.Argument(help="A new folder for it.", metavar="FOLDER")],
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Save the copy that drafts now, with its card: a folder that --drafter or --draft-model takes."""
    if folder.exists():
        raise ConfigError(f"{folder} is there already. Name a new folder.")
    files = _files(_fetched(url.rstrip("/").removesuffix("/v1") + _COPY, api_key), url)
    with whole_folder(folder, ConfigError) as fresh:
        for name, content in files.items():
            write_bytes(fresh / name, content, error=ConfigError)
    note(f"saved {folder}")


def _fetched(url: str, api_key: str | None) -> bytes:
    """Return what a server answers. Raises ConfigError with the server's reason where it refuses."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}, but must begin with http:// or https://.")
    request = Request(url, headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    try:
        with urlopen(request, timeout=_SECONDS) as answer:
            content: bytes = answer.read()
            return content
    except HTTPError as error:
        raise ConfigError(f"{url} refuses: {_reason(error.read())}") from None
    except (URLError, OSError, ValueError) as error:
        raise ConfigError(f"{url} does not answer: {error}. Start forerun serve --adapt, or give its --url.") from None


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _files(content: bytes, url: str) -> dict[str, bytes]:
    """Return the files of an answer by name. Raises ConfigError if it is no archive of plain files."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            if names and all(name == Path(name).name and not name.startswith(".") for name in names):
                return {name: archive.read(name) for name in names}
    except zipfile.BadZipFile:
        pass
    raise ConfigError(f"{url} answered with something else than a drafter's files. Ask a server of forerun.")
