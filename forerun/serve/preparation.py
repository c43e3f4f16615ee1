"""Where requests are encoded, checked and compiled: in few threads, within limits, and not for clients that are gone.

A prompt that cannot fit the context is refused by its size, or after its first pieces were tokenised. Grammars have
threads of their own with a limit of time, so that prompts are not delayed by them. Knows no HTTP beyond errors.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forerun.serve.errors import ApiError
from forerun.text.tokenizer import Tokenizer

MAX_ENCODING_THREADS = 4  # a tokenizer encodes one text at a time: more threads would only hold more prompts
MAX_GRAMMAR_THREADS = 2
MAX_COUNTED_AT_ONCE = 4 << 20  # characters of one key whose tokens are only counted, waiting ones too: some seconds
MAX_GRAMMAR_S = 10.0  # to compile one, from when its thread begins
PIECE_CHARS = 1 << 16  # tokenised at once while it is unknown whether a prompt fits: some 20 to 60 ms
# Tokens of pieces are those of the whole text but for the words at their edges
PIECE_SLACK_TOKENS = 64

T = TypeVar("T")


class Cancelled(Exception):
    """The client is gone: the rest of the work is for nothing."""


class PreparationPool:
    """Groups of threads: for prompts, grammars, log-probabilities of prompts, and texts that are counted."""

    def __init__(self) -> None:
        self._encoding = ThreadPoolExecutor(MAX_ENCODING_THREADS, "forerun-encode")
        self._compiling = ThreadPoolExecutor(MAX_GRAMMAR_THREADS, "forerun-grammar")
        self._scoring = ThreadPoolExecutor(1, "forerun-score")  # it runs forwards: one at a time
        # The tokenizer encodes one text at a time: so a prompt waits for one of these at most
        self._counting = ThreadPoolExecutor(1, "forerun-count")
        self.counted: Counter[str] = Counter()  # characters by key

    async def encode(self, work: Callable[[Callable[[], None]], T]) -> T:
        """Run `work` in a thread. It gets a function that raises once the waiting task was cancelled."""
        return await self._run(self._encoding, work)

    async def score(self, work: Callable[[Callable[[], None]], T]) -> T:
        """The same for work that runs forwards: prompts are encoded meanwhile."""
        return await self._run(self._scoring, work)

    async def count(self, key: str, chars: int, work: Callable[[Callable[[], None]], T]) -> T:
        """The same for what no answer waits for; 429 where the key has too much of that at once."""
        if self.counted[key] and self.counted[key] + chars > MAX_COUNTED_AT_ONCE:
            message = f"{self.counted[key]} characters are being counted, the limit at once is {MAX_COUNTED_AT_ONCE}"
            raise ApiError(429, message, "wait for them", code="queue_full", headers={"Retry-After": "1"})
        self.counted[key] += chars
        try:
            return await self._run(self._counting, work)
        finally:
            self.counted[key] -= chars

    @staticmethod
    async def _run(threads: ThreadPoolExecutor, work: Callable[[Callable[[], None]], T]) -> T:
        gone = threading.Event()

        def check() -> None:
            if gone.is_set():
                raise Cancelled

        future = asyncio.get_running_loop().run_in_executor(threads, work, check)
        try:
            return await future
        finally:
            gone.set()  # work that has not begun is cancelled with the future

    async def compile(self, work: Callable[[], T]) -> T:
        """Run work that compiles a grammar; 400 where that takes too long. Its thread then goes on to its end, which
        the limits of the grammar's size bound."""
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def run() -> T:
            loop.call_soon_threadsafe(begun.set)
            return work()

        future = loop.run_in_executor(self._compiling, run)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # after the client is gone, too
        await begun.wait()
        done, _ = await asyncio.wait({future}, timeout=MAX_GRAMMAR_S)
        if not done:
            message = f"the grammar was not compiled within {MAX_GRAMMAR_S:g} s"
            raise ApiError(400, message, "use a smaller schema or simpler patterns", code="grammar_timeout")
        return future.result()


class PromptLimit:
    """Whether texts can fit a context of `max_tokens`, with as little tokenising as that takes."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer, self.max_tokens = tokenizer, max_tokens
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        self.max_chars = max_tokens * longest  # a character has one byte or more: more of them never fit

    def check_size(self, texts: Sequence[str], countable_chars: int = 0) -> None:
        """Raise 400 where no tokenising is needed to know that they cannot fit; takes no time. `countable_chars`: so
        many are accepted all the same, to be counted."""
        if len(texts) > self.max_tokens:  # each message takes a token or more
            raise self.too_long(f"the prompt has {len(texts)} messages")
        chars = sum(map(len, texts))
        if chars > max(self.max_chars, countable_chars):
            raise self.too_long(f"the prompt has {chars} characters")

    def check_tokens(self, texts: Sequence[str], check_cancelled: Callable[[], None] = lambda: None) -> None:
        """Raise 400 as soon as it is known that they cannot fit. Short texts are not tokenised here at all."""
        if sum(map(len, texts)) <= PIECE_CHARS:
            return
        tokens = 0
        for text in texts:
            for start in range(0, len(text), PIECE_CHARS):
                check_cancelled()
                piece = text[start : start + PIECE_CHARS].encode("utf-8", "replace").decode()
                tokens += max(0, len(self._tokenizer.encode(piece)) - PIECE_SLACK_TOKENS)
                if tokens >= self.max_tokens:
                    raise self.too_long(f"the prompt has more than {tokens} tokens")
        check_cancelled()

    def too_long(self, what: str) -> ApiError:
        message = f"{what}, the context holds {self.max_tokens} tokens with the answer"
        return ApiError(400, message, "shorten the prompt", code="context_length_exceeded")
