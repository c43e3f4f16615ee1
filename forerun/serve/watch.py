"""What the page asks beside answers: what this server can do, what its prefix tree holds, how text becomes tokens.

Nobody's text is told to anybody else, unless the server was started so: of the tree there are counts, and words only
where they are part of the text that was sent along. All sizes are bounded, whatever the tree or the text.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from forerun.cache.outline import Run
from forerun.decode.drafter_pool import AUTO_FREE_DRAFTERS
from forerun.errors import ForerunError
from forerun.params import PREFILLS, Prefill
from forerun.serve.answer import Service
from forerun.text.tokenizer import Tokenizer

MOST_RUNS = 200
_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 401, 408, 413), {"description": "An error in OpenAI's form"}
)
_ERRORS[422] = {"description": "Never sent: what does not fit the schema is answered with 400"}


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class Conversation(BaseModel):
    """Text as a chat request would have it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    messages: list[_Message] = Field(min_length=1)

    @property
    def plain(self) -> list[dict[str, str]]:
        return [message.model_dump() for message in self.messages]


def add_watch(app: FastAPI, service: Service) -> None:
    @app.get("/forerun/about")
    async def about() -> dict[str, Any]:
        """The model, the limits, and what a request may ask for."""
        return await asyncio.to_thread(_about, service)

    @app.get("/forerun/stats")
    async def stats() -> dict[str, Any]:
        """How prompt tokens were served and what answers cost so far; sessions only as a number."""
        record = (await asyncio.to_thread(service.llm.stats)).record()
        return record | {"sessions": len(record["sessions"]), "open": service.gate.open}

    @app.get("/forerun/tree")
    async def tree() -> dict[str, Any]:
        """What the prefix tree holds and how often it was read."""
        return await asyncio.to_thread(_tree, service, None)

    @app.post("/forerun/tree", responses=_ERRORS)
    async def own_tree(asked: Conversation) -> dict[str, Any]:
        """The same, with the way of one conversation through it."""
        return await asyncio.to_thread(_tree, service, asked.plain)

    @app.post("/forerun/tokens", responses=_ERRORS)
    async def tokens(asked: Conversation) -> dict[str, Any]:
        """The prompt that a conversation becomes, token by token; of one that does not fit, only their number."""
        return await asyncio.to_thread(_tokens, service, asked.plain)


def _about(service: Service) -> dict[str, Any]:
    llm, config = service.llm, service.config
    return {
        "model": config.model_name,
        "context": service.context,
        "layers": llm.config.num_layers,
        "weights": llm.precision.name,
        "device": llm.decoder.device.type,
        "max_body_bytes": config.max_body_bytes,
        "prefill": {mode: _why_not(service, mode) for mode in PREFILLS},
        "speculate": [
            "auto",
            "off",
            *dict.fromkeys((*(name for name in AUTO_FREE_DRAFTERS if name != "grammar"), *config.drafters)),
        ],
        "shows_prompts": config.show_prompts,
    }


def _why_not(service: Service, mode: str) -> str | None:
    """Why no prompt can be prefilled so; None where it can."""
    try:
        service.llm.engine.drafting.prepare(Prefill(mode))
    except ForerunError as error:
        return str(error)
    return None


def _tree(service: Service, own: list[dict[str, str]] | None) -> dict[str, Any]:
    seen = service.llm.prefixes(own, MOST_RUNS)
    return {
        "tokens": seen.tokens,
        "page_size": seen.page_size,
        "runs": [_run(service, run) for run in seen.runs],
        "left_out": seen.left_out,
    }


def _run(service: Service, run: Run) -> dict[str, Any]:
    told = {name: getattr(run, name) for name in ("parent", "tokens", "branches", "reads", "readers", "shared")}
    known = run.first if service.config.show_prompts else run.first[: run.shared]  # of others' words not one
    return told | {"text": service.llm.tokenizer.decode(known, skip_special=False)} if known else told


def _tokens(service: Service, messages: list[dict[str, str]]) -> dict[str, Any]:
    ids = service.llm.encode(messages)
    fits = len(ids) < service.context
    return {
        "tokens": len(ids),
        "context": service.context,
        "pieces": _pieces(service.llm.tokenizer, ids) if fits else [],
    }


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text: of a character that several make up, the last one has it all."""
    stream = tokenizer.stream(skip_special=False)
    pieces = [stream.push(token) for token in ids]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces
