"""Workers: several answers to one prompt that grow at once, each seeing the others' tokens as they are generated.

`Workers` runs under a lease, between the engine's steps: other requests go on and are not changed. What
a worker sees is defined in `blocks`; here are requests, sampling and pages. A worker is a sequence of the engine that
the scheduler does not know; its tokens become events where all others do. All pages are allocated before the first
token, so that a group that has begun can finish; they are released when it finishes, fails or is closed.

A worker's block starts with its prefix, which the others see too. Without a prefix its first token follows the prompt
alone. A worker that has finished stays visible with all its tokens, except for an end-of-sequence token. One worker
alone is ordinary generation. Two greedy workers with the same prefix would generate the same tokens: the default
prefixes carry the workers' numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from forerun.core import Draft, SamplingParams
from forerun.decode.verifiers.base import MatchVerifier
from forerun.decode.verify import StepOutput, VerifyInput, verify
from forerun.engine.sequence import Event, FinishReason, Request, Sequence
from forerun.errors import BadRequest, OutOfPages
from forerun.llm import LLM, Messages, Prompt
from forerun.models.decoder import Output
from forerun.options import check_number
from forerun.runtime.lease import EngineLease
from forerun.sharing.blocks import BlockRunner, WorkerBlock

MAX_WORKERS = 16
NUM_SEEDS = 1 << 64  # seeds are taken modulo this
DEFAULT_PREFIX = "\n\nWorker {number}:"


class Worker:
    """One of the group: its sequence (prompt, prefix, answer), and the tokens of its block that have not run yet."""

    def __init__(self, request: Request, index: int, prefix: list[int]) -> None:
        seed = random.getrandbits(63) if request.params.seed is None else request.params.seed
        self.seq = Sequence(request, index, seed)
        self.prefix, self.pending = prefix, list(prefix)
        self.finish_reason: FinishReason | None = None

    @property
    def max_block_tokens(self) -> int:
        """Tokens its block can come to hold."""
        return len(self.prefix) + self.seq.params.max_tokens


class Workers:
    """A group of workers on one prompt; checked when made, before anything is touched, and run once.

    `params`: for all workers, or one for each; a seed given once counts up from worker to worker. `prefixes`: what each
    worker's block starts with, as text or token ids; None: its number, or nothing for one alone.
    """

    def __init__(
        self,
        llm: LLM,
        prompt: Prompt | Messages,
        n: int,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        prefixes: Seq[Prompt] | None = None,
    ) -> None:
        check_number("n", n, 1, MAX_WORKERS, whole=True)
        self._engine, self._driver = llm.engine, llm.driver
        self._request = Request(llm.encode(prompt), SamplingParams(), sink=lambda event: None)  # of the whole group
        each = zip(_params(params, n), _prefixes(llm, prefixes, n), strict=True)
        self.workers: list[Worker] = []
        for own, prefix in each:
            _check_params(own)
            request = replace(self._request, prompt_ids=[*self._request.prompt_ids, *prefix], params=own)
            self._engine.intake.receive(request)
            self.workers.append(Worker(request, len(self.workers), prefix))
        self._check()

    def _check(self) -> None:
        config, pool = self._engine.config, self._engine.pool
        blocks = sum(worker.max_block_tokens for worker in self.workers)
        if self._num_prompt + blocks > config.max_model_len:
            raise BadRequest(
                f"the prompt has {self._num_prompt} tokens and the blocks of {len(self.workers)} workers up to "
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
    def _num_prompt(self) -> int:
        return len(self._request.prompt_ids)

    @property
    def _num_pages(self) -> int:
        """The first worker's block follows the prompt on its pages; the others have pages of their own."""
        first, *others = (worker.max_block_tokens for worker in self.workers)
        pages_for = self._engine.pool.pages_for
        return pages_for(self._num_prompt + first) + sum(pages_for(tokens) for tokens in others)

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[Event]:
        """Events as they come; `event.index` is the worker's number, from 0. Closing the iterator ends all."""
        self._driver.check_open()
        return self._events()

    def _events(self) -> Iterator[Event]:
        self._request.arrived = time.perf_counter()
        for worker in self.workers:
            worker.seq.request.arrived = self._request.arrived
        with self._driver.lease() as lease:
            with lease.exclusive():
                known = self._allocate(lease)
                for worker in self.workers:
                    self._start(worker, known)
            yield from self._prefill(lease, known)
            while any(worker.finish_reason is None for worker in self.workers):
                with lease.exclusive():
                    events = self._step()
                yield from events

    def _allocate(self, lease: EngineLease) -> int:
        """All pages that the group can come to need; how many of the prompt's tokens have K/V on them already."""
        pool = self._engine.pool
        # at least one token must run, or there would be no logits to sample from
        first = lease.hold_prefix(self._engine, self._request.prompt_ids[:-1])
        known = len(first)
        if not self._engine.scheduler.make_room(self._num_pages - known):
            raise OutOfPages(
                f"{len(self.workers)} workers need {self._num_pages - known} more pages of {pool.page_size} "
                f"tokens, {pool.free} of {pool.num_pages} are free while other requests run",
                "ask again when fewer requests run, lower max_tokens, or raise kv_cache_tokens",
            )
        lease.pages.extend(first, self._num_prompt + self.workers[0].max_block_tokens)
        blocks = [WorkerBlock(first, self._num_prompt)]
        for worker in self.workers[1:]:
            blocks.append(WorkerBlock(lease.pages.hold()))
            lease.pages.extend(blocks[-1].pages, worker.max_block_tokens)
        self._runner = BlockRunner(self._engine.runner, WorkerBlock(first, 0, self._num_prompt), blocks)
        return known * pool.page_size

    def _start(self, worker: Worker, known: int) -> None:
        seq = worker.seq
        seq.usage.cached_tokens = self._num_prompt if seq.index else known  # the first computes for all
        seq.usage.served = {"pool": seq.usage.cached_tokens}
        seq.usage.queued_s = time.perf_counter() - seq.request.arrived
        if seq.params.grammar is not None:
            seq.grammar = seq.sampling_context.constraint = self._engine.intake.constraint(seq.params.grammar)

    def _prefill(self, lease: EngineLease, known: int) -> list[Event]:
        """Compute the prompt; workers without a prefix draw their first token from its logits."""
        bare = [worker for worker in self.workers if not worker.prefix]
        events: list[Event] = []

        def draw(output: Output) -> None:
            events.extend(self._sample(bare, Output(output.logits.expand(len(bare), -1))))

        row, usage = self._runner.prompt.pages, self.workers[0].seq.usage
        usage.written = lease.prefill(self._request.prompt_ids, row, known, draw if bare else None)
        return events

    def _step(self) -> list[Event]:
        """All workers' tokens that have not run yet, in one forward; then a new one for each that has not finished."""
        start = time.perf_counter()
        running = [worker for worker in self.workers if worker.finish_reason is None]
        output = self._runner.forward([w.pending for w in self.workers], [w.seq.index for w in running])
        for worker in self.workers:
            worker.pending = []
        for worker in running:
            worker.seq.usage.verify_s += time.perf_counter() - start if worker.seq.num_generated else 0.0
        return self._sample(running, output)

    def _sample(self, running: list[Worker], output: Output) -> list[Event]:
        """One more token for each of these workers, from its row of logits."""
        inputs = [VerifyInput(worker.seq.sampling_context, Draft(), MatchVerifier()) for worker in running]
        steps = verify(output, inputs)
        return [self._append(worker, step) for worker, step in zip(running, steps, strict=True)]

    def _append(self, worker: Worker, step: StepOutput) -> Event:
        seq, writer = worker.seq, self._engine.output
        reason: FinishReason | None
        if step.error is not None:  # this one is over, the others go on
            event, reason = Event(seq.request.id, seq.index, error=step.error), "error"
        else:
            event, reason = writer.append(seq, step)
            if not writer.ends_with_eos(seq):  # the others see it, even if it is this worker's last
                worker.pending = event.token_ids[-1:]
        if reason is not None:
            worker.finish_reason = reason
            seq.finish_usage(finished=True)  # all of its prompt has run
            writer.finish(seq, reason, event)
        return event


