"""The page at `/`: its files, and its own endpoints: what this server offers, what its prefix tree holds, how text is
tokenised. What else it shows comes through the same paths as for every other client.

Only files of the package are served, from memory, under a Content-Security-Policy that loads nothing from elsewhere.
Text of other clients is never sent, unless the server was started with `show_prompts`: of the tree there are counts,
and text only where it is a prefix of the conversation in the request. All sizes are bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from forerun.cache.prefix import SharedRun
from forerun.decode.drafter_pool import AUTO_FREE_DRAFTERS
from forerun.params import PREFILL_MODES, Prefill, SamplingParams
from forerun.serve.context import ServerContext
from forerun.serve.counting import counted
from forerun.serve.derived import StrictModel, documented
from forerun.serve.errors import ApiError, described_errors
from forerun.text.tokenizer import Tokenizer

MAX_TREE_RUNS = 200
FOLDER = "/page/"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # cached, but revalidated: a new version is shown at once
}
MAX_COUNTED_CHARS = 1 << 20  # of a conversation whose tokens are only counted: some seconds of tokenising
_ERRORS = described_errors(400, 401, 408, 413, 429)


class _ChatMessage(StrictModel):
    role: Literal["system", "user", "assistant"]
    content: str


class ConversationBody(StrictModel):
    """The messages of a chat request."""

    messages: list[_ChatMessage] = Field(min_length=1)

    @property
    def texts(self) -> list[str]:
        return [message.content for message in self.messages]

    @property
    def dicts(self) -> list[dict[str, str]]:
        return [message.model_dump() for message in self.messages]


def add_page_api(app: FastAPI, ctx: ServerContext) -> None:
    @app.get("/forerun/about")
    async def about() -> dict[str, Any]:
        """The model, the limits, and the options that requests may use."""
        return await asyncio.to_thread(_about, ctx)

    @app.get("/forerun/stats")
    async def stats() -> dict[str, Any]:
        """Where prompt tokens came from and what answers cost so far; of sessions only their number."""
        record = (await asyncio.to_thread(ctx.llm.stats)).record()
        return record | {"sessions": len(record["sessions"]), "open": ctx.admission.num_open}

    @app.get("/forerun/tree")
    async def tree() -> dict[str, Any]:
        """What the prefix tree holds and how often it was read."""
        return await asyncio.to_thread(_tree, ctx, None)

    @app.post("/forerun/tree", responses=_ERRORS)
    async def conversation_tree(body: ConversationBody, request: Request) -> dict[str, Any]:
        """The same, with the path of one conversation through it."""
        ctx.limit.check_size(body.texts, MAX_COUNTED_CHARS)
        return await counted(ctx, request, body.texts, lambda _: _tree(ctx, body.dicts))

    @app.post("/forerun/tokens", responses=_ERRORS)
    async def tokens(body: ConversationBody, request: Request) -> dict[str, Any]:
        """A conversation's prompt, token by token; of one that exceeds the context, only their number."""
        ctx.limit.check_size(body.texts, MAX_COUNTED_CHARS)
        return await counted(ctx, request, body.texts, lambda _: _tokens(ctx, body.dicts))


def _about(ctx: ServerContext) -> dict[str, Any]:
    llm, config = ctx.llm, ctx.config
    problems = {mode: ctx.prefill_problem(mode) for mode in PREFILL_MODES}
    free = [name for name in AUTO_FREE_DRAFTERS if name != "grammar"]
    return {
        "model": config.model_name,
        "context": ctx.max_context,
        "layers": llm.config.num_layers,
        "weights": llm.precision.name,
        "device": llm.decoder.device.type,
        "max_body_bytes": config.max_body_bytes,
        "max_chars": ctx.limit.max_chars,
        "prefill": {mode: str(problem) if problem else None for mode, problem in problems.items()},
        "speculation": ["auto", "off", *dict.fromkeys((*free, *config.drafters))],
        "options": {"temperature": documented(SamplingParams, "temperature"), "budget": documented(Prefill, "budget")},
        "shows_prompts": config.show_prompts,
    }


def _tree(ctx: ServerContext, own: list[dict[str, str]] | None) -> dict[str, Any]:
    outline = ctx.llm.prefixes(own, MAX_TREE_RUNS)
    return {
        "tokens": outline.tokens,
        "page_size": outline.page_size,
        "runs": [_run(ctx, run) for run in outline.runs],
        "left_out": outline.left_out,
    }


def _run(ctx: ServerContext, run: SharedRun) -> dict[str, Any]:
    record = {name: getattr(run, name) for name in ("parent", "tokens", "branches", "reads", "readers", "shared")}
    known = run.first if ctx.config.show_prompts else run.first[: run.shared]  # nothing of other clients' text
    return record | {"text": ctx.llm.tokenizer.decode(known, skip_special=False)} if known else record


def _tokens(ctx: ServerContext, messages: list[dict[str, str]]) -> dict[str, Any]:
    ids = ctx.llm.encode(messages)
    fits = len(ids) < ctx.max_context
    return {"tokens": len(ids), "context": ctx.max_context, "pieces": _pieces(ctx.llm.tokenizer, ids) if fits else []}


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds: a character of several tokens is that of the last one."""
    stream = tokenizer.stream(skip_special=False)
    pieces = [stream.push(token) for token in ids]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces


def is_page(path: str) -> bool:
    """Whether a path is one of the page's files, which need no API key."""
    return path == "/" or path.startswith(FOLDER)


def add_page_files(app: FastAPI) -> None:
    files = {file.name: _PageFile(file) for file in resources.files("forerun.serve").joinpath("page").iterdir()}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return files["index.html"].response(request)

    @app.api_route(FOLDER + "{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def part(name: str, request: Request) -> Response:
        if name not in files:
            raise ApiError(404, f"the page has no file {name!r:.80}")
        return files[name].response(request)


class _PageFile:
    """One file of the page."""

    def __init__(self, file: Traversable) -> None:
        self._bytes = file.read_bytes()
        self._type = _TYPES[file.name.rpartition(".")[2]]
        self._tag = f'"{hashlib.sha256(self._bytes).hexdigest()[:16]}"'

    def response(self, request: Request) -> Response:
        headers = _HEADERS | {"etag": self._tag}
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        return Response(self._bytes, media_type=self._type, headers=headers)
