"""From verified tokens to events: text, stop strings, finish reason, log-probabilities and usage.

The one place where an answer gets longer and ends, for the engine's own sequences and for those that run under a lease
(workers). Texts are shown as whole characters only, and stop strings are found wherever token boundaries fall. Knows no
scheduler, no pages and no forward.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from forerun.decode.edit_answer import EditAnswer
from forerun.decode.trie_answer import TrieAnswer
from forerun.decode.verify import StepOutput
from forerun.engine.sequence import Event, FinishReason, Sequence
from forerun.engine.stats import Stats
from forerun.text.tokenizer import Detokenizer, Tokenizer


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
        program = seq.grammar if isinstance(seq.grammar, EditAnswer) else None
        for token in step.tokens if program is None else step.tokens[: program.until_part_end(step.tokens)]:
            seq.tokens.append(token)
            event.token_ids.append(token)
            if token not in seq.params.stop_token_ids:
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
        if program is not None and program.copied and reason is None:
            reason = self._append_copied(seq, program.copied)
        return event, reason

    def append_one(self, seq: Sequence, token: int) -> tuple[Event, FinishReason | None]:
        """`append` of one token without log-probabilities, to an answer without a grammar: a large batch does little
        else."""
        tokens, params, text = seq.tokens, seq.params, ""
        tokens.append(token)
        generated = len(tokens) - len(seq.request.prompt_ids)
        if generated == 1:
            seq.usage.ttft_s, seq.usage.with_first = time.perf_counter() - seq.request.arrived, 0
        seq.usage.steps += 1
        stopped = token in params.stop_token_ids
        if self._tokenizer is not None and not stopped:
            text = self._push(seq, token)
            stopped = self._streams[seq].stopped
        event = Event(seq.request.id, seq.index, text, [token])
        if stopped or (token in self._eos_ids and not params.ignore_eos):
            return event, "stop"
        return event, "length" if generated >= params.max_tokens or len(tokens) >= self._max_length else None

    def _append_copied(self, seq: Sequence, copied: list[int]) -> FinishReason | None:
        """Lines that an edit program has copied follow in the sequence; they are no part of the answer, which is the
        program."""
        if len(seq.tokens) + len(copied) >= self._max_length:
            return "length"
        seq.tokens += copied
        seq.usage.copied += len(copied)
        return None

    def finish(self, seq: Sequence, reason: FinishReason, event: Event) -> None:
        """Complete an answer's last event: the rest of its text, the reason, and its usage, which is counted."""
        if (stream := self._streams.pop(seq, None)) is not None:
            event.text += stream.flush()
            event.stop = stream.found
        seq.usage.completion_tokens = seq.num_sampled
        seq.usage.total_s = time.perf_counter() - seq.request.arrived
        event.finish_reason, event.usage = reason, seq.usage
        self._stats.book(seq.request.session, seq.usage, finished=reason in ("stop", "length"))

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence's text."""
        self._streams.pop(seq, None)

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
        stopped = (stream is not None and stream.stopped) or seq.tokens[-1] in seq.params.stop_token_ids
        if stopped or self.ends_with_eos(seq):
            return "stop"
        if isinstance(seq.grammar, TrieAnswer) and seq.grammar.ends_at(seq.generated):
            return "stop"
        full = len(seq.tokens) >= self._max_length
        return "length" if full or seq.num_sampled >= seq.params.max_tokens else None


class TextStream:
    """The text of one sequence. `push` returns what can be shown now: what might be the beginning of a stop string is
    held back until it is not. `stopped`: a stop string was found."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer, self._stop = detokenizer, stop
        self._held = ""
        self.stopped = False
        self.found: str | None = None  # the stop string

    def push(self, token_id: int) -> str:
        return self._release(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        shown = self._release(self._detokenizer.flush())
        rest, self._held = ("" if self.stopped else self._held), ""
        return shown + rest

    def _release(self, new: str) -> str:
        if not self._stop or self.stopped:
            return "" if self.stopped else new
        text = self._held + new
        found = [(at, stop) for at, stop in ((text.find(s), s) for s in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            at, self.found = min(found)
            return text[:at]
        keep = max(overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
