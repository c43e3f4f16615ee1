"""Endpoints about text and the server itself that clients of other servers use: `/tokenize`, `/detokenize`, `/version`.

Knows tokenizer and chat template, no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

import forerun
from forerun.engine.intake import check_token_ids
from forerun.errors import BadRequest
from forerun.serve.context import ServerContext
from forerun.serve.counting import counted
from forerun.serve.derived import LenientModel
from forerun.serve.errors import described_errors
from forerun.serve.schema import Message
from forerun.serve.tool_schema import MAX_TOOLS, Tool
from forerun.serve.tools import ChatPrompt, ToolDialect, chat_prompt

MAX_COUNTED_CHARS = 1 << 20  # of a text that is only tokenised: some seconds
MAX_DETOKENIZED = 500_000
PIECE_ITEMS = 4096  # of a list that are written at once: some milliseconds
_ERRORS = described_errors(400, 401, 408, 413, 429)


class TokenizeBody(LenientModel):
    """vLLM's names; `content` and `with_pieces` are llama.cpp's."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    with_pieces: bool = False
    return_token_strs: bool | None = False


class DetokenizeBody(LenientModel):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_DETOKENIZED)]


@dataclass(frozen=True)
class _Rows:
    """A list of what `shown` makes of token ids, as it is written: whole, it would be half a million objects."""

    ids: list[int]
    shown: Callable[[int], Any]


def _json(found: dict[str, Any]) -> bytes:
    """Long lists are written in pieces: a whole one would hold up all other threads."""
    parts = []
    for name, value in found.items():
        text = json.dumps(value) if not isinstance(value, _Rows) else f"[{','.join(_pieces(value))}]"
        parts.append(f'"{name}":{text}')
    return ("{" + ",".join(parts) + "}").encode()


def _pieces(rows: _Rows) -> Iterator[str]:
    for at in range(0, len(rows.ids), PIECE_ITEMS):
        yield json.dumps([rows.shown(token) for token in rows.ids[at : at + PIECE_ITEMS]])[1:-1]


def add_text_api(app: FastAPI, ctx: ServerContext, dialect: ToolDialect) -> None:
    tokenizer = ctx.llm.tokenizer

    def conversation(body: TokenizeBody) -> ChatPrompt | None:
        for message in body.messages or ():
            message.check()
        return chat_prompt(dialect, body.messages, body.tools or ()) if body.messages else None

    def encoded(body: TokenizeBody, prompt: ChatPrompt | None) -> list[int]:
        if prompt is not None:
            return tokenizer.apply_chat_template(prompt.messages, prompt.tools, body.add_generation_prompt)
        text = body.prompt if body.prompt is not None else body.content
        return tokenizer.encode(text or "", add_special=body.add_special_tokens)

    def described(body: TokenizeBody, ids: list[int]) -> dict[str, Any]:
        def piece(token: int) -> dict[str, Any]:
            return {"id": token, "piece": tokenizer.token_bytes(token).decode("utf-8", "replace")}

        rows = _Rows(ids, piece if body.with_pieces else int)
        found = {"count": len(ids), "max_model_len": ctx.max_context, "tokens": rows}
        if body.return_token_strs:
            found["token_strs"] = _Rows(ids, tokenizer.backend.id_to_token)
        return found

    def decoded(tokens: list[int]) -> str:
        check_token_ids(tokens, ctx.llm.config.vocab_size)
        return tokenizer.decode(tokens, skip_special=False)

    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Token ids of a text, or of a conversation as the model gets it."""
        given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise BadRequest(f"the body has {' and '.join(given) or 'no text'}", "give prompt, content or messages")
        prompt = conversation(body)
        texts = [body.prompt or body.content or ""] if prompt is None else prompt.texts  # with tools and calls
        ctx.limit.check_size(texts, MAX_COUNTED_CHARS)
        whole = await counted(ctx, request, texts, lambda _: _json(described(body, encoded(body, prompt))))
        return Response(whole, media_type="application/json")

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
        """The text of token ids, control tokens included."""
        text = await counted(ctx, request, [body.tokens], lambda _: decoded(body.tokens))
        return {"prompt": text, "content": text}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": forerun.__version__}
