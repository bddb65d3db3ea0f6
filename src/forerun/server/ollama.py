"""What Ollama's API tells of a model, and what of that API a server of one model does not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from forerun import __version__
from forerun.chat.response_format import REASONING
from forerun.errors import PromptError, RequestBodyError
from forerun.server.protocol.bodies import Body
from forerun.server.protocol.errors import OLLAMA_PATHS
from forerun.server.protocol.ollama_api import timestamp
from forerun.server.service import Service

RUNNING = "Ollama is running"
SHOW_URL = f"{OLLAMA_PATHS}show"
_VERSION = "0.13.0"
"""Of the Ollama whose API this is: clients look for features by it."""
_NEVER = "9999-12-31T23:59:59Z"
NO_EMBEDDINGS = "forerun computes no embeddings: it generates text. Take a server of embedding models."
_ONE_MODEL = (
    "forerun serves the one model that it was started with, and neither gets nor changes any. Get models with "
    "`forerun fetch`, and start the server with another one: `forerun serve MODEL --ollama`."
)
_NOT_SERVED = {
    **dict.fromkeys(("embed", "embeddings"), NO_EMBEDDINGS),
    **dict.fromkeys(("pull", "push", "create", "copy", "delete", "blobs/{digest}"), _ONE_MODEL),
}
_PARAMETERS = {"repetition_penalty": "repeat_penalty"}


class ShowBody(Body):
    """The body of /api/show."""

    name: str | None = None
    verbose: bool | None = None

    def answer(self, service: Service) -> dict[str, Any]:
        """Return what is known of the model."""
        return {
            "parameters": _parameters(service),
            "template": _template(service),
            "details": _details(service),
            "model_info": _model_info(service),
            "capabilities": _capabilities(service),
            "modified_at": timestamp(service.created),
        }


def add_ollama(app: FastAPI, service: Service) -> None:
    """Add the routes that compute nothing."""

    @app.head(f"{OLLAMA_PATHS}version", include_in_schema=False)
    @app.get(f"{OLLAMA_PATHS}version")
    async def version() -> Any:
        return {"version": _VERSION, "forerun": __version__}

    @app.head(f"{OLLAMA_PATHS}tags", include_in_schema=False)
    @app.get(f"{OLLAMA_PATHS}tags")
    async def tags() -> Any:
        return {"models": [_model(service) | {"modified_at": timestamp(service.created)}]}

    @app.get(f"{OLLAMA_PATHS}ps")
    async def loaded_models() -> Any:
        model = _model(service)
        on_device = service.llm.target.device.type != "cpu"
        more = {"size_vram": model["size"] if on_device else 0, "context_length": service.llm.target.context_length}
        return {"models": [model | {"expires_at": _NEVER, **more}]}

    def refused(words: str) -> Callable[[Request], Any]:
        async def refuse(request: Request) -> Any:
            raise RequestBodyError(words, status=501)

        return refuse

    for name, words in _NOT_SERVED.items():
        path = f"{OLLAMA_PATHS}{name}"
        app.add_api_route(path, refused(words), methods=["POST", "DELETE", "HEAD"], include_in_schema=False)


def _model(service: Service) -> dict[str, Any]:
    """Return a model as lists have it. The digest is of what is told of it, since its weights are not read again."""
    target = service.llm.target
    name = service.name if ":" in service.name else f"{service.name}:latest"
    told = [_details(service), _model_info(service)]
    decoder = getattr(target, "decoder", None)
    size = getattr(decoder, "weight_bytes", target.num_parameters * target.dtype.itemsize)
    digest = sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return {"name": name, "model": name, "size": size, "digest": digest, "details": told[0]}


def _details(service: Service) -> dict[str, Any]:
    target = service.llm.target
    family = getattr(target, "architecture", "")
    count = target.num_parameters
    is_gguf = target.loaded_by.endswith(".gguf") or bool(getattr(target, "packed_weights", None))
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
        "quantization_level": target.quantize or str(target.dtype).removeprefix("torch."),
    }


def _model_info(service: Service) -> dict[str, Any]:
    target = service.llm.target
    family = getattr(target, "architecture", "")
    return {
        "general.architecture": family,
        "general.basename": service.name,
        "general.parameter_count": target.num_parameters,
        f"{family}.context_length": target.context_length,
        f"{family}.vocab_size": target.vocab_size,
    }


def _capabilities(service: Service) -> list[str]:
    form = service.texts.response_format(has_tools=False)
    found = {
        "completion": True,
        "tools": service.texts.carry_calls,
        "insert": _fills_in(service),
        "thinking": form is not None and any(region.kind == REASONING for region in form.regions),
    }
    return [name for name, has in found.items() if has]


def _fills_in(service: Service) -> bool:
    with suppress(PromptError):
        return bool(service.llm.infill_format.ids)
    return False


def _template(service: Service) -> str:
    """Return the chat template, which is Jinja's, not Go's. Clients look for .Suffix in it where a model fills in."""
    template = getattr(service.llm.tokenizer, "chat_template", None) or ""
    text = template if isinstance(template, str) else str(template.get("default", ""))
    return ("{#- .Suffix is filled in by tokens of the model -#}" if _fills_in(service) else "") + text


def _parameters(service: Service) -> str:
    """Return the context and the options of sampling that are in force, in lines that clients take apart."""
    own = {_PARAMETERS.get(name, name): value for name, value in service.sampling.options.items()}
    lines = {"num_ctx": service.llm.target.context_length, **own}
    return "\n".join(f"{name:<30} {value}" for name, value in lines.items())
