"""Who steps the engine: whoever waits for it.

A caller that waits steps the engine itself, under one lock, until its own answer is there; steps serve everybody's
requests, so several waiting threads simply take turns. Callers that must not block (asyncio) let a background thread
wait for them; the same thread upgrades approximate K/V while nobody waits. The driver knows no prompt, no text and no
sampling.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from forerun.cache.prefix import pack
from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.sequence import Event, Request
from forerun.errors import ForerunError
from forerun.runtime.mailbox import Mail

T = TypeVar("T")

BLOCKED = 0.001  # seconds between two looks whether somebody gave pages back
PAUSE = 0.1  # seconds of quiet before upgrades begin: whoever asks one thing after the other is not disturbed


class Driver:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()  # held by whoever steps
        self._gate = threading.Lock()  # nothing is submitted once it is closed
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._steppers = 0  # callers that step the engine themselves
        self._readers = 0  # callers that let the thread do it
        self._mail: Mail[Event] | None = None  # to the event loop that asked last

    def run(self, jobs: list[tuple[list[int], SamplingParams]]) -> list[list[Event]]:
        """Run jobs to their ends; the events of each, in order. On any error or Ctrl-C none of them goes on."""
        inboxes: list[list[Event]] = [[] for _ in jobs]
        requests = [Request(ids, params, sink=inbox.append) for (ids, params), inbox in zip(jobs, inboxes, strict=True)]
        for request in requests:  # all are checked before the first one starts
            self.engine.intake.receive(request)
        open_answers = sum(params.n for _, params in jobs)
        done = 0
        seen = [0] * len(jobs)
        with self._stepping():
            try:
                for request in requests:
                    self._submit(request)
                while done < open_answers:
                    self._step(requests)
                    for i, inbox in enumerate(inboxes):
                        done += sum(_ends(e) for e in inbox[seen[i] :])
                        seen[i] = len(inbox)
            except BaseException:
                self._abandon(requests)
                raise
        return inboxes

    def request(self, ids: list[int], params: SamplingParams, session: str | None = None) -> Request:
        """A request that is checked and packed, with what it names prepared: `stream` and `astream` only queue it. For
        any thread but an event loop's, since a long prompt or a grammar takes long."""
        self.check_open()
        self.prepare(params)
        request = Request(ids, params, sink=lambda event: None, session=session)
        self.engine.intake.receive(request)
        return request

    def stream(self, request: Request) -> Iterator[Event]:
        """Events as they come; leaving the loop early cancels the request."""
        inbox: deque[Event] = deque()
        request.sink = inbox.append
        self._submit(request)
        open_answers = request.params.n
        with self._stepping():
            try:
                while open_answers:
                    while not inbox:
                        self._step([request])
                    event = inbox.popleft()
                    open_answers -= _ends(event)
                    yield event
            finally:
                if open_answers:
                    self._abandon([request])

    async def astream(self, request: Request) -> AsyncIterator[Event]:
        """The same for asyncio; a background thread does the stepping."""
        mail = self._mail_to(asyncio.get_running_loop())
        inbox: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            mail.put(inbox, event)

        request.sink = sink
        self._submit(request)
        self._readers += 1  # only the event loop's own thread counts them
        self._background()
        open_answers = request.params.n
        try:
            while open_answers:
                event = await inbox.get()
                open_answers -= _ends(event)
                yield event
        finally:
            if open_answers:
                self.engine.cancel(request.id)
                self._wake.set()
            self._readers -= 1

    def _mail_to(self, loop: asyncio.AbstractEventLoop) -> Mail[Event]:
        if self._mail is None or self._mail.loop is not loop:  # who has another loop keeps what it was given
            self._mail = Mail(loop)
        return self._mail

    def upgrade(self) -> None:
        """Block until all that was answered from drafted K/V is known exactly, as far as there is room for it."""
        busy = True
        with self._stepping():
            while busy and not self._closed:
                with self._lock:
                    busy = self.engine.upgrade_step() if self.engine.idle else self.engine.step()

    def close(self) -> None:
        """Cancel whatever still runs; from now on every call is an error."""
        with self._gate:
            self._closed = True
        self._halt()
        with self._lock:
            self.engine.end_all()
            if self.engine.tiers is not None:
                self.engine.tiers.close(self.engine.tree)

    def save(self, tokens: list[int]) -> None:
        """Have the exact K/V of a text written to the disk tier; steps go on while that waits for the disk."""
        tiers, at, data = self.engine.tiers, 0, pack(tokens)
        while tiers is not None and not self._closed:
            with self._stepping(), self._lock:
                copied = tiers.copy(data, self.engine.tree.match(tokens), at)
            if copied is None:
                return
            at = copied[0]
            tiers.write(copied[1], copied[2])

    def visit(self, use: Callable[[Engine], T]) -> T:
        """Do something with the engine between two steps."""
        with self._stepping(), self._lock:
            return use(self.engine)

    def _halt(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._halt)

    def clear_cache(self) -> None:
        with self._stepping(), self._lock:
            self.engine.clear_cache()

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        if self._closed:
            raise ForerunError("this LLM is closed", "make a new one, or ask inside the `with` block")

    def _submit(self, request: Request) -> None:
        with self._gate:
            self.check_open()
            self.engine.submit(request)

    def prepare(self, params: SamplingParams) -> None:
        """Make what a request needs and does not exist yet, before its time starts to count."""
        self.engine.drafting.prepare(params.prefilling)
        if not self.engine.speculator.drafter_pool.ready(params):
            with self._stepping(), self._lock:
                self.engine.prepare(params)

    def _step(self, mine: list[Request]) -> None:
        """A step by somebody who waits for these requests."""
        with self._lock:
            self.engine.step()
            blocked = self._relieve(mine)
        if blocked:
            time.sleep(BLOCKED)

    def _relieve(self, mine: Sequence[Request] = ()) -> bool:
        """Where nothing can run because others hold the pages: whether there is nothing to do but wait for them."""
        scheduler, loans = self.engine.scheduler, self.engine.loans
        if not scheduler.waiting or scheduler.running or not loans or loans.recall():
            return False
        seq = scheduler.waiting[0]
        error = loans.hopeless() if any(request is seq.request for request in mine) else None
        if error is not None:
            self.engine.fail(seq, error)
        return error is None

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.cancel(request.id)
        self.collect()

    def collect(self) -> None:
        """Have what was cancelled or given back taken in now, or else by whoever has the engine. It never waits: a
        garbage collector that ends a forgotten iterator may run in the middle of a step."""
        if self._lock.acquire(blocking=False):
            try:
                self.engine.take_in()
            finally:
                self._lock.release()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Around whatever steps the engine or wants it for itself; upgrades go on when the last such caller is gone."""
        with self._gate:
            self._steppers += 1
        try:
            yield
        finally:
            with self._gate:
                self._steppers -= 1
            if not self._steppers and len(self.engine.upgrades):
                self._background()
            elif not self._steppers and self._thread is not None and not self.engine.idle:
                self._wake.set()  # it left to this caller what this caller did not do, a cancellation above all

    def _background(self) -> None:
        with self._gate:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._loop, name="forerun-engine", daemon=True)
                self._thread.start()
                atexit.register(self._halt)  # a process must not end in the middle of a forward
        self._wake.set()

    def _loop(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            if self.engine.idle and self._wake.wait(PAUSE):
                continue  # not left alone after all
            while not self._closed and self._serve():
                pass

    def _serve(self) -> bool:
        """One step for those who wait, or of an upgrade; False when there is nothing for this thread to do."""
        if self._steppers and not self._readers:
            return False  # they step by themselves: two threads would only be in each other's way
        try:
            with self._lock:
                went = self.engine.upgrade_step() if self.engine.idle else self.engine.step()
                blocked = self._relieve()
            if blocked:
                time.sleep(BLOCKED)
            return went
        except Exception as error:  # nobody calls this thread: those who wait must hear of it
            with self._lock:
                self.engine.upgrades.clear()
                self.engine.end_all(error)
            return True


def _ends(event: Event) -> bool:
    """Whether this is an answer's last event; an error of the engine is raised to whoever waits for the answer."""
    if event.error is not None:
        raise event.error
    return event.finish_reason is not None
