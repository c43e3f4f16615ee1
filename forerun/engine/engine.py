"""The engine: requests in, events out, one step at a time.

`step` is the whole story: draft prompts, schedule, guess, run, verify, advance. The engine owns the pool, what is
cached and the sequences; it does not know files, prompts as text, threads or HTTP. One thread steps at a time; `submit`
and `cancel` may come from any.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.cache.approximate import ApproximateCache
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.cache.tiers import Tiers
from forerun.core import SamplingParams
from forerun.decode.control.controller import Controller
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.decode.speculator import Speculator
from forerun.decode.state import DraftTask
from forerun.decode.verify import StepOutput, VerifyInput, verify
from forerun.engine.config import EngineConfig
from forerun.engine.intake import Intake
from forerun.engine.leases import PageLeases
from forerun.engine.output import OutputWriter
from forerun.engine.provisional import meet, say
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Event, FinishReason, Request, Sequence
from forerun.engine.speculative_prefill import Drafting
from forerun.engine.stats import Stats
from forerun.engine.work import Work
from forerun.errors import ForerunError
from forerun.models.decoder import Decoder, Output
from forerun.models.execution.runner import Runner
from forerun.prefill.upgrade import Upgrader
from forerun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from forerun.prefill.prefiller import Prefiller


class Engine:
    """Continuous batching on one decoder, one page pool and one prefix tree; drafters guess ahead.

    `controller` is for those who bring their own costs; without one the engine measures the models it is given.
    `prefiller` makes what drafts prompts; without one only exact prefill can be asked for. `tiers` makes what keeps
    pages that the pool has no room for.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        draft: DraftModel | None = None,
        controller: Controller | None = None,
        prefiller: Callable[[DraftContext], Prefiller] | None = None,
        tiers: Callable[[PagePool], Tiers] | None = None,
    ) -> None:
        self.decoder, self.tokenizer, self.config = decoder, tokenizer, config
        num_pages = config.kv_cache_tokens // config.page_size
        self.pool = PagePool(decoder.config, num_pages, config.page_size, decoder.dtype, decoder.device)
        self.tree = PrefixTree(self.pool)
        self.runner = Runner(decoder, self.pool, config.max_model_len)
        self.approximate = ApproximateCache(self.pool)
        tree, approximate = (self.tree, self.approximate) if config.enable_prefix_caching else (None, None)
        self.tiers = None if tiers is None else tiers(self.pool)
        self.scheduler = Scheduler(
            self.pool, tree, approximate, config.max_num_seqs, config.max_num_batched_tokens, self.tiers
        )
        if self.runner.decoding_rows is not None:
            self.scheduler.guided_share = 1  # other chunks, other bits
        ctx = DraftContext.build(self.pool, self.runner, tokenizer, config.max_model_len, draft)
        ctx.make_room = self.scheduler.make_room
        ctx.warm_up()
        self.speculator = Speculator(ctx, controller)
        self.drafting = Drafting(None if prefiller is None else prefiller(ctx), self.scheduler, self.fail)
        self.scheduler.on_leaving = self._leaves
        make_room, size = self.scheduler.make_room, config.max_num_batched_tokens
        self.upgrades = Upgrader(self.runner, self.tree, self.approximate, make_room, size)
        self.intake = Intake(decoder.config, tokenizer, config, self.speculator, self.drafting)
        self._inbox: deque[Request] = deque()
        self._cancelled: deque[int] = deque()
        self.stats, self.leases = Stats(), PageLeases(self.pool, make_room)
        self.max_length = min(config.max_model_len, config.capacity)  # of a prompt and its answer
        self.output = OutputWriter(tokenizer, decoder.config.eos_ids, self.max_length, self.stats)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one batch and send its events; False when there was nothing to do but upgrades."""
        self.take_in()
        drafted = self.drafting.advance()  # a piece of each prompt whose K/V is drafted, not computed
        work = self.scheduler.schedule(drafted)
        if not work:
            return drafted > 0 or not self.idle
        work = meet(work, self.scheduler, self._most_nodes, self.runner.decoding_rows)  # provisional words: a draft
        self._guess(work)  # drafts for the sequences that decode
        output = self._run(work)  # logits for every work that samples: of its last token, then of its draft's nodes
        sampling = [w for w in work if w.samples]
        rulings = iter(verify(output, [VerifyInput(w.seq.context, w.draft, w.verifier) for w in sampling]))
        for w in work:
            self._advance(w, next(rulings) if w.samples else None)
        return True

    def _guess(self, work: list[Work]) -> None:
        guessed = [w for w in work if w.seq.spec_state is not None and w.decodes and not w.meets_guide]
        if not guessed or not self.speculator.should_draft(
            [w.seq.spec_state for w in guessed if w.seq.spec_state is not None]
        ):
            return
        most = min(self.config.max_num_batched_tokens, self.runner.most_rows(len(work)))
        if any(len(w.draft) for w in work):  # provisional words: they stay within what is sure to be exact
            most = min(most, self.runner.decoding_rows or most)
        room = max(0, most - sum(w.count + len(w.draft) for w in work)) // len(guessed)
        turns = []
        for w in guessed:
            useful = min(self._most_nodes(w.seq), w.seq.params.speculation.nodes, room)
            nodes = self.scheduler.reserve(w.seq, useful)
            assert w.seq.spec_state is not None
            turns.append(DraftTask(w.seq.spec_state, w.seq.pages, nodes))
        if any(turn.max_nodes > 0 for turn in turns):
            self.speculator.draft(turns)
            for w, turn in zip(guessed, turns, strict=True):
                w.draft = turn.draft

    def _most_nodes(self, seq: Sequence) -> int:
        """Tokens of a draft that could still become part of the answer."""
        return max(0, min(seq.params.max_tokens - seq.num_generated, self.max_length - len(seq.tokens)) - 1)

    def _run(self, work: list[Work]) -> Output:
        start = time.perf_counter()
        output = self.runner.forward([w.span for w in work])
        if all(w.count == 1 and w.seq.ready is None for w in work):  # pure decoding, as in the controller's cost curve
            seconds = time.perf_counter() - start
            longest = max(len(w.seq.tokens) for w in work)
            self.speculator.observe([w.draft for w in work], longest, seconds)
            for w in work:
                w.seq.usage.verify_s += seconds
        return output

    def _advance(self, work: Work, ruling: StepOutput | None) -> None:
        """Book what was computed; append and publish the tokens that were settled."""
        seq, was_prefilling = work.seq, work.seq.prefilling
        seq.computed += work.count
        seq.ready = None
        if was_prefilling and not seq.prefilling:
            self.scheduler.remember(seq)  # so that others can read the prompt while this one decodes
        if ruling is None:
            return
        if ruling.error is not None:
            self.fail(seq, ruling.error)
            return
        first, path = len(seq.tokens), ruling.verdict.path
        straight = next((i for i, node in enumerate(path) if node != i), len(path))
        if straight < len(path):  # a side branch: its K/V moves to where the answer continues
            source = [first + node for node in path[straight:]]
            self.runner.move(seq.pages, source, list(range(first + straight, first + len(path))))
        self._append(seq, ruling, work)

    def _append(self, seq: Sequence, ruling: StepOutput, work: Work) -> None:
        """The settled tokens become part of the answer, up to where it ends."""
        first = len(seq.tokens)
        event, reason = self.output.append(seq, ruling)
        seq.computed = min(seq.computed + len(ruling.verdict.path), len(seq.tokens) - 1)
        seq.note(len(event.token_ids), len(work.draft))
        if seq.provisional is not None and not seq.provisional.judged:
            last = reason is not None or self.runner.decoding_rows is None
            event.confirmed, event.retracted = seq.provisional.judge(event.token_ids, last)
            seq.usage.confirmed += event.confirmed
        elif seq.spec_state is not None:
            self.speculator.record_outcome(seq.spec_state, work.draft, ruling.verdict, seq.tokens[first:])
        if seq.real is not None:
            say(seq, event, self.scheduler, ends=reason is not None)
            self._send(seq.real, event)
        elif reason is not None:
            self._finish(seq, reason, event)
        else:
            self.scheduler.trim(seq)
            self._send(seq, event)

    def fail(self, seq: Sequence, error: ForerunError) -> None:
        """This answer is over, the others go on; a guide's is none."""
        if seq.real is not None:
            self.scheduler.dismiss(seq)
            return
        self._finish(seq, "error", Event(seq.request.id, seq.index, error=error))

    def _finish(self, seq: Sequence, reason: FinishReason, event: Event) -> None:
        if seq.guide is not None:
            self.scheduler.dismiss(seq.guide)
        finished = reason in ("stop", "length")
        drafted = seq.approximate is not None and seq.admitted and not seq.drafting and seq.params.cache
        if self.config.enable_prefix_caching and drafted and reason != "error":
            self.upgrades.add(seq.tokens)
        seq.settle(finished)
        self.scheduler.finish(seq)
        self.output.finish(seq, reason, event)
        if seq.spec_state is not None:
            self.speculator.finish(seq.spec_state)
        self._send(seq, event)

    def _leaves(self, seq: Sequence) -> None:
        """A sequence loses its pages: for good, or until it is its turn again."""
        self.drafting.close(seq)
        if seq.real is not None:
            self.output.close(seq)

    def _send(self, seq: Sequence, event: Event) -> None:
        """A reader that fails is cut off; nobody else in the batch notices."""
        try:
            seq.request.sink(event)
        except Exception:
            self._cancelled.append(seq.request.id)

    # -- requests ------------------------------------------------------------------------------------------------------

    def prepared(self, params: SamplingParams) -> bool:
        """Whether the drafters and the prefill source that these parameters name exist."""
        return self.speculator.ready(params) and self.drafting.ready(params.prefilling)

    def prepare(self, params: SamplingParams) -> None:
        """Make them; between steps, since that may time forwards."""
        self.speculator.check(params)
        self.speculator.prepare(params)
        self.drafting.prepare(params.prefilling)

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raise where a request cannot be answered."""
        self.intake.check(prompt_ids, params)

    def submit(self, request: Request) -> None:
        """Check a request and queue it; raises `BadRequest` before anything is touched."""
        self.intake.receive(request)
        self._inbox.append(request)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step, whatever it is doing, and free its pages."""
        self._cancelled.append(request_id)

    def take_in(self) -> None:
        """Queue what was submitted and end what was cancelled, without running anything."""
        while self._inbox:
            for seq in self.intake.sequences(self._inbox.popleft()):
                self.scheduler.add(seq)
        while self._cancelled:
            self._drop(self._cancelled.popleft())
        self.leases.collect()

    def _drop(self, request_id: int) -> None:
        for seq in [s for s in self.scheduler.everyone if s.request.id == request_id and s.real is None]:
            self._finish(seq, "cancelled", Event(request_id, seq.index))

    def end_all(self, error: Exception | None = None) -> None:
        """End every request: cancelled, or with the error that hit them all."""
        self.take_in()
        for seq in [s for s in self.scheduler.everyone if s.real is None]:
            self._finish(seq, "error" if error else "cancelled", Event(seq.request.id, seq.index, error=error))

    def upgrade_step(self) -> bool:
        """Recompute a piece of what was answered from drafted K/V, if nobody waits; False: there was nothing to do."""
        return self.idle and self.upgrades.step()

    @property
    def idle(self) -> bool:
        """Whether nobody waits; there may be upgrades to do."""
        return not self._inbox and not self._cancelled and self.scheduler.idle

    # -- looking inside ------------------------------------------------------------------------------------------------

    def score(self, ids: list[int]) -> Tensor:
        """Logits at every position of a text, [len(ids), V] float32; for measuring, between steps."""
        self.check(ids, SamplingParams())
        self.clear_cache()
        return self.runner.score(ids, self.config.max_num_batched_tokens)

    def time_forward(self, tokens: int, context: int) -> float:
        """Median seconds of one forward of `tokens` tokens after `context` others; for measuring, between steps."""
        self.clear_cache()
        return self.runner.time_forward(tokens, context)

    def clear_cache(self) -> None:
        """Forget all prefixes and what drafters remember of old answers; running sequences keep their own pages, the
        disk tier its files."""
        pins, siblings = self.scheduler.pins, self.scheduler.siblings
        for cache in (pins, siblings, self.tree, self.approximate, self.upgrades, self.tiers):
            if cache is not None:
                cache.clear()
        for keeper in self.scheduler.keepers:
            keeper.clear()
        self.speculator.forget()