# -- arguments -------------------------------------------------------------------------------------------------------


def _params(params: SamplingParams | Seq[SamplingParams] | None, n: int) -> list[SamplingParams]:
    given = params
    if params is None or isinstance(params, SamplingParams):
        own = params or SamplingParams()
        given = [own if own.seed is None else replace(own, seed=(own.seed + i) % NUM_SEEDS) for i in range(n)]
    if not isinstance(given, Seq) or not all(isinstance(own, SamplingParams) for own in given):
        raise BadRequest(f"params must be SamplingParams, got {params!r:.80}", "pass SamplingParams(max_tokens=...)")
    if len(given) != n:
        raise BadRequest(f"there are params for {len(given)} workers, n is {n}", "give one for all, or one for each")
    return list(given)


def _check_params(params: SamplingParams) -> None:
    if params.n != 1:
        raise BadRequest(f"params ask for n={params.n} answers of each worker", "give the number of workers instead")
    if not params.prefill.exact:
        raise BadRequest(f"workers cannot start from {params.prefill.mode} prefill", "leave prefill out")
    if params.grammar is not None and params.grammar.kind == "edit":
        raise BadRequest("workers cannot write edit programs", "ask with llm.edit")
    if params.speculation.drafter not in ("auto", "off"):
        hint = "leave speculation out: every step of a worker changes what the others see"
        raise BadRequest(f"workers do not speculate, params name the drafter {params.speculation.drafter}", hint)


def _prefixes(llm: LLM, prefixes: Seq[Prompt] | None, n: int) -> list[list[int]]:
    if prefixes is None:
        prefixes = [DEFAULT_PREFIX.format(number=i + 1) if n > 1 else "" for i in range(n)]
    if isinstance(prefixes, str) or not isinstance(prefixes, Seq):
        raise BadRequest(f"prefixes must be a list with one for each worker, got {prefixes!r:.80}", "pass a list")
    if len(prefixes) != n:
        raise BadRequest(f"there are prefixes for {len(prefixes)} workers, n is {n}", "give one for each worker")
    return [llm.tokenizer.encode(prefix) if isinstance(prefix, str) else llm.encode(prefix) for prefix in prefixes]
