"""The paths for chat: OpenAI's chat completions and what is converted to them. One way to the engine for all."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from forerun.serve.context import ServerContext
from forerun.serve.counting import counted
from forerun.serve.derived import unknown_fields
from forerun.serve.dialects.base import WireFormat
from forerun.serve.dialects.messages import CountRequest, MessagesFormat, MessagesRequest
from forerun.serve.dialects.response_events import ResponsesFormat
from forerun.serve.dialects.response_store import ResponseStore
from forerun.serve.dialects.responses import ResponsesRequest
from forerun.serve.encoders import ChatEncoder
from forerun.serve.errors import ApiError
from forerun.serve.response import CompletionResponse
from forerun.serve.schema import ChatRequest
from forerun.serve.sessions import SessionTurn
from forerun.serve.tools import ToolDialect


class ChatEndpoint:
    """Makes the response to a chat request, in the wire format of the path it came from."""

    def __init__(self, ctx: ServerContext) -> None:
        self.ctx, self.dialect = ctx, ToolDialect.of(ctx.llm.tokenizer)

    def respond(
        self, body: ChatRequest, request: Request, warnings: dict[str, str], wire: WireFormat | None = None
    ) -> Response:
        ctx, name, tokenizer = self.ctx, self.ctx.config.model_name, self.ctx.llm.tokenizer
        encoder = ChatEncoder(f"chatcmpl-{uuid.uuid4().hex}", name, int(time.time()), tokenizer, bool(body.logprobs))
        encoder.tools = body.tool_use(self.dialect)
        session, key = body.forerun.session_options, request.state.key
        ctx.limit.check_size([message.text for message in body.messages])
        prompt: Any = body.chat_prompt(self.dialect, whole=session is None)
        if session is not None:
            encode = body.session_encoder(self.dialect)
            prompt = SessionTurn(ctx.sessions, session, key, body.messages, encode, texts=prompt.texts)
        return CompletionResponse(ctx, body, [prompt], encoder, key, encoder.tools, warnings, wire)

    async def count(self, body: ChatRequest, request: Request) -> int:
        """Tokens of a request's prompt; within the limits of requests for answers."""
        limit, tokenizer = self.ctx.limit, self.ctx.llm.tokenizer
        limit.check_size([message.text for message in body.messages])
        prompt = body.chat_prompt(self.dialect)
        limit.check_size(prompt.texts)

        def tokens(check_cancelled: Callable[[], None]) -> int:
            limit.check_tokens(prompt.texts, check_cancelled)
            return len(prompt.encode(tokenizer))

        return await counted(self.ctx, request, prompt.texts, tokens)


def add_chat(app: FastAPI, ctx: ServerContext, errors: dict[int | str, dict[str, Any]]) -> None:
    endpoint = ChatEndpoint(ctx)

    @app.post("/v1/chat/completions", responses=errors, response_class=Response)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        ctx.check_model(body.model)
        return endpoint.respond(body, request, ctx.ignored(unknown_fields(body)))

    @app.post("/v1/messages", responses=errors, response_class=Response)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in Anthropic's form."""
        ctx.check_model(body.model)
        wire, ignored = MessagesFormat(ctx.config.model_name), ctx.ignored(unknown_fields(body) + body.passed_over)
        return endpoint.respond(body.to_chat(), request, ignored, wire)

    @app.post("/v1/messages/count_tokens", responses=errors)
    async def count_tokens(body: CountRequest, request: Request) -> dict[str, int]:
        """How many tokens a conversation has in Anthropic's form."""
        ctx.check_model(body.model)
        return {"input_tokens": await endpoint.count(body.chat(), request)}


def add_responses(app: FastAPI, ctx: ServerContext, errors: dict[int | str, dict[str, Any]]) -> None:
    tiers = ctx.llm.engine.tiers
    disk = tiers.disk if tiers is not None else None
    endpoint, store = ChatEndpoint(ctx), ResponseStore(None if disk is None else disk.folder / "responses")

    async def conversation(body: ResponsesRequest, request: Request) -> list[dict[str, Any]]:
        before = None
        if body.previous_response_id is not None:
            before = await store.get(request.state.key, body.previous_response_id)
        return [*(before.messages if before is not None else ()), *body.messages()]

    @app.post("/v1/responses", responses=errors, response_class=Response)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's responses."""
        ctx.check_model(body.model)
        key, messages = request.state.key, await conversation(body, request)

        def keep(response: dict[str, Any], answer: dict[str, Any]) -> None:
            if body.store is not False:
                store.add(key, response, [*messages, answer])

        wire = ResponsesFormat(ctx.config.model_name, body, keep)
        ignored = ctx.ignored(unknown_fields(body) + body.passed_over)
        return endpoint.respond(body.to_chat(messages), request, ignored, wire)

    @app.post("/v1/responses/input_tokens", responses=errors)
    async def input_tokens(body: ResponsesRequest, request: Request) -> dict[str, Any]:
        """How many tokens a conversation has in the form of OpenAI's responses."""
        ctx.check_model(body.model)
        count = await endpoint.count(body.to_chat(await conversation(body, request)), request)
        return {"object": "response.input_tokens", "input_tokens": count}

    @app.get("/v1/responses/{response_id}", responses=errors)
    async def retrieve(response_id: str, request: Request) -> dict[str, Any]:
        """A response that was stored."""
        return (await store.get(request.state.key, response_id)).response

    @app.post("/v1/responses/{response_id}/cancel", responses=errors)
    async def cancel(response_id: str, request: Request) -> dict[str, Any]:
        """Not possible, as at OpenAI's without `background`: a response is stored once it is whole."""
        await store.get(request.state.key, response_id)
        raise ApiError(400, "Cannot cancel a synchronous response.", "close the connection while it is written")

    @app.delete("/v1/responses/{response_id}", responses=errors)
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Delete a stored response."""
        await store.delete(request.state.key, response_id)
        return {"id": response_id, "object": "response", "deleted": True}
