"""The application: which paths there are, and what each does. Knows no sockets: `server.py` has them."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import forerun
from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.serve.answer import Answer, Service
from forerun.serve.config import ServeConfig
from forerun.serve.errors import ApiError, on_api_error, on_http_error, on_invalid
from forerun.serve.format import ChatFormat, CompletionFormat
from forerun.serve.gate import Gate
from forerun.serve.guard import Guard
from forerun.serve.metrics import Counted, Metrics
from forerun.serve.page import add_page
from forerun.serve.schema import ChatRequest, CompletionRequest
from forerun.serve.sessions import Sessions, Turn
from forerun.serve.tools import Dialect
from forerun.serve.watch import add_watch

_ERROR = {"description": "An error in OpenAI's form"}
_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys((400, 401, 404, 408, 409, 413, 429, 500, 503), _ERROR)
_ERRORS[422] = {"description": "Never sent: what does not fit the schema is answered with 400"}


def create_app(llm: LLM, config: ServeConfig) -> FastAPI:
    """The server's application; `app.state.gate` tells how many answers are open, and lets nobody in once it drains."""
    gate = Gate(llm.engine.config.max_num_seqs, config.max_queue)
    sessions = Sessions(llm, config.max_sessions, config.max_session_ttl)
    service = Service(llm, config, gate, Metrics(llm, gate), sessions)
    service.warm_up()
    app = FastAPI(title="Forerun", version=forerun.__version__, docs_url=None, redoc_url=None)
    app.state.gate, app.state.service = gate, service
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    for kind in (ApiError, ForerunError, Exception):
        app.add_exception_handler(kind, on_api_error)
    _add_answers(app, service)
    _add_sessions(app, sessions)
    _add_models(app, config, created=int(time.time()))
    _add_watching(app, service)
    add_watch(app, service)
    add_page(app)
    _name_model(app, config.model_name)
    app.add_middleware(Guard, config=config, gate=gate)
    if config.cors_origins:  # outermost: a preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients in browsers send many of their own
            expose_headers=["Retry-After", "x-request-id"],
        )
    app.add_middleware(Counted, metrics=service.metrics)  # of those who are turned away, too
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    name, tokenizer = service.config.model_name, service.llm.tokenizer
    dialect = Dialect.of(tokenizer)

    def checked(model: str) -> None:
        if model != name:
            raise ApiError(404, f"there is no model {model!r:.80}", f"ask for {name}", code="model_not_found")

    @app.post("/v1/chat/completions", responses=_ERRORS, response_class=Response)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        checked(asked.model)
        form = ChatFormat(f"chatcmpl-{uuid.uuid4().hex}", name, int(time.time()), tokenizer, bool(asked.logprobs))
        form.tools = asked.tool_use(dialect)
        options, key = asked.forerun.conversation, request.state.key
        prompt: Any = asked.conversation(dialect, whole=options is None)
        if options is not None:
            prompt = Turn(service.sessions, options, key, asked.messages, asked.continued(dialect))
        return Answer(service, asked, [prompt], form, key, form.tools)

    @app.post("/v1/completions", responses=_ERRORS, response_class=Response)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        checked(asked.model)
        told = asked.logprobs is not None
        form = CompletionFormat(f"cmpl-{uuid.uuid4().hex}", name, int(time.time()), tokenizer, told)
        options, key, prompts = asked.forerun.conversation, request.state.key, asked.prompts()
        if options is not None:
            if len(prompts) > 1:
                raise ApiError(400, f"a session goes on with one text, got {len(prompts)} prompts", "send one")
            prompts = [Turn(service.sessions, options, key, prompts[0])]
        return Answer(service, asked, prompts, form, key)

    @app.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        """Not offered: a decoder's hidden states are no embeddings that anybody trained."""
        hint = "ask a server that runs an embedding model"
        raise ApiError(501, "this server has no embedding model", hint, code="not_implemented")


def _add_sessions(app: FastAPI, sessions: Sessions) -> None:
    @app.get("/forerun/sessions")
    async def names(request: Request) -> dict[str, Any]:
        """Sessions of whoever asks, those on disk too."""
        found = await sessions.names(request.state.key)
        return {"object": "list", "data": [{"object": "forerun.session", "name": name} for name in found]}

    @app.delete("/forerun/sessions/{name:path}", responses={404: _ERROR, 409: _ERROR})
    async def forget(name: str, request: Request) -> dict[str, Any]:
        """Have a session forgotten, on disk too."""
        await sessions.forget(name, request.state.key)
        return {"object": "forerun.session", "name": name, "deleted": True}


def _add_models(app: FastAPI, config: ServeConfig, created: int) -> None:
    entry = {"id": config.model_name, "object": "model", "created": created, "owned_by": "forerun"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model there is."""
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{model:path}", responses={404: _ERROR})
    async def model(model: str) -> dict[str, Any]:
        if model != config.model_name:
            message, hint = f"there is no model {model!r:.80}", f"there is {config.model_name}"
            raise ApiError(404, message, hint, code="model_not_found")
        return entry


def _name_model(app: FastAPI, name: str) -> None:
    """The OpenAPI document says which model there is."""
    schemas = app.openapi()["components"]["schemas"]
    for request in (ChatRequest, CompletionRequest):
        schemas[request.__name__]["properties"]["model"]["enum"] = [name]


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process answers at all."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "Shutting down"}})
    async def ready() -> JSONResponse:
        """Whether new requests are welcome."""
        draining = service.gate.draining
        return JSONResponse({"status": "draining" if draining else "ready"}, 503 if draining else 200)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
