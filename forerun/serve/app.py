"""The application: which paths there are, and what each does. Knows no sockets: `server.py` has them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
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
from forerun.serve.access import AccessMiddleware
from forerun.serve.admission import AdmissionControl
from forerun.serve.config import ServeConfig
from forerun.serve.context import IGNORED_HEADER, ServerContext, context_size
from forerun.serve.derived import unknown_fields
from forerun.serve.dialects.routes import add_chat, add_responses
from forerun.serve.embeddings import add_embeddings
from forerun.serve.encoders import CompletionEncoder
from forerun.serve.errors import ApiError, described_errors, on_api_error, on_http_error, on_invalid
from forerun.serve.metrics import Metrics
from forerun.serve.observer import RequestObserver
from forerun.serve.page_api import add_page_api, add_page_files
from forerun.serve.preparation import PreparationPool, PromptLimit
from forerun.serve.prompt_pins import PromptPins
from forerun.serve.request_ids import RequestIdMiddleware, log_refusal
from forerun.serve.response import CLIENT_CLOSED_STATUS, ClientDisconnected, CompletionResponse
from forerun.serve.schema import ChatRequest, CompletionRequest
from forerun.serve.sessions import ServerSessions, SessionTurn
from forerun.serve.text_api import add_text_api
from forerun.serve.tools import ToolDialect

_ERRORS = described_errors(400, 401, 404, 408, 409, 413, 429, 500, 503)


def create_app(llm: LLM, config: ServeConfig) -> FastAPI:
    """The server's application; `app.state.admission` counts open answers, and admits none once it drains."""
    admission = AdmissionControl(llm.engine.config.max_num_seqs, config.max_queue, config.keys)
    sessions = ServerSessions(llm, config.max_sessions, config.max_session_ttl)
    limit = PromptLimit(llm.tokenizer, context_size(llm, config))
    pins = PromptPins(llm, config.max_session_ttl)
    ctx = ServerContext(llm, config, admission, Metrics(llm, admission), sessions, pins, PreparationPool(), limit)
    ctx.warm_up()
    app = FastAPI(title="Forerun", version=forerun.__version__, docs_url=None, redoc_url=None)
    app.state.admission, app.state.context = admission, ctx
    add_error_handlers(app)
    add_chat(app, ctx, _ERRORS)
    add_responses(app, ctx, _ERRORS)
    _add_completions(app, ctx)
    add_embeddings(app, ctx)
    add_text_api(app, ctx, ToolDialect.of(llm.tokenizer))
    _add_sessions(app, sessions)
    _add_models(app, ctx, created=int(time.time()))
    _add_health(app, ctx)
    add_page_api(app, ctx)
    add_page_files(app)
    _name_model(app, config.model_name)
    add_middleware(app, config, admission, ctx.metrics.count_request)
    return app


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(ClientDisconnected, _on_disconnect)
    for kind in (ApiError, ForerunError, RecursionError, Exception):
        app.add_exception_handler(kind, on_api_error)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_STATUS)  # for the log


def add_middleware(app: FastAPI, config: ServeConfig, admission: AdmissionControl, report: Callable[..., None]) -> None:
    """What every request passes first: its id, its end, which is reported, other origins, keys and limits."""
    app.add_middleware(AccessMiddleware, config=config, admission=admission)
    if config.cors_origins:  # outermost: a preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients in browsers send many of their own
            expose_headers=["Retry-After", "x-request-id", IGNORED_HEADER],
        )
    app.add_middleware(RequestObserver, report=report)  # refused requests, too
    app.add_middleware(RequestObserver, report=log_refusal)
    app.add_middleware(RequestIdMiddleware)


def _add_completions(app: FastAPI, ctx: ServerContext) -> None:
    name, tokenizer = ctx.config.model_name, ctx.llm.tokenizer

    @app.post("/v1/completions", responses=_ERRORS, response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        ctx.check_model(body.model)
        warnings = ctx.ignored(unknown_fields(body))
        logprobs = body.logprobs is not None
        encoder = CompletionEncoder(f"cmpl-{uuid.uuid4().hex}", name, int(time.time()), tokenizer, logprobs)
        session, key, prompts = body.forerun.session_options, request.state.key, body.prompts()
        for prompt in prompts:
            ctx.check_ids(prompt)
        if session is not None:
            if len(prompts) > 1:
                raise ApiError(400, f"a session continues one text, got {len(prompts)} prompts", "send one")
            prompts = [SessionTurn(ctx.sessions, session, key, prompts[0])]
        return CompletionResponse(ctx, body, prompts, encoder, key, warnings=warnings)


def _add_sessions(app: FastAPI, sessions: ServerSessions) -> None:
    @app.get("/forerun/sessions")
    async def names(request: Request) -> dict[str, Any]:
        """The sessions of the request's API key, those on disk too."""
        found = await sessions.names(request.state.key)
        return {"object": "list", "data": [{"object": "forerun.session", "name": name} for name in found]}

    @app.delete("/forerun/sessions/{name:path}", responses=described_errors(404, 409))
    async def delete(name: str, request: Request) -> dict[str, Any]:
        """Delete a session, on disk too."""
        await sessions.delete(name, request.state.key)
        return {"object": "forerun.session", "name": name, "deleted": True}


def _add_models(app: FastAPI, ctx: ServerContext, created: int) -> None:
    name = ctx.config.model_name
    entry = {"id": name, "object": "model", "created": created, "owned_by": "forerun"}
    entry |= {"max_model_len": ctx.max_context}  # vLLM's: agents read how long prompts may be
    when = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entry |= {"type": "model", "display_name": name, "created_at": when}  # Anthropic's names, too

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model of this server."""
        return {"object": "list", "data": [entry], "has_more": False, "first_id": name, "last_id": name}

    @app.get("/v1/models/{model:path}", responses=described_errors(404))
    async def model(model: str) -> dict[str, Any]:
        """One model."""
        if model != name:
            message, hint = f"there is no model {model!r:.80}", f"there is {name}"
            raise ApiError(404, message, hint, code="model_not_found")
        return entry


def _name_model(app: FastAPI, name: str) -> None:
    """Put the model's name into the OpenAPI document."""
    schemas = app.openapi()["components"]["schemas"]
    for request in (ChatRequest, CompletionRequest):
        schemas[request.__name__]["properties"]["model"]["enum"] = [name]


def _add_health(app: FastAPI, ctx: ServerContext) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process responds at all."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "Shutting down"}})
    async def ready() -> JSONResponse:
        """Whether new requests are accepted."""
        draining = ctx.admission.draining
        return JSONResponse({"status": "draining" if draining else "ready"}, 503 if draining else 200)

    app.head("/health", include_in_schema=False)(health)  # as some load balancers ask
    app.head("/ready", include_in_schema=False)(ready)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(ctx.metrics.text(), media_type=CONTENT_TYPE_LATEST)
