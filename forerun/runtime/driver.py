"""Steps the engine for the threads that wait for it.

A blocking caller steps the engine itself, under one lock, until its own requests have finished. A step serves all
requests, so several blocked threads simply alternate. Callers that must not block (asyncio) leave the steps to a
background thread; the same thread upgrades approximate K/V and adapts drafters while no request is open. Other uses of
the engine run between its steps (`exclusive`, `lease`). The driver knows no prompt, no text and no sampling.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

from forerun.cache.prefix import pack
from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.sequence import Event, Request
from forerun.errors import ForerunError
from forerun.runtime.lease import EngineLease
from forerun.runtime.look_ahead import LookAhead
from forerun.runtime.threads import Mailbox

LEASE_POLL_S = 0.001  # between two checks whether leased pages have been released
UPGRADE_DELAY_S = 0.1  # without a request before upgrades begin: requests one after the other are not delayed
MAX_STEPS_BEFORE = 8  # an exclusive use: so that streams have eight of nine turns beside work that takes many of them


class StepLock:
    """Held during a step or an exclusive use of the engine, which waits for a few steps at most.

    A loop that steps takes a plain lock again before a thread that waits for it has woken up: an exclusive use waited
    for up to 26 steps (SmolLM2, 8 streams), and what takes many, as a prompt's log-probabilities do, for minutes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = threading.Condition()  # guards what follows
        self._waiting = 0  # exclusive uses
        self._steps_left = 0  # that may run before the next of them

    @contextmanager
    def step(self) -> Iterator[None]:
        with self._turns:
            while self._waiting and self._steps_left <= 0:
                self._turns.wait()
            self._steps_left -= 1
        with self._lock:
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self._wait(1)
        waits = True
        try:
            with self._lock:
                self._wait(-1)
                waits = False
                yield
        finally:
            if waits:  # Ctrl-C came first
                self._wait(-1)

    @contextmanager
    def at_once(self) -> Iterator[bool]:
        """Whether it is held now; never blocks, so that a garbage collector may call it in the middle of a step."""
        held = self._lock.acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def _wait(self, change: int) -> None:
        with self._turns:
            self._waiting += change
            if change < 0 or self._waiting == 1:  # the next one has steps before it, too
                self._steps_left = MAX_STEPS_BEFORE
                self._turns.notify_all()


