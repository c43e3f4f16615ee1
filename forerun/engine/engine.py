"""The engine: requests in, events out, one step at a time.

`step` is the whole story: draft prompts, schedule, draft tokens, run, verify, advance. The engine owns the pool, what
is cached and the sequences; it does not know files, prompts as text, threads or HTTP. One thread steps at a time;
`submit` and `cancel` may be called by any. An error in one sequence ends that sequence only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from forerun.cache.approximate import ApproximateCache
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.cache.tiers import Tiers
from forerun.core import SamplingParams, Usage, Verdict
from forerun.core.drafted import DraftedTokens
from forerun.decode.control.controller import Controller
from forerun.decode.device_drafting import DeviceDrafting
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.decode.drafter_pool import DraftTask
from forerun.decode.speculator import Speculator
from forerun.decode.verify import StepOutput, verify
from forerun.engine.config import EngineConfig
from forerun.engine.draft_ahead import DraftAhead
from forerun.engine.intake import Intake
from forerun.engine.leases import PageLeases
from forerun.engine.output import OutputWriter
from forerun.engine.pace import StepPacer
from forerun.engine.prompts_ahead import PromptsAhead
from forerun.engine.provisional import draft_provisional, emit_provisional, hold_doubted
from forerun.engine.run_ahead import RunAhead, decodes_plainly
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Event, FinishReason, Phase, Request, ScheduledSequence, Sequence
from forerun.engine.speculative_prefill import SpeculativePrefill
from forerun.engine.stats import Stats
from forerun.errors import ForerunError
from forerun.models.decoder import Decoder, Output
from forerun.models.execution.runner import Runner
from forerun.models.hidden_draft import HiddenDraftModel
from forerun.models.online_adapter import OnlineAdapter
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.upgrade import Upgrader
from forerun.text.tokenizer import Tokenizer

log = logging.getLogger("forerun")

_NOTHING_ACCEPTED = Verdict([], -1)


class Engine:
    """Continuous batching on one decoder, one page pool and one prefix tree, with speculative decoding.

    `controller`: with costs measured elsewhere; without one the engine measures the models it is given. `prefiller`
    makes what drafts prompts, without one all prefill is exact; `tiers` what keeps pages that the pool has no room for.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        draft: DraftModel | HiddenDraftModel | None = None,
        controller: Controller | None = None,
        prefiller: Callable[[DraftContext], Prefiller] | None = None,
        tiers: Callable[[PagePool], Tiers] | None = None,
        quiet: bool = True,
    ) -> None:
        self.decoder, self.tokenizer, self.config = decoder, tokenizer, config
        num_pages = config.kv_cache_tokens // config.page_size
        self.pool = PagePool(decoder.config, num_pages, config.page_size, decoder.dtype, decoder.device)
        self.tree = PrefixTree(self.pool)
        self.runner = Runner(decoder, self.pool, config.max_model_len)
        self.approximate = ApproximateCache(self.pool)
        tree, approximate = (self.tree, self.approximate) if config.enable_prefix_caching else (None, None)
        self.tiers = None if tiers is None else tiers(self.pool)
        gap_s = (config.max_gap_ms or 0.0) / 1000
        pacer = StepPacer(lambda: self.speculator.controller.target, decoder.device.type, gap_s)
        self.scheduler = Scheduler(
            self.pool, tree, approximate, config.max_num_seqs, config.max_num_batched_tokens, self.tiers, pacer
        )
        if self.runner.decoding_rows is not None:
            self.scheduler.chunk_divisor = 1  # other chunks, other bits
        if self.runner.prompts_apart:
            self.scheduler.answer_rows = self.runner.decoding_rows
        ctx = DraftContext.build(self.pool, self.runner, tokenizer, config.max_model_len, draft)
        ctx.make_room, ctx.quiet = self.scheduler.make_room, quiet
        ctx.warm_up()
        self.speculator = Speculator(ctx, controller)
        made = None if prefiller is None else prefiller(ctx)
        self.speculative_prefill = SpeculativePrefill(made, self.scheduler, self.fail)
        self.scheduler.on_release = self._release
        make_room, size = self.scheduler.make_room, config.max_num_batched_tokens
        self.upgrades = Upgrader(self.runner, self.tree, self.approximate, make_room, size)
        self.intake = Intake(decoder.config, tokenizer, config, self.speculator, self.speculative_prefill)
        self._inbox: deque[Request] = deque()
        self._cancelled: deque[int] = deque()
        self.stats, self.leases = Stats(), PageLeases(self.pool, make_room)
        self.max_length = min(config.max_model_len, config.capacity)  # of a prompt and its answer
        run, plain = (self.runner, self.scheduler, self.speculator), self._stays_plain
        self._run_ahead = RunAhead(*run, self.max_length, plain, self._append_plain, self.fail)
        self._prompts_ahead = PromptsAhead(self.runner, self.scheduler, self._run_ahead, self._advance, self._add)
        drafting, append = DeviceDrafting(self.speculator), self._append_drafted
        self._draft_ahead = DraftAhead(drafting, self.scheduler, self.max_length, append, self.fail)
        self._draft_next = False  # the coming step drafts: decided when it was not launched ahead
        self.output = OutputWriter(tokenizer, decoder.config.eos_ids, self.max_length, self.stats)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one batch and send its events; False when there was nothing to do but upgrades."""
        with self.runner.host_threads():
            return self._step()

    def _step(self) -> bool:
        self.process_inbox()
        if self._draft_ahead.in_flight is not None and self._draft_ahead.step():
            return True
        if self._run_ahead.in_flight is not None and self._run_ahead.step():
            return True
        start = time.perf_counter()
        if self._prompts_ahead.in_flight is not None:
            self._prompts_ahead.settle()
        # a piece of each prompt whose K/V is drafted, not computed
        spent = self.speculative_prefill.advance() if self.scheduler.drafting else 0
        batch = self.scheduler.schedule(spent)
        if self._prompts_ahead.in_flight is not None and all(s.decodes for s in batch):
            self._prompts_ahead.finish()  # those that wait have no room
        if not batch:
            return spent > 0 or not self.idle
        if any(s.verifies_provisional for s in batch):
            batch = draft_provisional(batch, self.scheduler, self.runner, self._max_nodes)
        self._draft_tokens(batch)  # for the sequences that decode with speculation
        if self._draft_ahead.in_flight is not None:
            return self._draft_ahead.step()
        if self.runner.can_launch and (self._prompts_ahead.step(batch) or self._run_ahead.start(batch)):
            return True
        output = self._run(batch)  # logits of every sequence that samples: of its last token, then of its draft
        outputs = verify(output, [s.verify_input for s in batch if s.samples])
        given = iter(hold_doubted(batch, outputs) if any(each.margins for each in outputs) else outputs)
        for scheduled in batch:
            found = next(given) if scheduled.samples else None
            self._advance(scheduled)
            if found is not None:
                self._add(scheduled, found)
        if self.scheduler.work.paced:
            taken_s, nodes = time.perf_counter() - start, sum(len(s.draft) for s in batch)
            self.scheduler.pacer.observe(self.scheduler.work, nodes, taken_s)
        return True

    def _stays_plain(self, sequences: list[Sequence]) -> bool:
        """Whether the coming step of these drafts nothing. A decision for drafting is kept for that step."""
        self._draft_next = False
        if self.speculator.passes(len(sequences)):
            return True
        rows = min(self.config.max_num_batched_tokens, self.runner.most_rows(len(sequences)))
        room, tasks = rows // len(sequences) - 1, []
        for seq in sequences:
            if seq.spec_state is not None:
                useful = min(self._max_nodes(seq) - 1, seq.params.speculation.nodes, room)
                tasks.append(DraftTask(seq.spec_state, seq.pages, max(0, useful)))
        tasks = self._draft_ahead.drafting.mark(tasks) if len(tasks) == len(sequences) else tasks
        self._draft_next = bool(tasks) and self.speculator.should_leave(tasks)
        return not self._draft_next

    def _draft_tokens(self, batch: list[ScheduledSequence]) -> None:
        speculating = [s for s in batch if s.seq.spec_state is not None and s.decodes and not s.verifies_provisional]
        states = [s.seq.spec_state for s in speculating if s.seq.spec_state is not None]
        decided, self._draft_next = self._draft_next, False
        if not speculating:
            return
        launches = self.runner.can_launch and all(decodes_plainly(s) for s in batch)
        if not decided and not self.speculator.should_draft(states, launches):
            return
        rows = min(self.config.max_num_batched_tokens, self.runner.most_rows(len(batch)))
        if any(len(s.draft) for s in batch):  # provisional tokens: they stay within what is sure to be exact
            rows = min(rows, self.runner.decoding_rows or rows)
        fits = self.scheduler.pacer.draft_nodes(self.scheduler.work)
        left = min(rows - sum(s.count + len(s.draft) for s in batch), fits)
        room = max(0, left) // len(speculating)
        useful = [min(self._max_nodes(s.seq), s.seq.params.speculation.nodes, room) for s in speculating]
        found = zip(speculating, states, useful, strict=True)
        tasks = [DraftTask(state, s.seq.pages, self.scheduler.reserve(s.seq, nodes)) for s, state, nodes in found]
        if any(task.max_nodes > 0 for task in tasks):
            whole = launches and len(tasks) == len(batch)
            plan = self.speculator.draft(self._draft_ahead.drafting.mark(tasks) if whole else tasks)
            if plan is not None:
                self._draft_ahead.begin([s.seq for s in speculating], plan)
            for s, task in zip(speculating, tasks, strict=True):
                s.draft = task.draft

    def _max_nodes(self, seq: Sequence) -> int:
        """Tokens of a draft that could still become part of the answer."""
        return max(0, min(seq.params.max_tokens - seq.num_sampled, self.max_length - len(seq.tokens)) - 1)

    def _run(self, batch: list[ScheduledSequence]) -> Output:
        start = time.perf_counter()
        output = self.runner.forward([s.span for s in batch])
        # pure decoding, as in the controller's cost curve
        if all(s.count == 1 and s.seq.ready_logits is None for s in batch):
            seconds = time.perf_counter() - start
            if any(s.seq.spec_state is not None for s in batch):
                longest = max(len(s.seq.tokens) for s in batch)
                self.speculator.observe([s.draft for s in batch], longest, seconds)
            for s in batch:
                s.seq.usage.verify_s += seconds
        return output

    def _advance(self, scheduled: ScheduledSequence) -> None:
        """Record what was computed, or will be before anything that is launched from now on."""
        seq = scheduled.seq
        seq.computed += scheduled.count
        if seq.prefill is not None:
            seq.prefill.logits = None
        if seq.phase is Phase.PREFILLING:
            seq.enter_next()
            # so that others can read the prompt while this one decodes, or what there is of it
            if seq.phase is Phase.DECODING:
                self.scheduler.publish(seq)
            else:
                self.scheduler.publish_pages(seq)

    def _add(self, scheduled: ScheduledSequence, output: StepOutput) -> None:
        """Append and emit the tokens that were sampled."""
        seq = scheduled.seq
        if output.error is not None:
            self.fail(seq, output.error)
            return
        try:
            self._move_accepted(seq, output.verdict.path)
            self._append(seq, output, scheduled)
        except Exception as error:  # of this sequence alone: its text, its grammar, its drafters' records
            self.fail(seq, error)

    def _move_accepted(self, seq: Sequence, path: list[int]) -> None:
        """K/V of an accepted side branch of the draft moves to where the answer continues."""
        first = len(seq.tokens)
        straight = next((i for i, node in enumerate(path) if node != i), len(path))
        if straight < len(path):
            source = [first + node for node in path[straight:]]
            self.runner.move(seq.pages, source, list(range(first + straight, first + len(path))))

    def _append_plain(self, seq: Sequence, token: int) -> None:
        """`_advance` for a sequence that ran its last token and drafted nothing, in less time."""
        seq.computed += 1
        event, reason = self.output.append_one(seq, token)
        if seq.params.timeline:
            seq.record_step(1, 0)
        if (state := seq.spec_state) is not None and state.waits:
            self.speculator.resolve_beside(state, 1)
        if reason is not None:
            self._finish(seq, reason, event)
            return
        if len(seq.pages) * self.pool.page_size >= len(seq.tokens) + self.pool.page_size:
            self.scheduler.trim(seq)
        self._send(seq.request, event)

    def _append_drafted(self, seq: Sequence, result: DraftedTokens) -> None:
        """The same of a step that drafted on the device."""
        event, reason = self.output.append(seq, StepOutput(_NOTHING_ACCEPTED, result.tokens))
        seq.computed = len(seq.tokens) - 1
        seq.record_step(len(event.token_ids), result.nodes)
        if seq.spec_state is not None:
            self._draft_ahead.drafting.record(seq.spec_state, result, event.token_ids)
        if reason is not None:
            self._finish(seq, reason, event)
        else:
            self._send(seq.request, event)

    def _append(self, seq: Sequence, output: StepOutput, scheduled: ScheduledSequence) -> None:
        """The sampled tokens become part of the answer, up to where it ends."""
        first = len(seq.tokens)
        event, reason = self.output.append(seq, output)
        if seq.num_generated == len(event.token_ids):
            self.speculative_prefill.observe_first_token(seq)
        copied = len(seq.tokens) - first - len(event.token_ids)  # behind the sampled tokens, without K/V
        seq.computed = min(seq.computed + len(output.verdict.path), len(seq.tokens) - (copied or 1))
        seq.record_step(len(event.token_ids), len(scheduled.draft))
        if seq.provisional is not None and not seq.provisional.verified:
            last = reason is not None or self.runner.decoding_rows is None
            event.confirmed, event.retracted = seq.provisional.verify(event.token_ids, last)
            seq.usage.confirmed += event.confirmed
            if seq.provisional.verified:
                self.speculative_prefill.record_provisional(seq)
        elif seq.spec_state is not None:
            self.speculator.record_outcome(seq.spec_state, scheduled.draft, output.verdict, event.token_ids)
        if seq.final is not None:
            emit_provisional(seq, event, self.scheduler, ends=reason is not None)
            self._send(seq.request, event)
        elif reason is not None:
            self._finish(seq, reason, event)
        else:
            self.scheduler.trim(seq)
            self._send(seq.request, event)

    def fail(self, seq: Sequence, error: Exception) -> None:
        """End this answer with an error; the others go on. A provisional sequence ends without one."""
        if not isinstance(error, ForerunError):
            log.error("a request failed", exc_info=error)
            self.output.drop(seq)  # what raised may raise again
        if seq.final is not None and seq.phase is not Phase.FINISHED:
            self.scheduler.end_provisional(seq)
        elif seq.final is None:
            self._finish(seq, "error", Event(seq.request.id, seq.index, error=error))

    def _finish(self, seq: Sequence, reason: FinishReason, event: Event) -> None:
        if seq.provisional is not None and seq.provisional.seq is not None:
            self.scheduler.end_provisional(seq.provisional.seq)
        answered = seq.draft_key is not None and (seq.num_generated > 0 or seq.phase is Phase.PREFILLING)
        if self.config.enable_prefix_caching and answered and seq.params.cache and reason != "error":
            self.upgrades.add(seq.tokens)
        if seq.phase is not Phase.FINISHED:  # else what came after this raised
            seq.finish_usage(finished=reason in ("stop", "length"))
            self.scheduler.finish(seq)
        try:
            self.output.finish(seq, reason, event)
            if seq.spec_state is not None:
                self.speculator.finish(seq.spec_state)
        except Exception as error:  # its last event goes out all the same, or its client would wait
            log.error("the end of a request failed", exc_info=error)
            self.output.drop(seq)
            event.error, event.finish_reason, event.usage = event.error or error, "error", seq.usage
        self._send(seq.request, event)

    def _release(self, seq: Sequence) -> None:
        """A sequence is about to lose its pages."""
        if seq.prefill is not None:
            self.speculative_prefill.close(seq)
        if seq.final is not None:
            self.output.drop(seq)

    def _send(self, request: Request, event: Event) -> None:
        """A sink that raises cancels its own request."""
        try:
            request.sink(event)
        except Exception:
            self._cancelled.append(request.id)

    # -- requests ------------------------------------------------------------------------------------------------------

    def prepared(self, params: SamplingParams) -> bool:
        """Whether the drafters and the prefill source that these parameters name exist."""
        drafters = params.speculation.off or self.speculator.drafter_pool.ready(params)
        return drafters and self.speculative_prefill.ready(params.prefill)

    def prepare(self, params: SamplingParams) -> None:
        """Make them; between steps, since that may time forwards."""
        self.speculator.check(params)
        self.speculator.drafter_pool.prepare(params)
        self.speculative_prefill.check(params.prefill, 1)

    def submit(self, request: Request) -> None:
        """Check a request and queue it; raises `BadRequest` before anything is touched."""
        self.intake.receive(request)
        self._inbox.append(request)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step, whatever it is doing, and free its pages."""
        self._cancelled.append(request_id)

    def process_inbox(self) -> None:
        """Queue what was submitted and end what was cancelled, without running anything."""
        while self._inbox:
            self._queue(self._inbox.popleft())
        while self._cancelled:
            request_id = self._cancelled.popleft()
            self._end([s for s in self.scheduler.sequences if s.request.id == request_id], "cancelled")
        if self.leases:
            self.leases.collect()

    def _queue(self, request: Request) -> None:
        try:
            sequences = self.intake.sequences(request)
        except Exception as error:
            for index in range(request.params.n):
                usage = Usage(prompt_tokens=len(request.prompt_ids))
                self._send(request, Event(request.id, index, finish_reason="error", usage=usage, error=error))
            return
        for seq in sequences:
            self.scheduler.add(seq)

    def end_all(self, error: Exception | None = None) -> None:
        """End every request: cancelled, or with the error that hit them all."""
        self.process_inbox()
        self._end(self.scheduler.sequences, "error" if error else "cancelled", error)

    def _end(self, sequences: list[Sequence], reason: FinishReason, error: Exception | None = None) -> None:
        for seq in sequences:
            if seq.final is None:  # provisional sequences end with their final ones
                self._finish(seq, reason, Event(seq.request.id, seq.index, error=error))

    def upgrade_step(self) -> bool:
        """Recompute a piece of what was answered from drafted K/V, or let the drafter learn a little, if no request
        waits; False: there was nothing to do."""
        return self.idle and (self.upgrades.step() or (self._adapter is not None and self._adapter.try_step()))

    @property
    def has_idle_work(self) -> bool:
        return len(self.upgrades) > 0 or (self._adapter is not None and self._adapter.due)

    @property
    def _adapter(self) -> OnlineAdapter | None:
        """Of a drafter that learns."""
        hidden = self.speculator.ctx.hidden
        return None if hidden is None else hidden.adapter

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs; there may be upgrades to do."""
        return not self._inbox and not self._cancelled and self.scheduler.idle

    # -- measuring -----------------------------------------------------------------------------------------------------

    def score(self, ids: list[int]) -> Tensor:
        """Logits at every position of a text, [len(ids), V] float32; for measuring, between steps."""
        self.intake.check(ids, SamplingParams())
        self.clear_cache()
        return self.runner.score(ids, self.config.max_num_batched_tokens)

    def time_forward(self, tokens: int, context: int) -> float:
        """Median seconds of one forward of `tokens` tokens after `context` others; for measuring, between steps."""
        self.clear_cache()
        return self.runner.time_forward(tokens, context)

    def clear_cache(self) -> None:
        """Forget all prefixes and what drafters remember of old answers; running sequences keep their own pages, the
        disk tier its files."""
        pins, drafts = self.scheduler.pins, self.scheduler.shared_drafts
        caches = (pins, drafts, self.tree, self.approximate, self.upgrades, self.tiers, *self.scheduler.text_caches)
        for cache in caches:
            if cache is not None:
                cache.clear()
        self.speculator.drafter_pool.forget()
