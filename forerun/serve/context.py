"""What all requests of a server share, and how a request's body becomes a request of the engine."""

from __future__ import annotations

from dataclasses import dataclass
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
from forerun.serve.metrics import Metrics
from forerun.serve.schema import ChatRequest, CompletionRequest
from forerun.serve.sessions import ServerSessions, SessionTurn
from forerun.serve.tools import ChatPrompt, ToolUse


@dataclass(frozen=True)
class ServerContext:
    llm: LLM
    config: ServeConfig
    admission: AdmissionControl
    metrics: Metrics
    sessions: ServerSessions

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its completion."""
        engine = self.llm.engine.config
        return min(self.config.max_model_len or engine.max_model_len, engine.max_model_len, engine.capacity)

    def prepare(self, prompt: Any, body: ChatRequest | CompletionRequest, tools: ToolUse | None) -> Request:
        """Encode a prompt, check the request and pack it, each once; raises where something is wrong. May take long: it
        runs in a worker thread, and the event loop only queues what it returns."""
        turn = isinstance(prompt, SessionTurn)
        ids = prompt.encode(self.llm.tokenizer) if turn or isinstance(prompt, ChatPrompt) else self.llm.encode(prompt)
        if len(ids) >= self.max_context:
            message = f"the prompt has {len(ids)} tokens, the context holds {self.max_context} with the answer"
            raise ApiError(400, message, "shorten the prompt", code="context_length_exceeded")
        params = body.params(self.max_context - len(ids), tools, self.llm.tokenizer.encode)
        self._check_drafters(params)
        return self.llm.request(ids, params, prompt.session_name if turn else None)

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
