"""Workers: several answers to one prompt that grow at once, each seeing the others' tokens as they appear.

`workers(llm, prompt, n)` runs on the engine's pool, between the engine's steps: other requests go on and are not
changed. What a worker sees is defined in `blocks`; here are requests, sampling, text and pages. All pages are taken
before the first token, so that a group that has begun can end; they go back when it ends, fails or is closed.

A worker starts with its prefix, which the others see too. Without a prefix its first token follows the prompt alone.
A worker that has ended stays in sight with all it has said, but for the token that means the end. One worker alone is
ordinary generation. Two workers with the same prefix, both greedy, would say the same for ever: by default prefixes
carry the workers' numbers.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from forerun.core import Draft, SamplingParams, Usage
from forerun.decode.sampling import Context
from forerun.decode.verifiers.match import MatchVerifier
from forerun.decode.verify import StepOutput, VerifyInput, verify
from forerun.engine.detokenize import TextStream
from forerun.engine.sequence import Event, FinishReason, Request
from forerun.engine.stats import settle
from forerun.errors import BadRequest, OutOfPages
from forerun.models.decoder import Output
from forerun.models.execution.runner import Span
from forerun.sharing.blocks import Block, BlockRunner

if TYPE_CHECKING:
    from forerun.decode.grammar import AnswerGrammar
    from forerun.llm import LLM, Messages, Prompt

MAX_WORKERS = 16
SEEDS = 1 << 64  # beyond this they repeat
PREFIX = "\n\nWorker {number}:"


def workers(
    llm: LLM,
    prompt: Prompt | Messages,
    n: int,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    prefixes: Sequence[Prompt] | None = None,
) -> Iterator[Event]:
    """Events of n workers as they come; `event.index` is the worker's number, from 0. Closing the iterator ends all.

    `params`: for all workers, or one for each; a seed given once counts up from worker to worker. `prefixes`: what each
    worker's block starts with, as text or token ids; None: its number, or nothing for one alone. What cannot run is
    refused here, before anything is touched.
    """
    return Workers(llm, prompt, n, params, prefixes).run()


class Worker:
    """One of the group: its block's tokens, those of them that still have to run, and how it samples."""

    def __init__(self, index: int, prompt: list[int], prefix: list[int], params: SamplingParams) -> None:
        self.index, self.prefix, self.params = index, prefix, params
        self.pending = list(prefix)
        seed = random.getrandbits(63) if params.seed is None else params.seed
        self.context = Context(params, [*prompt, *prefix], len(prompt) + len(prefix), seed)
        self.usage = Usage(prompt_tokens=len(prompt) + len(prefix))
        self.text: TextStream
        self.grammar: AnswerGrammar | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def most(self) -> int:
        """Tokens its block can come to hold."""
        return len(self.prefix) + self.params.max_tokens

    @property
    def num_generated(self) -> int:
        return len(self.context.tokens) - self.context.num_prompt


