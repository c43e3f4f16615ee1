"""What all requests of a server share, and how a request's body becomes a request of the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from forerun.core import SamplingParams
from forerun.decode.drafter_pool import AUTO_FREE_DRAFTERS
from forerun.engine.sequence import Request
from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.params import PREFILL_MODES
from forerun.serve.admission import AdmissionControl
from forerun.serve.config import ServeConfig
from forerun.serve.errors import ApiError
from forerun.serve.fill import FillPrompt, fill_tokens
from forerun.serve.metrics import Metrics
from forerun.serve.preparation import PIECE_CHARS, PreparationPool, PromptLimit
from forerun.serve.prompt_pins import PromptPins
from forerun.serve.schema import ChatRequest, CompletionRequest
from forerun.serve.sessions import ServerSessions, SessionTurn
from forerun.serve.tools import ChatPrompt, ToolUse

IGNORED_HEADER = "x-forerun-ignored"  # of responses: fields of the request that had no effect
MAX_NAMED_FIELDS = 20
UNLIMITED_POOL_DIVISOR = 4  # an answer whose request has no limit takes at most such a part of the pool's tokens


@dataclass(frozen=True)
class ServerContext:
    llm: LLM
    config: ServeConfig
    admission: AdmissionControl
    metrics: Metrics
    sessions: ServerSessions
    pins: PromptPins
    pool: PreparationPool
    limit: PromptLimit

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its completion."""
        return self.limit.max_tokens

    async def prepare(self, prompt: Any, body: ChatRequest | CompletionRequest, tools: ToolUse | None) -> Request:
        """Encode a prompt, check the request and pack it, each once; raises where something is wrong. All of it runs in
        worker threads, and the event loop only queues what it returns."""
        if not body.constrained and tools is None:
            return await self.pool.encode(lambda _: self._request(self._encode(prompt), body, tools, prompt))
        ids = await self.pool.encode(lambda _: self._encode(prompt))
        return await self.pool.compile(lambda: self._request(ids, body, tools, prompt))

    def check_model(self, model: str | None) -> None:
        name = self.config.model_name
        if model not in (None, name):
            raise ApiError(404, f"there is no model {model!r:.80}", f"ask for {name}", code="model_not_found")

    def ignored(self, fields: list[str]) -> dict[str, str]:
        """A header that names fields without effect; an error where the server is strict."""
        if not fields:
            return {}
        if self.config.strict:
            message = f"{fields[0]!r:.120} is not supported here"
            hint = "leave it out, or have the server started without --strict"
            raise ApiError(400, message, hint, param=fields[0][:120])
        self.metrics.ignored_fields.inc(len(fields))
        # a header value may neither be empty nor end in a space: a field without a name is shown as one, too
        shown = [re.sub(r"[^A-Za-z0-9_.-]", "?", field)[:80] or "?" for field in fields[:MAX_NAMED_FIELDS]]
        return {IGNORED_HEADER: ", ".join(shown)}

    async def check_lengths(self, texts: list[str]) -> None:
        """Refuse what cannot fit the context before all of it is tokenised."""
        self.limit.check_size(texts)
        if sum(map(len, texts)) > PIECE_CHARS:
            await self.pool.encode(lambda check: self.limit.check_tokens(texts, check))

    def check_ids(self, prompt: Any) -> None:
        """Refuse a prompt of too many token ids: nothing has to be encoded for that."""
        if isinstance(prompt, list) and len(prompt) >= self.max_context:
            raise self.limit.too_long(f"the prompt has {len(prompt)} tokens")

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, (SessionTurn, ChatPrompt, FillPrompt)):
            ids = prompt.encode(self.llm.tokenizer)
        else:
            self.check_ids(prompt)
            ids = self.llm.encode(prompt)
        if len(ids) >= self.max_context:
            raise self.limit.too_long(f"the prompt has {len(ids)} tokens")
        return ids

    def _encode_start(self, text: str) -> list[int]:
        """Tokens of a text as far as a context could hold them: what comes after would be of no use."""
        return self.llm.tokenizer.encode(text[: self.limit.max_chars])

    def _request(
        self, ids: list[int], body: ChatRequest | CompletionRequest, tools: ToolUse | None, prompt: Any
    ) -> Request:
        params = body.params(self.max_context - len(ids), tools, self._encode_start)
        if not body.has_limit:
            most = self.llm.engine.config.capacity // UNLIMITED_POOL_DIVISOR
            params = replace(params, max_tokens=min(params.max_tokens, max(1, most)))
        if isinstance(prompt, FillPrompt):
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *fill_tokens(self.llm.tokenizer)))
        self._check_drafters(params)
        session = prompt.session_name if isinstance(prompt, SessionTurn) else None
        return self.llm.driver.request(ids, params, session, looks_ahead=False)

    async def look_ahead(self, request: Request) -> None:
        """For an answer that is drawn from the model conditioned on its grammar; before it is queued."""
        if request.params.conditional:
            await self.pool.score(lambda check: self.llm.driver.look_ahead(request, check))

    def _check_drafters(self, params: SamplingParams) -> None:
        """Free drafters are made at once; others are timed or searched for, which would block all open requests."""
        drafter_pool = self.llm.engine.speculator.drafter_pool
        names = drafter_pool.names(params)
        if params.prediction and "copy" not in names:
            hint = "leave forerun.speculation as it is, or leave prediction out"
            raise ApiError(400, "prediction is what the drafter copy guesses from, and it is off", hint)
        for name in names:
            if name not in AUTO_FREE_DRAFTERS and not drafter_pool.ready(SamplingParams(speculation=name)):
                hint = "use auto or off, or have the server started with --drafter"
                raise ApiError(400, f"this server has not prepared the drafter {name}", hint)

    def warm_up(self) -> None:
        """Make the drafters and prefill sources that requests may name, before the first request."""
        for name in ("auto", *self.config.drafters):
            self.llm.prepare(SamplingParams(speculation=name))
        for mode in PREFILL_MODES:
            self.prefill_problem(mode)

    def prefill_problem(self, mode: str) -> ForerunError | None:
        """Why no prompt can be prefilled in this mode; None where it can, and then its sources exist afterwards."""
        try:
            self.llm.prepare(SamplingParams(prefill=mode))
        except ForerunError as error:
            return error
        return None


def context_size(llm: LLM, config: ServeConfig) -> int:
    """Most tokens of a prompt and its completion."""
    engine = llm.engine.config
    return min(config.max_model_len or engine.max_model_len, engine.max_model_len, engine.capacity)


def prompt_texts(prompt: Any) -> list[str]:
    """What a prompt has to be tokenised: messages, or a text; token ids are counted without that."""
    if isinstance(prompt, SessionTurn):
        return prompt.texts if prompt.encode_all is not None else prompt_texts(prompt.content)
    if isinstance(prompt, ChatPrompt):
        return prompt.texts
    if isinstance(prompt, FillPrompt):
        return [prompt.prefix, prompt.suffix]
    return [prompt] if isinstance(prompt, str) else []
