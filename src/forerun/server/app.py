"""The ASGI application: its routes, and errors in each API's form."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from forerun import __version__
from forerun.engine.chat_template import encode
from forerun.errors import ForerunError, PromptError, RequestBodyError
from forerun.server.adaptation import add_adaptation
from forerun.server.completions import BODIES, answer
from forerun.server.metrics import HTTPMetrics, Prometheus
from forerun.server.middleware import PAGE_PATH, RequestMiddleware, refusal_response
from forerun.server.ollama import NO_EMBEDDINGS, RUNNING, SHOW_URL, ShowBody, add_ollama
from forerun.server.options import ServerOptions
from forerun.server.protocol.bodies import Body, Messages, TokenIds, validated
from forerun.server.protocol.errors import failure_fields
from forerun.server.protocol.messages_api import CountBody
from forerun.server.protocol.requests import MESSAGES_URL, RESPONSES_URL, Tools, check_template_options, with_read_calls
from forerun.server.protocol.without_effect import IGNORED_HEADER, offered_tools
from forerun.server.service import Service
from forerun.utils.library_tokenizer import LibraryTokenizer


class TokenizeBody(Body):
    """The body of /tokenize."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    def answer(self, service: Service) -> dict[str, Any]:
        """Return the tokens of a prompt or a chat. Raises RequestBodyError."""
        tokenizer = service.llm.tokenizer
        target = service.llm.target
        if (self.messages is None) == (self.prompt is None):
            raise RequestBodyError("Give either prompt, a text, or messages, a chat.", param="prompt")
        check_template_options(self.chat_template_kwargs or {})
        of_chats = ("chat_template_kwargs", "tools", "add_generation_prompt", "continue_final_message")
        given = {name: value for name in of_chats if (value := getattr(self, name)) is not None}
        if self.messages is None and (wrong := next(iter(given), None)):
            raise RequestBodyError(f"{wrong} is for messages. Leave it out.", param=wrong)
        options = {**given.pop("chat_template_kwargs", {}), **given}
        options |= {"tools": offered_tools(self.tools)}
        if not options["tools"]:  # an empty list is none, as in a chat
            del options["tools"]
        prompt: Any = self.prompt if self.messages is None else list(map(with_read_calls, self.messages))
        try:
            encoded = partial(encode, prompt, tokenizer, target.name, options, model=target)
            tokens = [] if prompt == "" else encoded(special=self.add_special_tokens)
        except PromptError as error:
            raise RequestBodyError(str(error), param="prompt" if self.messages is None else "messages") from None
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": target.context_length, "tokens": tokens}
        if self.return_token_strs:
            found["token_strs"] = tokenizer.convert_ids_to_tokens(tokens) if tokens else []
        return found


class DetokenizeBody(Body):
    """The body of /detokenize."""

    tokens: TokenIds
    skip_special_tokens: bool | None = None

    def answer(self, service: Service) -> dict[str, Any]:
        """Return the text of tokens. Raises RequestBodyError."""
        size = service.llm.target.vocab_size
        most = service.llm.target.context_length
        if len(self.tokens) > most:
            raise RequestBodyError(
                f"tokens has {len(self.tokens)} entries, but the context holds {most}. Send fewer.", param="tokens"
            )
        if service.texts.texts is None:
            raise RequestBodyError("The model has no tokenizer, so tokens stand for no text.", param="tokens")
        for position, token_id in enumerate(self.tokens):
            if not 0 <= token_id < size:
                raise RequestBodyError(
                    f"The token at position {position} is outside the vocabulary, 0..{size - 1}.", param="tokens"
                )
        return {"prompt": service.texts.text(self.tokens, special=not self.skip_special_tokens)}


_OF_TOKENIZER = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
_OF_EMBEDDINGS = ("embeddings", "embedding", "embed", "rerank", "score", "pooling", "classify")
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "cache-control": "no-cache",  # so that files of two versions do not meet
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def make_app(service: Service, draining: Callable[[], bool]) -> FastAPI:
    """Return the application with all routes, without the request middleware."""
    handlers = _error_handlers(service)
    app = FastAPI(title="forerun", version=__version__, docs_url=None, redoc_url=None, exception_handlers=handlers)
    _add_facts(app, service, draining)
    _add_page(app)
    add_ollama(app, service)
    _add_kept(app, service)
    add_adaptation(app, service)
    _add_answers(app, service)
    return app


def with_middleware(app: ASGIApp, options: ServerOptions, metrics: HTTPMetrics) -> tuple[ASGIApp, RequestMiddleware]:
    """Wrap an application in the request middleware, and in CORS if origins are allowed; return both."""
    middleware = RequestMiddleware(app, options, metrics)
    if not options.cors_origin:
        return middleware, middleware
    allowed = CORSMiddleware(
        middleware,
        allow_origins=list(options.cors_origin),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", IGNORED_HEADER],
    )
    return allowed, middleware


def _add_answers(app: FastAPI, service: Service) -> None:
    def endpoint_of(url: str, model: type[Body]) -> Callable[[Request], Any]:
        async def generated(request: Request) -> Response:
            return await answer(service, url, request)

        async def computed(request: Request) -> Response:
            body: Any = await service.parsed(request, partial(validated, model))
            service.check_model(body.model or getattr(body, "name", None))
            content = await service.prepared(request, lambda: to_json(body.answer(service)))
            return Response(content, media_type="application/json")

        return generated if url in BODIES else computed

    models: dict[str, type[Body]] = {**BODIES, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}
    models |= {f"{MESSAGES_URL}/count_tokens": CountBody, SHOW_URL: ShowBody}
    about = {"description": "An error body of OpenAI's, or of Ollama's below /api."}
    errors: dict[int | str, Any] = dict.fromkeys((400, 401, 404, 408, 413, 429, 503), about)
    for url, model in models.items():
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        app.post(url, openapi_extra={"requestBody": body}, responses=errors)(endpoint_of(url, model))
    inputs: list[Any] = [(model, "validation") for model in models.values()]
    _, definitions = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    app.openapi()["components"] = {"schemas": definitions["$defs"]}


def _add_kept(app: FastAPI, service: Service) -> None:
    about: dict[int | str, Any] = {404: {"description": "There is no such response."}}

    @app.get(f"{RESPONSES_URL}/{{name}}", responses=about)
    async def kept(name: str, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise RequestBodyError("A response that is kept is not streamed. Leave it out.", param="stream")
        return Response(service.kept[request.state.tenant].find(name).body, media_type="application/json")

    @app.delete(f"{RESPONSES_URL}/{{name}}", responses=about)
    async def deleted(name: str, request: Request) -> Any:
        service.kept[request.state.tenant].remove(name)
        return {"id": name, "object": "response", "deleted": True}

    @app.get(f"{RESPONSES_URL}/{{name}}/input_items", responses=about)
    async def items(name: str, request: Request) -> Any:
        return service.kept[request.state.tenant].find(name).listed(request.query_params)


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
            "full_context_length": service.llm.target.full_context_length,
            "drafters": [] if drafter is None else [*drafter.offers],
            "default_sampling_params": dict(service.sampling.options),
            "default_sampling_source": service.sampling.source,
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
        status = "draining" if draining() else "ok"
        if failure:
            status = "failed"
        body = {"status": status} | ({"reason": failure} if failure else {}) | {"cannot": dict(service.limits())}
        return JSONResponse(body, 200 if status == "ok" else 503)

    @app.get("/version")
    async def version() -> Any:
        return {"version": __version__}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Any:
        tokenizer = service.llm.tokenizer
        kind = None if tokenizer is None else type(tokenizer).__name__
        if isinstance(tokenizer, LibraryTokenizer):
            kind = "PreTrainedTokenizerFast"  # which a client can load, as `tokenizer.full`
        return {"tokenizer_class": kind, **{name: getattr(tokenizer, name, None) for name in _OF_TOKENIZER}}

    @app.get("/live")
    async def live() -> Any:
        return service.live()

    if isinstance(factory := service.metric_factory, Prometheus):

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(factory.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI) -> None:
    """Add the page, whose files are all of this package."""
    folder = Path(__file__).parent / "page"
    files = {each.relative_to(folder).as_posix(): each for kind in ("*.js", "*.css") for each in folder.rglob(kind)}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root(request: Request) -> Response:
        wants_page = "text/html" in request.headers.get("accept", "")
        return FileResponse(folder / "index.html", headers=_PAGE_HEADERS) if wants_page else PlainTextResponse(RUNNING)

    @app.get(f"{PAGE_PATH}{{name:path}}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return FileResponse(files[name], headers=_PAGE_HEADERS)


def _no_such_path(request: Request) -> str:
    """Return what there is in place of a path that is not there."""
    path = request.url.path.rstrip("/")
    if path.rpartition("/")[2] in _OF_EMBEDDINGS:
        return NO_EMBEDDINGS
    routes = (route for route in request.app.routes if isinstance(route, APIRoute) and route.include_in_schema)
    paths = sorted({route.path for route in routes})
    if close := get_close_matches(path, paths, n=1, cutoff=0.8):
        return f"There is no such path. Did you mean {close[0]}?"
    return f"There is no such path. There are {', '.join(paths)}."


def _error_handlers(service: Service) -> dict[Any, Any]:
    async def failed(request: Request, error: Exception) -> Response:
        request.state.log_fields |= failure_fields(error)
        return refusal_response(error, request.url.path)

    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: _no_such_path(request), 405: "The path is there, but not for this method."}
        refused = RequestBodyError(words.get(error.status_code, error.detail), status=error.status_code)
        answer = refusal_response(refused, request.url.path)
        answer.headers.update(error.headers or {})
        return answer

    async def gone(request: Request, error: Exception) -> Response:
        request.state.log_fields["disconnected"] = True
        service.metrics.disconnected()
        return Response(status_code=499)

    return {ForerunError: failed, HTTPException: missing, ClientDisconnect: gone, Exception: failed}
