"""The engine: requests in, events out, one step at a time.

`step` is the whole story: schedule, run, sample, advance. The engine owns the pool, the prefix tree and the sequences;
it does not know files, prompts as text, threads or HTTP. One thread steps at a time; `submit` and `cancel` may come
from any.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.core import SamplingParams
from forerun.engine.runner import Runner
from forerun.engine.sampler import Sampled, sample
from forerun.engine.scheduler import Scheduler, Work
from forerun.engine.sequence import Event, FinishReason, Request, Sequence
from forerun.engine.text import TextStream
from forerun.errors import BadRequest, OutOfPages
from forerun.models.decoder import Decoder
from forerun.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine; every value is checked on creation."""

    max_context: int
    pool_tokens: int
    page_size: int = 16
    max_batch: int = 64
    chunk_tokens: int = 512
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_context", "pool_tokens", "page_size", "max_batch", "chunk_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{name} is {value!r}, it must be a whole number of at least 1", f"raise {name}")
        if self.chunk_tokens < self.max_batch:
            raise BadRequest(
                f"chunk_tokens is {self.chunk_tokens}, less than max_batch {self.max_batch}",
                "a step must hold one token of every running request: raise chunk_tokens or lower max_batch",
            )
        if self.pool_tokens < 2 * self.page_size:
            raise BadRequest(f"pool_tokens is {self.pool_tokens}, less than two pages of {self.page_size}", "raise it")

    @property
    def capacity(self) -> int:
        """Tokens that whole pages of the pool hold; one sequence can never have more."""
        return self.pool_tokens // self.page_size * self.page_size


