"""The ASGI application: its routes, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from forerun import __version__
from forerun.engine.chat_template import encode
from forerun.engine.text import TextStream
from forerun.errors import ForerunError, PromptError, RequestBodyError
from forerun.server.completions import answer
from forerun.server.metrics import HTTPMetrics
from forerun.server.middleware import App, ClientGoneError, RequestMiddleware
from forerun.server.openapi import (
    SchemaFacts,
    chat_schema,
    completion_schema,
    detokenize_schema,
    operation,
    response_schema,
    tokenize_schema,
)
from forerun.server.options import ServerOptions
from forerun.server.protocol.errors import error_response
from forerun.server.protocol.fields import checked_body, field
from forerun.server.protocol.requests import CHAT_URL, COMPLETIONS_URL, check_template_options, template_options
from forerun.server.protocol.responses_api import RESPONSES_URL
from forerun.server.service import Service

_TOKENIZE = ("model", "prompt", "messages", "add_special_tokens", "chat_template_kwargs")
_DETOKENIZE = ("model", "tokens")


def tokenize(service: Service, value: object) -> dict[str, Any]:
    """Answer /tokenize: return the tokens of a prompt or a chat. Raises RequestBodyError."""
    body = checked_body(value, _TOKENIZE)
    service.check_model(field(body, "model").string("model", None))
    tokenizer, name = service.llm.tokenizer, service.llm.target.name
    chat = "messages" in body
    if chat == ("prompt" in body):
        raise RequestBodyError("Give either prompt, a text, or messages, a chat.", param="prompt")
    prompt: Any = field(body, "messages").list_of("messages", dict) if chat else field(body, "prompt").string("prompt")
    special = field(body, "add_special_tokens").flag("add_special_tokens", True)
    if chat and "add_special_tokens" in body:
        raise RequestBodyError("The chat template sets special tokens. Leave it out.", param="add_special_tokens")
    options = template_options(body)
    check_template_options(options, tokenizer)
    if options and not chat:
        raise RequestBodyError("chat_template_kwargs is for messages. Leave it out.", param="chat_template_kwargs")
    try:
        tokens = [] if prompt == "" else encode(prompt, tokenizer, name, options, special=special)
    except PromptError as error:
        raise RequestBodyError(str(error), param="messages" if chat else "prompt") from None
    return {"count": len(tokens), "max_model_len": service.llm.target.context_length, "tokens": tokens}


def detokenize(service: Service, value: object) -> dict[str, Any]:
    """Answer /detokenize: return the text of tokens, without special ones. Raises RequestBodyError."""
    body = checked_body(value, _DETOKENIZE)
    service.check_model(field(body, "model").string("model", None))
    tokens = field(body, "tokens").list_of("tokens", int)
    texts, size = service.responses.texts, service.llm.target.vocab_size
    if texts is None:
        raise RequestBodyError("The model has no tokenizer, so tokens stand for no text.", param="tokens")
    for position, token_id in enumerate(tokens):
        if not 0 <= token_id < size:
            raise RequestBodyError(
                f"The token at position {position} is outside the vocabulary, 0..{size - 1}.", param="tokens"
            )
    stream = TextStream(texts, [])
    stream.push(tokens)
    stream.finish()
    return {"prompt": stream.text}


_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def make_app(service: Service, draining: Callable[[], bool]) -> FastAPI:
    """Return the application with all routes, without the request middleware."""
    app = FastAPI(title="forerun", version=__version__, docs_url=None, redoc_url=None)
    _handle_errors(app, service)
    _add_answers(app, service)
    _add_facts(app, service, draining)
    _add_page(app)
    return app


def with_middleware(app: App, options: ServerOptions, metrics: HTTPMetrics) -> tuple[App, RequestMiddleware]:
    """Wrap an application in the request middleware, and in CORS if origins are allowed; return both."""
    middleware = RequestMiddleware(app, options, metrics)
    origins = list(options.cors_origin)
    if not origins:
        return middleware, middleware
    allowed = CORSMiddleware(
        middleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )
    return allowed, middleware


def _add_answers(app: FastAPI, service: Service) -> None:
    async def respond(request: Request) -> Response:
        return await answer(service, RESPONSES_URL, request)

    async def chat(request: Request) -> Response:
        return await answer(service, CHAT_URL, request)

    async def complete(request: Request) -> Response:
        return await answer(service, COMPLETIONS_URL, request)

    def computed(compute: Callable[[Service, object], dict[str, Any]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            body = await service.body(request, lambda value: value, is_prompt=False)
            return JSONResponse(await asyncio.to_thread(compute, service, body))

        return endpoint

    drafter = service.llm.drafter
    facts = SchemaFacts(service.name, [] if drafter is None else [*drafter.offers], service.llm.target.vocab_size)
    for path, endpoint, schema in (
        (RESPONSES_URL, respond, response_schema(facts)),
        (CHAT_URL, chat, chat_schema(facts)),
        (COMPLETIONS_URL, complete, completion_schema(facts)),
        ("/tokenize", computed(tokenize), tokenize_schema(facts)),
        ("/detokenize", computed(detokenize), detokenize_schema(facts)),
    ):
        app.post(path, openapi_extra=operation(schema))(endpoint)


def _add_facts(app: FastAPI, service: Service, draining: Callable[[], bool]) -> None:
    def model() -> dict[str, Any]:
        drafter = service.llm.drafter
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "forerun",
            "root": service.name,  # a model without adapters, as vLLM says it
            "max_model_len": service.llm.target.context_length,
            "drafters": [] if drafter is None else [*drafter.offers],
        }

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "There is no such model."}})
    async def one_model(name: str) -> Any:
        service.check_model(name)
        return model()

    @app.get("/health")
    async def health() -> Response:
        failure = service.llm.engine.faults.failure
        status = "failed" if failure else "draining" if draining() else "ok"
        body = {"status": status} | ({"reason": failure} if failure else {}) | {"cannot": dict(service.limits())}
        return JSONResponse(body, 200 if status == "ok" else 503)

    @app.get("/version")
    async def version() -> Any:
        return {"version": __version__}

    @app.get("/live")
    async def live() -> Any:
        return service.live()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI) -> None:
    """Add the playground, whose files are all of this package."""
    folder = Path(__file__).parent / "page"

    def file(name: str) -> Callable[[Request], Any]:
        async def respond(request: Request) -> Response:
            return FileResponse(folder / name, headers=_PAGE_HEADERS)

        return respond

    for path, name in (("/", "index.html"), ("/page.css", "page.css"), ("/page.js", "page.js")):
        app.add_api_route(path, file(name), methods=["GET"], include_in_schema=False)


def _handle_errors(app: FastAPI, service: Service) -> None:
    async def failed(request: Request, error: Exception) -> Response:
        status, body = error_response(error)
        request.state.log_fields["error"] = type(error).__name__
        return JSONResponse(body, status, {"retry-after": "1"} if status in (429, 503) else None)

    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: "There is no such path.", 405: "The path is there, but not for this method."}
        refused = RequestBodyError(words.get(error.status_code, error.detail), status=error.status_code)
        return JSONResponse(error_response(refused)[1], error.status_code, error.headers)

    async def gone(request: Request, error: Exception) -> Response:
        request.state.log_fields["disconnected"] = True
        service.metrics.disconnected()
        return Response(status_code=499)

    app.add_exception_handler(ForerunError, failed)
    app.add_exception_handler(HTTPException, missing)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, failed)