class Workers:
    """A group of workers on one prompt; checked when made, run once."""

    def __init__(
        self,
        llm: LLM,
        prompt: Prompt | Messages,
        n: int,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        prefixes: Sequence[Prompt] | None = None,
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_WORKERS:
            raise BadRequest(f"n is {n!r}, there can be 1 to {MAX_WORKERS} workers", "choose a number in that range")
        self._llm, self._engine, self._driver = llm, llm.engine, llm._driver
        self._prompt_ids = llm.encode(prompt)
        each = zip(_params(params, n), _prefixes(llm, prefixes, n), strict=True)
        self.workers = [Worker(i, self._prompt_ids, prefix, own) for i, (own, prefix) in enumerate(each)]
        self._check()

    def _check(self) -> None:
        config, pool = self._engine.config, self._engine.pool
        for worker in self.workers:
            _check_params(worker.params)
            self._engine.check(worker.context.tokens, worker.params)
        blocks = sum(worker.most for worker in self.workers)
        if len(self._prompt_ids) + blocks > config.max_model_len:
            raise BadRequest(
                f"the prompt has {len(self._prompt_ids)} tokens and the blocks of {len(self.workers)} workers up to "
                f"{blocks}, the context holds {config.max_model_len}: every worker sees them all",
                "lower max_tokens, take fewer workers, or shorten the prompt or prefixes",
            )
        if self._num_pages > pool.num_pages:
            raise OutOfPages(
                f"{len(self.workers)} workers need {self._num_pages} pages of {pool.page_size} tokens, the KV pool has "
                f"{pool.num_pages}",
                "lower max_tokens, take fewer workers, or raise kv_cache_tokens",
            )

    @property
    def _num_pages(self) -> int:
        """The first worker's block follows the prompt on its pages; the others have pages of their own."""
        first, *others = (worker.most for worker in self.workers)
        pages_for = self._engine.pool.pages_for
        return pages_for(len(self._prompt_ids) + first) + sum(pages_for(most) for most in others)

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[Event]:
        self._driver.check_open()
        return self._events()

    def _events(self) -> Iterator[Event]:
        request = Request(self._prompt_ids, self.workers[0].params, sink=lambda event: None)
        self._id, self._arrived = request.id, request.arrived
        self._loan = self._engine.loans.lend()
        self._pages = self._loan.pages
        with self._driver._stepping():
            try:
                with self._turn():
                    known = self._take_pages()
                    for worker in self.workers:
                        self._start(worker, known)
                yield from self._prefill(known)
                while any(worker.finish_reason is None for worker in self.workers):
                    with self._turn():
                        events = self._step()
                    yield from events
            finally:
                self._engine.loans.give_back(self._loan)
                self._driver.collect()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine to itself, after one of its own steps: those who wait for other requests get every second turn."""
        with self._driver._lock:
            self._driver.check_open()
            self._loan.check()
            self._loan.use()
            if not self._engine.idle:
                self._engine.step()
            yield

    def _take_pages(self) -> int:
        """All pages that the group can come to need; how many of the prompt's tokens have K/V on them already."""
        pool, tree = self._engine.pool, self._engine.scheduler.tree
        # at least one token must run, or there would be no logits to sample from
        known = tree.match(self._prompt_ids[:-1]) if tree is not None else []
        first = array("i", known)
        pool.retain(first)
        self._pages.append(first)
        if not self._engine.scheduler.make_room(self._num_pages - len(known)):
            raise OutOfPages(
                f"{len(self.workers)} workers need {self._num_pages - len(known)} more pages of {pool.page_size} "
                f"tokens, {pool.free} of {pool.num_pages} are free while other requests run",
                "ask again when fewer requests run, lower max_tokens, or raise kv_cache_tokens",
            )
        missing = pool.pages_for(len(self._prompt_ids) + self.workers[0].most) - len(known)
        first.extend(pool.allocate(missing, after=first[-1] if first else None))
        for worker in self.workers[1:]:
            self._pages.append(array("i", pool.allocate(pool.pages_for(worker.most))))
        prompt = Block(first, 0, len(self._prompt_ids))
        blocks = [Block(first, prompt.length), *(Block(pages) for pages in self._pages[1:])]
        self._runner = BlockRunner(self._engine.runner, prompt, blocks)
        return len(known) * pool.page_size

    def _start(self, worker: Worker, known: int) -> None:
        worker.text = TextStream(self._llm.tokenizer.stream(), worker.params.stop)
        worker.usage.cached_tokens = len(self._prompt_ids) if worker.index else known  # the first computes for all
        worker.usage.served = {"pool": worker.usage.cached_tokens}
        worker.usage.queued_s = time.perf_counter() - self._arrived
        if worker.params.grammar is not None:
            worker.grammar = self._engine.intake.grammars.constraint(worker.params.grammar)
            worker.context.constraint = worker.grammar

    def _prefill(self, at: int) -> Iterator[Event]:
        """Compute the prompt in chunks, others' steps between them; workers without a prefix draw their first token."""
        ids, chunk, pages = self._prompt_ids, self._engine.config.max_num_batched_tokens, self._pages[0]
        bare = [worker for worker in self.workers if not worker.prefix]
        while at < len(ids):
            events: list[Event] = []
            with self._turn():
                span = Span(ids[at : at + chunk], at, pages, ())
                at = span.entries.stop
                if at == len(ids) and bare:
                    span.logits_indices = (len(span.ids) - 1,)
                output = self._engine.runner.forward([span])
                if at == len(ids) and self._engine.scheduler.tree is not None:
                    new = self._engine.scheduler.tree.insert(ids, pages)
                    self.workers[0].usage.written = new * self._engine.pool.page_size
                if at == len(ids) and bare:
                    events = self._settle(bare, Output(output.logits.expand(len(bare), -1)))
            yield from events

    def _step(self) -> list[Event]:
        """All workers' tokens that have not run yet, in one forward; then a new one for each that goes on."""
        start = time.perf_counter()
        going = [worker for worker in self.workers if worker.finish_reason is None]
        new = [worker.pending for worker in self.workers]
        output = self._runner.forward(new, [worker.index for worker in going])
        for worker in self.workers:
            worker.pending = []
        for worker in going:
            worker.usage.verify_s += time.perf_counter() - start if worker.num_generated else 0.0
        return self._settle(going, output)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _settle(self, going: list[Worker], output: Output) -> list[Event]:
        """One more token for each of these workers, from its row of logits."""
        rulings = verify(output, [VerifyInput(worker.context, Draft(), MatchVerifier()) for worker in going])
        return [self._append(worker, ruling) for worker, ruling in zip(going, rulings, strict=True)]

    def _append(self, worker: Worker, ruling: StepOutput) -> Event:
        event = Event(self._id, worker.index)
        if ruling.error is not None:  # this one is over, the others go on
            event.error = ruling.error
            return self._finish(worker, "error", event)
        (token,) = ruling.tokens
        if not worker.num_generated:
            worker.usage.ttft_s = time.perf_counter() - self._arrived
        worker.context.tokens.append(token)
        worker.usage.steps += 1
        event.token_ids, event.logprobs, event.text = [token], ruling.logprobs, worker.text.push(token)
        if worker.grammar is not None:
            worker.grammar.advance([token])
        ends = not worker.params.ignore_eos or worker.grammar is not None  # a grammar's end is an end
        eos = ends and token in self._engine.decoder.config.eos_ids
        if not eos:  # the others see it, even if it is this worker's last
            worker.pending = [token]
        if eos or worker.text.stopped:
            return self._finish(worker, "stop", event)
        return self._finish(worker, "length", event) if worker.num_generated >= worker.params.max_tokens else event

    def _finish(self, worker: Worker, reason: FinishReason, event: Event) -> Event:
        worker.finish_reason = event.finish_reason = reason
        event.text += worker.text.flush()
        worker.usage.completion_tokens = worker.num_generated
        worker.usage.total_s = time.perf_counter() - self._arrived
        settle(worker.usage, 0, worker.usage.prompt_tokens)
        self._engine.stats.book(None, worker.usage, finished=reason != "error")
        event.usage = worker.usage
        return event


# -- what was given ----------------------------------------------------------------------------------------------------


def _params(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    given = params
    if params is None or isinstance(params, SamplingParams):
        own = params or SamplingParams()
        given = [own if own.seed is None else replace(own, seed=(own.seed + i) % SEEDS) for i in range(n)]
    if not isinstance(given, Sequence) or not all(isinstance(own, SamplingParams) for own in given):
        raise BadRequest(f"params must be SamplingParams, got {params!r:.80}", "pass SamplingParams(max_tokens=...)")
    if len(given) != n:
        raise BadRequest(f"there are params for {len(given)} workers, n is {n}", "give one for all, or one for each")
    return list(given)


def _check_params(params: SamplingParams) -> None:
    if params.n != 1:
        raise BadRequest(f"params ask for n={params.n} answers of each worker", "give the number of workers instead")
    if not params.prefilling.exact:
        raise BadRequest(f"workers cannot start from {params.prefilling.mode} prefill", "leave prefill out")
    if params.speculation.drafter not in ("auto", "off"):
        raise BadRequest(
            f"workers do not guess ahead, params name the drafter {params.speculation.drafter}",
            "leave speculate out: every step of a worker changes what the others see",
        )


def _prefixes(llm: LLM, prefixes: Sequence[Prompt] | None, n: int) -> list[list[int]]:
    if prefixes is None:
        prefixes = [PREFIX.format(number=i + 1) if n > 1 else "" for i in range(n)]
    if isinstance(prefixes, str) or not isinstance(prefixes, Sequence):
        raise BadRequest(f"prefixes must be a list with one for each worker, got {prefixes!r:.80}", "pass a list")
    if len(prefixes) != n:
        raise BadRequest(f"there are prefixes for {len(prefixes)} workers, n is {n}", "give one for each worker")
    return [llm.tokenizer.encode(prefix) if isinstance(prefix, str) else llm.encode(prefix) for prefix in prefixes]