class Engine:
    """Continuous batching on one decoder, one page pool and one prefix tree."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self.decoder, self.tokenizer, self.config = decoder, tokenizer, config
        num_pages = config.pool_tokens // config.page_size
        self.pool = PagePool(decoder.config, num_pages, config.page_size, decoder.dtype, decoder.device)
        self.tree = PrefixTree(self.pool)
        self.runner = Runner(decoder, self.pool, config.max_context)
        self.scheduler = Scheduler(
            self.pool, self.tree if config.prefix_cache else None, config.max_batch, config.chunk_tokens
        )
        self._inbox: deque[Request] = deque()
        self._cancelled: deque[int] = deque()
        self._texts: dict[Sequence, TextStream] = {}

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one batch and send its events; False when there was nothing to do."""
        self.take_in()
        work = self.scheduler.schedule()
        if not work:
            return False
        output = self.runner.run(work)  # one row of logits per work that samples
        sampled = iter(sample(output, [w.seq for w in work if w.samples]))
        for w in work:
            self._advance(w, next(sampled) if w.samples else None)
        return True

    def _advance(self, work: Work, sampled: Sampled | None) -> None:
        """Book what was computed; append and publish the token that was drawn."""
        seq, was_prefilling = work.seq, work.seq.prefilling
        seq.computed += work.count
        if was_prefilling and not seq.prefilling:
            self.scheduler.remember(seq)  # so that others can read the prompt while this one decodes
        if sampled is not None:
            self._append(seq, sampled)

    def _append(self, seq: Sequence, sampled: Sampled) -> None:
        if not seq.num_generated:
            seq.usage.ttft_s = time.perf_counter() - seq.request.arrived
        seq.tokens.append(sampled.token_id)
        text = self._text(seq).push(sampled.token_id) if self.tokenizer else ""
        event = Event(seq.request.id, seq.index, text, [sampled.token_id])
        if sampled.logprob is not None:
            event.logprobs.append(sampled.logprob)
        reason = self._finish_reason(seq)
        if reason is not None:
            self._finish(seq, reason, event)
        else:
            self._send(seq, event)

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        stopped = self.tokenizer is not None and self._text(seq).stopped
        if stopped or (seq.tokens[-1] in self.decoder.config.eos_ids and not seq.params.ignore_eos):
            return "stop"
        full = len(seq.tokens) >= min(self.config.max_context, self.config.capacity)
        return "length" if full or seq.num_generated >= seq.params.max_tokens else None

    def _finish(self, seq: Sequence, reason: FinishReason, event: Event) -> None:
        if self.tokenizer is not None:
            event.text += self._text(seq).flush()
        self._texts.pop(seq, None)
        self.scheduler.finish(seq)
        seq.usage.completion_tokens = seq.num_generated
        seq.usage.total_s = time.perf_counter() - seq.request.arrived
        event.finish_reason, event.usage = reason, seq.usage
        self._send(seq, event)

    def _send(self, seq: Sequence, event: Event) -> None:
        """A reader that fails is cut off; nobody else in the batch notices."""
        try:
            seq.request.sink(event)
        except Exception:
            self._cancelled.append(seq.request.id)

    def _text(self, seq: Sequence) -> TextStream:
        assert self.tokenizer is not None
        if seq not in self._texts:
            self._texts[seq] = TextStream(self.tokenizer.stream(), seq.params.stop)
        return self._texts[seq]

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Check a request and queue it; raises `BadRequest` before anything is touched."""
        self.check(request.prompt_ids, request.params)
        self._inbox.append(request)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step, whatever it is doing, and free its pages."""
        self._cancelled.append(request_id)

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        vocab, limit = self.decoder.config.vocab_size, self.config.max_context
        if not prompt_ids:
            raise BadRequest("the prompt is empty", "give at least one token of text")
        if len(prompt_ids) >= limit:
            raise BadRequest(
                f"the prompt has {len(prompt_ids)} tokens, the context holds {limit} with the answer",
                "shorten the prompt, or load the model with a larger max_context",
            )
        if len(prompt_ids) >= self.config.capacity:
            raise OutOfPages(
                f"the prompt has {len(prompt_ids)} tokens, the KV pool holds {self.config.capacity} with the answer",
                "shorten the prompt, or raise pool_tokens",
            )
        for token in (*prompt_ids, *params.logit_bias):
            if not isinstance(token, int) or not 0 <= token < vocab:
                raise BadRequest(
                    f"token id {token!r} is not in the vocabulary of {vocab}", "encode with this model's tokenizer"
                )

    def take_in(self) -> None:
        """Queue what was submitted and end what was cancelled, without running anything."""
        while self._inbox:
            request = self._inbox.popleft()
            seed = request.params.seed if request.params.seed is not None else random.getrandbits(63)
            for index in range(request.params.n):
                self.scheduler.add(Sequence(request, index, seed + index))
        while self._cancelled:
            self._drop(self._cancelled.popleft())

    def _drop(self, request_id: int) -> None:
        for seq in [s for s in self.scheduler.everyone if s.request.id == request_id]:
            self._finish(seq, "cancelled", Event(request_id, seq.index))

    def end_all(self, error: Exception | None = None) -> None:
        """End every request: cancelled, or with the error that hit them all."""
        self.take_in()
        for seq in self.scheduler.everyone:
            self._finish(seq, "error" if error else "cancelled", Event(seq.request.id, seq.index, error=error))

    @property
    def idle(self) -> bool:
        return not self._inbox and not self._cancelled and self.scheduler.idle

    # -- looking inside ------------------------------------------------------------------------------------------------

    def score(self, ids: list[int]) -> Tensor:
        """Logits at every position of a text, [len(ids), V] float32; for measuring, between steps."""
        self.check(ids, SamplingParams())
        self.clear_cache()
        return self.runner.score(ids, self.config.chunk_tokens)

    def time_forward(self, tokens: int, context: int) -> float:
        """Median seconds of one forward of `tokens` tokens after `context` others; for measuring, between steps."""
        self.clear_cache()
        return self.runner.time_forward(tokens, context)

    def clear_cache(self) -> None:
        """Forget all prefixes; running sequences keep their own pages."""
        self.tree.clear()