class Driver:
    """The only owner of an engine's lock."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = StepLock()
        # Guards what follows, for a moment at a time. Re-entrant: inside it the garbage collector may close a forgotten
        # stream, which takes it again
        self._gate = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.closed = False
        self._steppers = 0  # callers that step the engine themselves or use it between steps
        self._readers = 0  # callers that leave the steps to the thread
        self._mailbox: Mailbox[Event] | None = None  # to the event loop of the latest request

    def run(self, requests: list[Request]) -> list[list[Event]]:
        """Run requests to their ends; the events of each, in order. An error or Ctrl-C cancels all of them."""
        inboxes: list[list[Event]] = [[] for _ in requests]
        ended: list[Event] = []
        for request, inbox in zip(requests, inboxes, strict=True):
            request.sink = _sink(inbox, ended)
        self.drive(requests, ended)
        return inboxes

    def drive(self, requests: list[Request], ended: list[Event], on_finish: Callable[[], None] = lambda: None) -> None:
        """The same for requests that have sinks: these put each answer's last event into `ended`, too. `on_finish` is
        called at the end of each answer."""
        open_answers = sum(request.params.n for request in requests)
        done = 0
        with self._stepping():
            try:
                for request in requests:
                    self._submit(request)
                while done < open_answers:
                    self._step(requests)
                    while ended:  # another caller's step may add to it at any time
                        done += _ends(ended.pop(0))
                        on_finish()
            except BaseException:
                self._abandon(requests)
                raise

    def request(
        self, ids: list[int], params: SamplingParams, session: str | None = None, looks_ahead: bool = True
    ) -> Request:
        """A request that is checked and packed, with what it names prepared: `stream` and `astream` only queue it. For
        any thread but an event loop's, since a long prompt or a grammar takes long. `looks_ahead`: False leaves
        `look_ahead` to the caller, before the request is queued."""
        self.prepare(params)
        request = Request(ids, params, sink=lambda event: None, session=session)
        self.engine.intake.receive(request)
        if looks_ahead:
            self.look_ahead(request)
        return request

    def look_ahead(self, request: Request, check_cancelled: Callable[[], None] = lambda: None) -> None:
        """Run what an answer needs that is drawn from the model conditioned on its grammar; others need nothing."""
        if request.params.conditional:
            ids, params = list(request.prompt_ids), request.params
            request.conditional = LookAhead(self, ids, params, request.client, check_cancelled).run()

    def stream(self, request: Request) -> Iterator[Event]:
        """Events as they come; leaving the loop early cancels the request."""
        inbox: deque[Event] = deque()
        request.sink, request.streamed = inbox.append, True
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

    async def astream(self, request: Request | Callable[[], Request]) -> AsyncIterator[Event]:
        """The same for asyncio; a background thread does the stepping. A function is called in a thread for the request
        that it makes; a request that was made before knows whether it is streamed."""
        if not isinstance(request, Request):
            request = await asyncio.to_thread(request)
            request.streamed = True
        mailbox = self._mailbox_to(asyncio.get_running_loop())
        inbox: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            mailbox.put(inbox, event)

        request.sink = sink
        self._submit(request)
        with self._gate:  # several threads may have event loops
            self._readers += 1
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
            with self._gate:
                self._readers -= 1

    def _mailbox_to(self, loop: asyncio.AbstractEventLoop) -> Mailbox[Event]:
        if self._mailbox is None or self._mailbox.loop is not loop:  # readers on another loop keep theirs
            self._mailbox = Mailbox(loop)
        return self._mailbox

    def upgrade(self) -> None:
        """Block until the K/V of all answers from drafted prompts is exact, as far as there is room for it, and a
        drafter that adapts has learnt from what there is."""
        self.check_open()
        busy = True
        with self._stepping():
            while busy and not self.closed:
                with self._lock.step():
                    busy = self.engine.upgrade_step() if self.engine.idle else self.engine.step()

    def close(self) -> None:
        """Cancel all open requests; from now on every call is an error."""
        with self._gate:
            self.closed = True
        self._halt()
        with self._lock.exclusive():
            self.engine.end_all()
            if self.engine.tiers is not None:
                self.engine.tiers.close(self.engine.tree)

    def save(self, tokens: list[int]) -> None:
        """Write the exact K/V of a text to the disk tier; the engine can step while the disk is written."""
        tiers, at, data = self.engine.tiers, 0, pack(tokens)
        while tiers is not None and not self.closed:
            with self.exclusive():
                copied = tiers.copy(data, self.engine.tree.match(tokens), at)
            if copied is None:
                return
            at = copied[0]
            tiers.write(copied[1], copied[2])

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """The engine between two steps: no other thread steps it until the context ends."""
        with self._stepping(), self._lock.exclusive():
            yield self.engine

    @contextmanager
    def lease(self, check_cancelled: Callable[[], None] = lambda: None) -> Iterator[EngineLease]:
        """Pages and exclusive uses for code that runs forwards of its own while requests go on. `check_cancelled`:
        called before each use; raises where the work is for nothing."""
        self.check_open()
        pages = self.engine.leases.open()
        with self._stepping():
            try:
                yield EngineLease(self, pages, check_cancelled)
            finally:
                self.engine.leases.release(pages)
                self.collect()

    def _halt(self) -> None:
        self.closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._halt)

    def check_open(self) -> None:
        if self.closed:
            raise ForerunError("this LLM is closed", "make a new one, or ask inside the `with` block")

    def _submit(self, request: Request) -> None:
        self.check_open()
        self.engine.intake.receive(request)  # may compile a grammar: not inside the gate
        with self._gate:
            self.check_open()
            self.engine.submit(request)

    def prepare(self, params: SamplingParams) -> None:
        """Make the drafters and the prefill source that a request needs, before its time starts to count."""
        self.check_open()
        if self.engine.prepared(params):
            if not params.prefill.exact:
                self.engine.speculative_prefill.check(params.prefill, 1)  # raises where prompts cannot be drafted so
            return
        with self.exclusive() as engine:
            engine.prepare(params)

    def _step(self, mine: list[Request]) -> None:
        """One step by a caller that waits for these requests."""
        with self._lock.step():
            self.engine.step()
            blocked = self._blocked_by_leases(mine)
        if blocked:
            time.sleep(LEASE_POLL_S)

    def _blocked_by_leases(self, mine: Sequence[Request] = ()) -> bool:
        """Whether nothing can run until leased pages are released. Idle leases are revoked; a request of `mine` whose
        own thread holds all leases fails."""
        scheduler, leases = self.engine.scheduler, self.engine.leases
        if not scheduler.waiting or scheduler.running or not leases or leases.revoke_idle():
            return False
        seq = scheduler.waiting[0]
        error = leases.deadlock_error() if any(request is seq.request for request in mine) else None
        if error is not None:
            self.engine.fail(seq, error)
        return error is None

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.cancel(request.id)
        self.collect()

    def collect(self) -> None:
        """Free what was cancelled or released, now, or else at the next step. It never blocks: the garbage collector
        may close a forgotten iterator in the middle of a step."""
        with self._lock.at_once() as held:
            if held:
                self.engine.process_inbox()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Around all that steps the engine or uses it between steps; upgrades go on after the last such caller."""
        with self._gate:
            self._steppers += 1
        try:
            yield
        finally:
            with self._gate:
                self._steppers -= 1
            if not self._steppers and self.engine.has_idle_work:
                self._background()
            elif not self._steppers and self._thread is not None and not self.engine.idle:
                self._wake.set()  # what this caller has left undone, a cancellation above all

    def _background(self) -> None:
        with self._gate:
            if self._thread is None and not self.closed:
                self._thread = threading.Thread(target=self._loop, name="forerun-engine", daemon=True)
                self._thread.start()
                atexit.register(self._halt)  # a process must not end in the middle of a forward
        self._wake.set()

    def _loop(self) -> None:
        while not self.closed:
            self._wake.wait()
            self._wake.clear()
            if self.engine.idle and self._wake.wait(UPGRADE_DELAY_S):
                continue  # a new request
            while not self.closed and self._serve():
                pass

    def _serve(self) -> bool:
        """One step of requests or of an upgrade; False when there is nothing for this thread to do."""
        if self._steppers and not self._readers:
            return False  # blocked callers step: two threads would only contend for the lock
        try:
            with self._lock.step():
                went = self.engine.upgrade_step() if self.engine.idle else self.engine.step()
                blocked = self._blocked_by_leases()
            if blocked:
                time.sleep(LEASE_POLL_S)
            return went
        except Exception as error:  # this thread has no caller: all open requests end with the error
            with self._lock.exclusive():
                self.engine.upgrades.clear()
                self.engine.end_all(error)
            return True


def _sink(inbox: list[Event], ended: list[Event]) -> Callable[[Event], None]:
    """Puts events into an inbox, and those that end an answer into `ended` as well."""

    def receive(event: Event) -> None:
        inbox.append(event)
        if event.finish_reason is not None or event.error is not None:
            ended.append(event)

    return receive


def _ends(event: Event) -> bool:
    """Whether this is an answer's last event; the answer's error is raised here."""
    if event.error is not None:
        raise event.error
    return event.finish_reason is not None
