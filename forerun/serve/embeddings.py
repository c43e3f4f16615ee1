"""`/v1/embeddings`, for models that were trained to embed: the mean of a text's last states, or the last one.

A model says so itself (`ModelConfig.pooling`); any other one gets 501, as the states of a decoder that was trained to
write are no embeddings. Vectors have length 1. Knows no sampling.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import FastAPI, Request
from pydantic import Field
from torch import Tensor

from forerun.engine.engine import Engine
from forerun.engine.intake import check_token_ids
from forerun.llm import LLM
from forerun.models.decoder import Taps
from forerun.models.execution.runner import Span
from forerun.serve.context import ServerContext
from forerun.serve.derived import LenientModel
from forerun.serve.errors import ApiError, described_errors
from forerun.serve.prompt_pieces import run_pieces
from forerun.serve.response import unless_disconnected

MAX_INPUTS = 2048  # of one request, as OpenAI's
_ERRORS = described_errors(400, 401, 404, 408, 413, 429, 501, 503)


class EmbeddingsRequest(LenientModel):
    model: str | None = None
    input: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str] | list[list[int]], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Any = None  # accepted without effect

    def inputs(self) -> list[str | list[int]]:
        alone = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if alone else list(self.input)  # type: ignore[list-item, arg-type]


def embed(llm: LLM, ids: list[int], check_cancelled: Callable[[], None] = lambda: None) -> Tensor:
    """[hidden] float32 of length 1."""
    last, total = llm.config.num_layers, torch.zeros(llm.config.hidden_size)

    def add(engine: Engine, span: Span) -> None:
        nonlocal total
        hidden = engine.runner.forward([span], Taps(hidden=frozenset({last}))).hidden[last]
        states = engine.decoder.final_states(hidden).cpu()
        total = states[-1] if llm.config.pooling == "last" else total + states.sum(0)

    with torch.inference_mode():
        run_pieces(llm, ids, len(ids), add, check_cancelled)
    return torch.nn.functional.normalize(total, dim=0)


def add_embeddings(app: FastAPI, ctx: ServerContext) -> None:
    llm = ctx.llm

    def encoded(given: str | list[int]) -> list[int]:
        ids = llm.encode(given)
        check_token_ids(ids, llm.config.vocab_size)
        if not ids or len(ids) >= ctx.max_context:
            raise ctx.limit.too_long(f"a text has {len(ids)} tokens") if ids else ApiError(400, "a text is empty")
        return ids

    async def vectors(body: EmbeddingsRequest) -> tuple[list[Tensor], int]:
        given = body.inputs()
        for each in given:
            ctx.check_ids(each)
            await ctx.check_lengths([each] if isinstance(each, str) else [])
        ids = await ctx.pool.encode(lambda _: [encoded(each) for each in given])
        made = [await ctx.pool.score(lambda check, row=row: embed(llm, row, check)) for row in ids]  # type: ignore[misc]
        return made, sum(map(len, ids))

    @app.post("/v1/embeddings", responses=_ERRORS, include_in_schema=bool(llm.config.pooling))
    async def embeddings(body: EmbeddingsRequest, request: Request) -> dict[str, Any]:
        """Vectors of texts, by models that were trained for it."""
        ctx.check_model(body.model)
        if not llm.config.pooling:
            hint = "ask a server that runs an embedding model"
            raise ApiError(501, "this server has no embedding model", hint, code="not_implemented")
        size = body.dimensions or llm.config.hidden_size
        if size > llm.config.hidden_size:
            message = f"dimensions is {size}, the model has {llm.config.hidden_size}"
            raise ApiError(400, message, "ask for fewer", param="dimensions")
        with ctx.admission.admit(1, request.state.key):
            async with asyncio.timeout(ctx.config.max_request_s):
                made, tokens = await unless_disconnected(request.receive, vectors(body))
        cut = [torch.nn.functional.normalize(vector[:size], dim=0).numpy() for vector in made]
        return {
            "object": "list",
            "model": ctx.config.model_name,
            "data": [
                {"object": "embedding", "index": index, "embedding": _written(row, body.encoding_format)}
                for index, row in enumerate(cut)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def _written(vector: np.ndarray, form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
