"""From verified tokens to events: text, stop strings, finish reason, log-probabilities and usage.

The one place where an answer gets longer and ends, for the engine's own sequences and for those that run under a lease
(workers). Knows no scheduler, no pages and no forward.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from forerun.decode.verify import StepOutput
from forerun.engine.detokenize import TextStream
from forerun.engine.sequence import Event, FinishReason, Sequence
from forerun.engine.stats import Stats
from forerun.text.tokenizer import Tokenizer


class OutputWriter:
    """`max_length`: tokens that a prompt and its answer may have together. Without a tokenizer all texts are empty."""

    def __init__(self, tokenizer: Tokenizer | None, eos_ids: Collection[int], max_length: int, stats: Stats) -> None:
        self._tokenizer, self._eos_ids, self._max_length, self._stats = tokenizer, eos_ids, max_length, stats
        self._streams: dict[Sequence, TextStream] = {}

    @property
    def open_texts(self) -> int:
        """Answers that have begun and not ended."""
        return len(self._streams)

    def append(self, seq: Sequence, step: StepOutput) -> tuple[Event, FinishReason | None]:
        """Add a step's tokens to an answer, up to where it ends; the event, and the reason where it ends."""
        event, reason = Event(seq.request.id, seq.index), None
        for token in step.tokens:
            seq.tokens.append(token)
            event.token_ids.append(token)
            event.text += self._push(seq, token)
            reason = self._finish_reason(seq)
            if reason is not None:
                break
        added = len(event.token_ids)
        event.logprobs = step.logprobs[:added]
        if seq.num_generated == added:
            seq.usage.ttft_s, seq.usage.with_first = time.perf_counter() - seq.request.arrived, added - 1
        seq.usage.steps += 1
        if seq.grammar is not None:
            seq.grammar.advance(event.token_ids)
        return event, reason

    def finish(self, seq: Sequence, reason: FinishReason, event: Event) -> None:
        """Complete an answer's last event: the rest of its text, the reason, and its usage, which is counted."""
        event.text += self.close(seq)
        seq.usage.completion_tokens = seq.num_generated
        seq.usage.total_s = time.perf_counter() - seq.request.arrived
        event.finish_reason, event.usage = reason, seq.usage
        self._stats.book(seq.request.session, seq.usage, finished=reason in ("stop", "length"))

    def close(self, seq: Sequence) -> str:
        """Drop the state of a sequence's text; returns the rest of the text."""
        stream = self._streams.pop(seq, None)
        return "" if stream is None else stream.flush()

    def ends_with_eos(self, seq: Sequence) -> bool:
        """Whether the last token ends the answer; the end of a grammar does, whatever `ignore_eos` is."""
        return (not seq.params.ignore_eos or seq.grammar is not None) and seq.tokens[-1] in self._eos_ids

    def _push(self, seq: Sequence, token: int) -> str:
        if self._tokenizer is None:
            return ""
        if seq not in self._streams:
            self._streams[seq] = TextStream(self._tokenizer.stream(), seq.params.stop)
        return self._streams[seq].push(token)

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        stream = self._streams.get(seq)
        if (stream is not None and stream.stopped) or self.ends_with_eos(seq):
            return "stop"
        full = len(seq.tokens) >= self._max_length
        return "length" if full or seq.num_generated >= seq.params.max_tokens else None
