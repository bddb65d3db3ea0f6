"""What a drafter that learns while it serves has come to, for the caller's tenant: figures, and its copy as a file."""

from __future__ import annotations

import asyncio
import io
import zipfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from forerun.engine.adapting import Adapting
from forerun.errors import ConfigError, RequestBodyError
from forerun.server.metrics import Gauges
from forerun.server.service import Service

ADAPTATION_URL = "/v1/adaptation"
COPY_URL = f"{ADAPTATION_URL}/copy"
_ABOUT: dict[str, str] = {
    "steps": "Small steps that drafters have learnt, of all tenants.",
    "swaps": "Times that a drafter's copy was swapped in, which was better beyond chance.",
    "swaps_back": "Times that the drafter that was loaded came back, since it was better beyond chance.",
    "tokens": "Verified tokens that have come to be learnt from.",
    "memory": "Bytes of verified tokens and states that are kept to learn from.",
    "before": "Tokens a judged draft before a copy was swapped in; the mean of tenants that have one.",
    "after": "The same after it.",
}


def add_adaptation(app: FastAPI, service: Service) -> None:
    """Add the paths, and the gauges of a server whose drafter learns."""
    adapting = service.llm.adapting
    if adapting is not None:
        service.metric_factory.gauges(_gauges(adapting))
    about: dict[int | str, Any] = {404: {"description": "Nothing learns, or no copy drafts yet."}}

    @app.get(ADAPTATION_URL, responses=about)
    async def progress(request: Request) -> Any:
        return asdict(_learning(service).progress(request.state.tenant))

    @app.get(COPY_URL, responses=about)
    async def copy(request: Request) -> Response:
        made = await asyncio.to_thread(_packed, _learning(service), request.state.tenant)
        return Response(made, media_type="application/zip")


def _gauges(adapting: Adapting) -> Gauges:
    return {f"forerun:adaptation_{name}": (about, partial(_read, adapting, name)) for name, about in _ABOUT.items()}


def _read(adapting: Adapting, name: str) -> float:
    return adapting.total()[name]


def _learning(service: Service) -> Adapting:
    if service.llm.adapting is None:
        raise RequestBodyError("The drafter of this server does not learn. Start it with --adapt.", status=404)
    return service.llm.adapting


def _packed(adapting: Adapting, tenant: str | None) -> bytes:
    """Return the files of a tenant's copy, packed. Raises RequestBodyError if no copy drafts for it."""
    packed = io.BytesIO()
    with TemporaryDirectory() as folder:
        try:
            adapting.save(folder, tenant)
        except ConfigError as error:
            raise RequestBodyError(str(error), status=404) from None
        with zipfile.ZipFile(packed, "w") as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.write(path, path.name)
    return packed.getvalue()
